//! Which faults a runc has, by the version that it prints.

/// A version of runc: `1.1.5+ds1` is 1.1.5, `1.2.0-rc.2` is the second candidate for 1.2.0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Runc {
    number: [u32; 3],
    /// `None` for a release.
    candidate: Option<u32>,
}

impl Runc {
    /// Parses the output of `--version`; `None` if another runtime wrote it, or if the version is no number.
    pub fn parse(output: &str) -> Option<Self> {
        let text = output.lines().find_map(|line| line.trim().strip_prefix("runc version "))?.trim();
        let text = text.strip_prefix('v').unwrap_or(text);
        let end = text.find(|c: char| c != '.' && !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, rest) = text.split_at(end);
        let mut parts = number.split('.').map(|part| part.parse().ok());
        let mut part = || parts.next().unwrap_or(Some(0));
        let number = [part()?, part()?, part()?];
        Some(Self { number, candidate: candidate(rest) })
    }

    /// With the systemd cgroup driver it leaves out device rules of nodes without a link in /dev/char.
    pub fn drops_rules(self) -> bool {
        matches!(self.number, [1, 1, 3..=6])
    }

    /// CVE-2024-45310: mended in 1.1.14 and 1.2.0-rc.3. A distribution may have mended an older one.
    pub fn is_raced(self) -> bool {
        self.number < [1, 1, 14] || self.number == [1, 2, 0] && self.candidate.is_some_and(|n| n < 3)
    }
}

/// The number in `-rc.2`, `-rc93` or, as Debian has it, `~rc10`.
fn candidate(rest: &str) -> Option<u32> {
    let number = rest.strip_prefix(['-', '~'])?.strip_prefix("rc")?;
    let number = number.strip_prefix('.').unwrap_or(number);
    number.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_told_from_whatever_stands_around_it() {
        let release = |number| Some(Runc { number, candidate: None });
        let candidate = |number, n| Some(Runc { number, candidate: Some(n) });
        let debian = "runc version 1.1.5+ds1\ncommit: 1.1.5+ds1-1+deb12u1\nspec: 1.0.2-dev\ngo: go1.19.8\n";
        for (output, want) in [
            (debian, release([1, 1, 5])),
            ("runc version 1.1.12-0ubuntu2~22.04.1\nspec: 1.0.2-dev\n", release([1, 1, 12])),
            ("runc version 1.2.0-rc.2+dev\r\n", candidate([1, 2, 0], 2)),
            ("runc version 1.0.0~rc6+dfsg1", candidate([1, 0, 0], 6)),
            ("runc version 1.0.0-rc93", candidate([1, 0, 0], 93)),
            ("level=warning msg=\"no cgroup\"\nrunc version v1.3", release([1, 3, 0])),
            ("runc version unknown", None),
            ("runc version 1.x.3", None),
            ("runc version 99999999999.1.1", None),
            ("runc version 1..3", None),
            ("runc version ", None),
            ("runc", None),
            ("crun version 1.8.1\ncommit: f8a096be\n", None),
            ("youki version 0.3.3\n", None),
            ("", None),
        ] {
            assert_eq!(Runc::parse(output), want, "{output:?}");
        }
    }

    #[test]
    fn faulty_versions_are_told_from_their_neighbours() {
        for (version, drops, raced) in [
            ("1.0.0-rc93", false, true),
            ("1.1.2", false, true),
            ("1.1.3", true, true),
            ("1.1.5+ds1", true, true),
            ("1.1.6-0ubuntu1", true, true),
            ("1.1.7", false, true),
            ("1.1.13", false, true),
            ("1.1.14", false, false),
            ("1.1.30", false, false),
            ("1.2.0-rc.1", false, true),
            ("1.2.0-rc.2", false, true),
            ("1.2.0-rc.3", false, false),
            ("1.2.0", false, false),
            ("1.3.0-rc.1", false, false),
            ("2.0.0", false, false),
            ("11.1.5", false, false),
        ] {
            let runc = Runc::parse(&format!("runc version {version}\n")).unwrap();
            assert_eq!((runc.drops_rules(), runc.is_raced()), (drops, raced), "{version}");
        }
    }
}
