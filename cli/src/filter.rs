//! `--filter KEY=VALUE`: what a command shows of its lists.

/// A key that a list can be chosen by, and the values that it may have; none for any.
pub type Key = (&'static str, &'static [&'static str]);

/// A key, and the value that it must have; `*` in it stands for any text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    key: &'static str,
    value: String,
}

/// Reads filters by one of `keys`.
pub fn by(keys: &'static [Key]) -> impl Fn(&str) -> Result<Filter, String> + Clone {
    move |text| {
        let names = || keys.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
        let (name, value) =
            text.split_once('=').ok_or_else(|| format!("must be KEY=VALUE; keys: {}", names()))?;
        let known = keys.iter().find(|(known, _)| *known == name);
        let (key, words) = known.ok_or_else(|| format!("{name:?} is no key; there are {}", names()))?;
        if !words.is_empty() && !words.iter().any(|word| is_like(word, value)) {
            return Err(format!("{name} is one of {}", words.join(", ")));
        }
        Ok(Filter { key, value: value.to_owned() })
    }
}

/// Whether something fits whose values of a key are `values`: of several filters by one key any, and each key
/// that is named.
pub fn fits(filters: &[Filter], values: impl Fn(&str) -> Vec<String>) -> bool {
    filters.iter().all(|named| {
        let values = values(named.key);
        let of_key = filters.iter().filter(|filter| filter.key == named.key);
        of_key.flat_map(|filter| values.iter().map(move |value| (filter, value))).any(|(filter, value)| {
            // The beginning of an id will do, as everywhere.
            let open = if filter.key == "id" { "*" } else { "" };
            is_like(value, &format!("{}{open}", filter.value))
        })
    })
}

/// Whether `text` is the pattern, in which `*` stands for any text.
fn is_like(text: &str, pattern: &str) -> bool {
    let Some((begin, rest)) = pattern.split_once('*') else { return text == pattern };
    let (between, end) = rest.rsplit_once('*').unwrap_or(("", rest));
    let within = text.strip_prefix(begin).and_then(|text| text.strip_suffix(end));
    // The first place that fits leaves most for those that follow.
    let mut pieces = between.split('*');
    within.is_some_and(|within| {
        let left = pieces.try_fold(within, |text, piece| text.get(text.find(piece)? + piece.len()..));
        left.is_some()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_any_text() {
        for (text, pattern, want) in [
            ("web", "web", true),
            ("web", "we", false),
            ("team/web", "team/*", true),
            ("team/web", "*/web", true),
            ("pytorch:2.4", "*torch*", true),
            ("pytorch:2.4", "*torch", false),
            ("", "*", true),
            ("ü", "*ü*", true),
            ("a*b", "a*b", true),
            ("abab", "*ab*ab", true),
            ("ab", "*ab*ab", false),
            ("a", "a*a", false),
            (&"a".repeat(10_000), &("*a".repeat(1_000) + "b"), false),
        ] {
            assert_eq!(is_like(text, pattern), want, "{text} {pattern}");
        }
    }

    #[test]
    fn an_unknown_key_is_told_with_those_that_there_are() {
        let parse = by(&[("name", &[]), ("namespace", &[]), ("state", &["active", "gone"])]);
        assert!(parse("name=web").is_ok() && parse("name=a=b").is_ok() && parse("state=act*").is_ok());
        assert!(parse("state=running").unwrap_err().contains("active"));
        for wrong in ["web", "owner=me", "=x", ""] {
            assert!(parse(wrong).unwrap_err().contains("namespace"), "{wrong}");
        }
    }

    #[test]
    fn any_value_of_a_key_fits_and_every_key_must() {
        let parse = by(&[("name", &[]), ("id", &[])]);
        let values = |key: &str| match key {
            "name" => vec!["web".to_owned(), "team/web".to_owned()],
            _ => vec!["4f00".to_owned()],
        };
        for (filters, want) in [
            (&["name=web"][..], true),
            (&["name=db", "name=team/*"], true),
            (&["name=web", "id=4f"], true),
            (&["name=web", "id=f00"], false),
            (&["name=w"], false),
            (&[], true),
        ] {
            let filters: Vec<Filter> = filters.iter().map(|text| parse(text).unwrap()).collect();
            assert_eq!(fits(&filters, values), want, "{filters:?}");
        }
    }
}
