//! A unified diff of two texts, as `diff -u` prints it.

/// One line of an edit script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Line<'a> {
    Both(&'a str),
    Old(&'a str),
    New(&'a str),
}

const CONTEXT: usize = 3;

/// What turns `old` into `new`, with `old_name` and `new_name` in the heading; empty where nothing differs.
pub fn unified(old_name: &str, new_name: &str, old: &str, new: &str) -> String {
    let script = script(&lines(old), &lines(new));
    let changed: Vec<usize> = (0..script.len()).filter(|at| !matches!(script[*at], Line::Both(_))).collect();
    let Some((first, rest)) = changed.split_first() else { return String::new() };
    let mut out = format!("--- {old_name}\n+++ {new_name}\n");
    let (mut start, mut end) = (*first, *first);
    for at in rest {
        if at - end > 2 * CONTEXT {
            out += &hunk(&script, start, end);
            start = *at;
        }
        end = *at;
    }
    out + &hunk(&script, start, end)
}

fn lines(text: &str) -> Vec<&str> {
    text.split_inclusive('\n').collect()
}

/// The shortest edit script (E. W. Myers, "An O(ND) difference algorithm and its variations", 1986). Settings
/// differ by few lines, so few rounds are needed however long the files are.
fn script<'a>(old: &[&'a str], new: &[&'a str]) -> Vec<Line<'a>> {
    let offset = old.len() + new.len() + 1;
    let mut furthest = vec![0_usize; 2 * offset + 1];
    let mut rounds: Vec<Vec<usize>> = Vec::new();
    for round in 0..offset {
        rounds.push(furthest.clone());
        for diagonal in (offset - round..=offset + round).step_by(2) {
            let mut x = step(&furthest, diagonal, offset, round).1;
            while x < old.len() && old.get(x) == new.get(x + offset - diagonal) {
                x += 1;
            }
            furthest[diagonal] = x;
            if x >= old.len() && x + offset - diagonal >= new.len() {
                return trace(&rounds, old, new, offset);
            }
        }
    }
    Vec::new()
}

/// The diagonal from which a round comes to `diagonal`, and the place in the old text where it arrives.
fn step(furthest: &[usize], diagonal: usize, offset: usize, round: usize) -> (usize, usize) {
    if round == 0 {
        return (diagonal, 0);
    }
    let down = diagonal == offset - round
        || diagonal != offset + round && furthest[diagonal - 1] < furthest[diagonal + 1];
    if down { (diagonal + 1, furthest[diagonal + 1]) } else { (diagonal - 1, furthest[diagonal - 1] + 1) }
}

fn trace<'a>(rounds: &[Vec<usize>], old: &[&'a str], new: &[&'a str], offset: usize) -> Vec<Line<'a>> {
    let (mut x, mut y) = (old.len(), new.len());
    let mut script = Vec::new();
    for (round, furthest) in rounds.iter().enumerate().rev() {
        let diagonal = offset + x - y;
        let (from, arrives) = step(furthest, diagonal, offset, round);
        while x > arrives {
            (x, y) = (x - 1, y - 1);
            script.push(Line::Both(old[x]));
        }
        if round == 0 {
            break;
        }
        if from > diagonal {
            y -= 1;
            script.push(Line::New(new[y]));
        } else {
            x -= 1;
            script.push(Line::Old(old[x]));
        }
    }
    script.reverse();
    script
}

/// The changes from `start` to `end` of the script, with their context.
fn hunk(script: &[Line], start: usize, end: usize) -> String {
    let start = start.saturating_sub(CONTEXT);
    let end = (end + 1 + CONTEXT).min(script.len());
    let count = |lines: &[Line], old: bool| {
        lines
            .iter()
            .filter(|line| match line {
                Line::Both(_) => true,
                Line::Old(_) => old,
                Line::New(_) => !old,
            })
            .count()
    };
    let range = |old: bool| {
        let (before, within) = (count(&script[..start], old), count(&script[start..end], old));
        let first = if within == 0 { before } else { before + 1 };
        format!("{first},{within}")
    };
    let mut out = format!("@@ -{} +{} @@\n", range(true), range(false));
    for line in &script[start..end] {
        let (sign, text) = match line {
            Line::Both(text) => (' ', text),
            Line::Old(text) => ('-', text),
            Line::New(text) => ('+', text),
        };
        out += &format!("{sign}{text}");
        if !text.ends_with('\n') {
            out += "\n\\ No newline at end of file\n";
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_diff_shows_what_differs_with_three_lines_around_it() {
        let old = "1\n2\n3\n4\n5\n6\n7\n8\n9\n10\n11\n12\n13";
        let new = "1\n2\n3\n4\nfive\n6\n7\n8\n9\n10\n11\n12\n13\n14\n";
        let want = "--- a\n+++ b\n@@ -2,7 +2,7 @@\n 2\n 3\n 4\n-5\n+five\n 6\n 7\n 8\n@@ -10,4 +10,5 @@\n 10\n 11\n 12\n-13\n\
                    \\ No newline at end of file\n+13\n+14\n";
        assert_eq!(unified("a", "b", old, new), want);
        assert_eq!(unified("a", "b", "", "x\n"), "--- a\n+++ b\n@@ -0,0 +1,1 @@\n+x\n");
        assert_eq!(unified("a", "b", "x\n", ""), "--- a\n+++ b\n@@ -1,1 +0,0 @@\n-x\n");
        assert_eq!(unified("a", "b", old, old), "");
    }
}
