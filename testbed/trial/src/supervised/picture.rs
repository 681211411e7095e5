//! Draws which container uses a card, millisecond by millisecond.

use std::fmt::Write as _;

use super::case::Outcome;

/// Pixels of a millisecond, of a row with its caption, of its band, and of the margin.
const MILLISECOND: usize = 2;
const ROW: usize = 58;
const BAND: usize = 26;
const MARGIN: usize = 16;
/// Colours of the first containers, distinguishable for colour-blind readers too.
const COLOURS: [&str; 3] = ["#0072b2", "#e69f00", "#009e73"];
const IDLE: &str = "#e8e8e8";

/// Draws these runs as an SVG image, one captioned row each, for `length` milliseconds starting at `from`.
#[must_use]
pub fn picture(rows: &[(String, Outcome)], (from, length): (usize, usize)) -> String {
    let (width, height) = (length * MILLISECOND + 2 * MARGIN, rows.len() * ROW + 2 * MARGIN);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\" font-family=\"sans-serif\" font-size=\"14\">\n<rect width=\"{width}\" \
         height=\"{height}\" fill=\"#ffffff\"/>\n"
    );
    for (number, (words, outcome)) in rows.iter().enumerate() {
        let top = MARGIN + number * ROW;
        let _ = writeln!(svg, "<text x=\"{MARGIN}\" y=\"{}\">{words}</text>", top + 16);
        for (begin, end, owner) in stretches(outcome, from, length) {
            let (left, width) = (MARGIN + begin * MILLISECOND, (end - begin) * MILLISECOND);
            let colour = owner.map_or(IDLE, |owner| COLOURS[owner % COLOURS.len()]);
            let _ = writeln!(
                svg,
                "<rect x=\"{left}\" y=\"{}\" width=\"{width}\" height=\"{BAND}\" fill=\"{colour}\"/>",
                top + 22
            );
        }
    }
    svg.push_str("</svg>\n");
    svg
}

/// Lists the main user of each millisecond as stretches `(from, to, who)`; `None` where the card was idle for
/// most of it.
fn stretches(outcome: &Outcome, from: usize, length: usize) -> Vec<(usize, usize, Option<usize>)> {
    let mut all: Vec<(usize, usize, Option<usize>)> = Vec::new();
    for at in 0..length {
        let busy = |who: &usize| outcome.busy[*who].get(from + at).copied().unwrap_or(0);
        let most = (0..outcome.busy.len()).max_by_key(busy).filter(|who| busy(who) >= 400_000);
        match all.last_mut() {
            Some((_, end, who)) if *who == most => *end = at + 1,
            _ => all.push((at, at + 1, most)),
        }
    }
    all
}
