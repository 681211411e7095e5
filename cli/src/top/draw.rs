//! Draws a look at the node: a line for each GPU, a line for each share, and what the keys do.

use std::ops::RangeInclusive;
use std::time::Duration;

use ratatui::Frame;
use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Paragraph, Widget};

use super::rates::Rates;
use super::view::{Row, View};
use crate::overview::{GpuView, Overview, PartView, ShareView};
use crate::table::{escaped, span};

const GIB: u64 = 1 << 30;
/// The narrowest column of names.
const NAMES: usize = 14;
/// The column of GPUs' numbers.
const NUMBERS: usize = 5;
/// The widths of a GPU's bar.
const BAR: RangeInclusive<usize> = 8..=60;

/// How things are marked. Marks that matter are words or signs too, so nothing is lost without colours; the
/// colours are the terminal's own, which it has chosen for its ground.
#[derive(Clone, Copy)]
pub struct Theme {
    full: Style,
    held: Style,
    soft: Style,
    used: Style,
    heading: Style,
    selected: Style,
}

impl Theme {
    /// Without colours where NO_COLOR is set (no-color.org).
    pub fn of_environment() -> Self {
        match std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty()) {
            true => Self::plain(),
            false => Self::coloured(),
        }
    }

    const fn plain() -> Self {
        let (plain, bold) = (Style::new(), Style::new().add_modifier(Modifier::BOLD));
        let reversed = Style::new().add_modifier(Modifier::REVERSED);
        Self { full: bold, held: plain, soft: plain, used: plain, heading: bold, selected: reversed }
    }

    const fn coloured() -> Self {
        Self {
            full: Style::new().fg(Color::Red).add_modifier(Modifier::BOLD),
            held: Style::new().fg(Color::Yellow),
            soft: Style::new().add_modifier(Modifier::DIM),
            used: Style::new().fg(Color::Green),
            ..Self::plain()
        }
    }
}

/// Draws into a terminal.
pub fn frame(frame: &mut Frame, overview: &Overview, rates: &Rates, view: &View, theme: Theme) {
    let area = frame.area();
    page(area, frame.buffer_mut(), overview, rates, view, theme);
}

/// A frame as text, without what does not fill it.
pub fn text(overview: &Overview, rates: &Rates, (width, height): (u16, u16)) -> String {
    let view = View::default();
    let lines =
        4 + overview.gpus.len() + overview.shares.iter().map(|share| share.parts.len().max(1)).sum::<usize>();
    let height = height.min(u16::try_from(lines).unwrap_or(height)).max(5);
    let area = Rect::new(0, 0, width, height);
    let mut buffer = Buffer::empty(area);
    page(area, &mut buffer, overview, rates, &view, Theme::plain());
    let mut lines = lines_of(&buffer);
    lines.pop(); // the keys
    lines.join("\n") + "\n"
}

/// The lines of a buffer, without spaces at their ends.
fn lines_of(buffer: &Buffer) -> Vec<String> {
    let width = usize::from(buffer.area.width).max(1);
    let line = |cells: &[ratatui::buffer::Cell]| {
        let text: String = cells.iter().map(ratatui::buffer::Cell::symbol).collect();
        text.trim_end().to_owned()
    };
    buffer.content.chunks(width).map(line).collect()
}

fn page(area: Rect, buffer: &mut Buffer, overview: &Overview, rates: &Rates, view: &View, theme: Theme) {
    // Shares have half of it, if there are so many.
    let lines = |count: usize| u16::try_from(count).unwrap_or(u16::MAX);
    let kept = lines(view.rows(overview, rates).len()).saturating_add(1).min(area.height / 2);
    let gpus = lines(overview.gpus.len()).clamp(1, area.height.saturating_sub(2 + kept).max(1));
    let heights =
        [Constraint::Length(1), Constraint::Length(gpus), Constraint::Min(2), Constraint::Length(1)];
    let [head, cards, list, foot] = Layout::vertical(heights).areas(area);
    Paragraph::new(header(overview, theme)).render(head, buffer);
    let width = usize::from(area.width);
    let lines: Vec<Line> = if overview.gpus.is_empty() {
        vec![Line::from("no GPU is there")]
    } else {
        let room = usize::from(gpus);
        let hidden = overview.gpus.len().saturating_sub(room);
        let shown = overview.gpus.iter().take(if hidden > 0 { room - 1 } else { room });
        let more = (hidden > 0).then(|| Line::from(format!("     and {} more GPUs", hidden + 1)));
        let bars = bars(&overview.gpus, width);
        shown.map(|gpu| card(gpu, width, bars, theme)).chain(more).collect()
    };
    Paragraph::new(lines).render(cards, buffer);
    shares(list, buffer, overview, rates, view, theme);
    Paragraph::new(Span::styled(view.footer(), theme.soft)).render(foot, buffer);
}

fn header(overview: &Overview, theme: Theme) -> Line<'static> {
    let meter = match overview.is_metered {
        true => "",
        false => "  NO METER: figures are the containers' own",
    };
    let refused = match overview.refusals.first() {
        Some(last) => format!("  last refusal {} ago", age(overview, last.at)),
        None => String::new(),
    };
    let count = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    let (gpus, shares) = (count(overview.gpus.len(), "GPU"), count(overview.shares.len(), "share"));
    Line::from(vec![
        Span::styled("gpushare top", theme.heading),
        Span::raw(format!("  driver {}  {gpus}  {shares}{refused}", overview.driver)),
        Span::styled(meter, theme.full),
    ])
}

/// A bar of `width` cells with two parts: used, and granted beyond that.
fn bar(width: usize, used: f64, granted: f64) -> (String, String, String) {
    let cells = |part: f64| -> usize {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "cells of a terminal"
        )]
        let cells = (part.clamp(0.0, 1.0) * width as f64).round() as usize;
        cells.min(width)
    };
    let used = cells(used);
    let granted = cells(granted).saturating_sub(used);
    ("█".repeat(used), "▒".repeat(granted), "·".repeat(width - used - granted))
}

fn part(some: u64, all: u64) -> f64 {
    crate::page::part_of(some, all)
}

/// How wide the bars of GPUs are in a line of `width` cells, and whether their models have room behind them.
fn bars(gpus: &[GpuView], width: usize) -> (usize, bool) {
    let longest = |length: fn(&GpuView) -> usize| {
        gpus.iter().filter(|gpu| gpu.fault.is_none()).map(length).max().unwrap_or(0)
    };
    let figures = longest(|gpu| figures(gpu).iter().map(|word| word.chars().count()).sum());
    let models = longest(|gpu| 2 + escaped(&gpu.model).chars().count());
    let room = width.saturating_sub(NUMBERS + figures);
    match room.checked_sub(models) {
        Some(bar) if bar > *BAR.start() => (bar.min(*BAR.end()), true),
        _ => (room.clamp(*BAR.start(), *BAR.end()), false),
    }
}

/// What is told of a GPU behind its bar, the most important first. Figures of several GPUs stand below each
/// other.
fn figures(gpu: &GpuView) -> Vec<String> {
    let all = gib(gpu.memory_bytes.unwrap_or(0));
    let memory = format!(" {:>6} used, {:>6} of {all} granted", gib(gpu.used_bytes), gib(gpu.granted_bytes));
    let rest = [
        gpu.is_cordoned.then(|| "  CORDONED".to_owned()),
        gpu.utilisation_percent.map(|percent| format!("  {percent:>3}%")),
        gpu.celsius.map(|celsius| format!("  {celsius}°C")),
        gpu.watts.map(|watts| format!("  {watts:>4.0}W")),
        gpu.sm_megahertz.map(|clock| format!("  {clock:>4}MHz")),
    ];
    std::iter::once(memory).chain(rest.into_iter().flatten()).collect()
}

fn card(gpu: &GpuView, width: usize, (wide, has_model): (usize, bool), theme: Theme) -> Line<'static> {
    if let Some(fault) = &gpu.fault {
        return Line::from(Span::styled(format!("{:>4} {}", gpu.number, escaped(fault)), theme.full));
    }
    let all = gpu.memory_bytes.unwrap_or(0);
    let (used, granted, free) = bar(wide, part(gpu.used_bytes, all), part(gpu.granted_bytes, all));
    let mut told = vec![
        Span::raw(format!("{:>4} ", gpu.number)),
        Span::styled(used, theme.used),
        Span::raw(granted),
        Span::styled(free, theme.soft),
    ];
    let mut room = width.saturating_sub(NUMBERS + wide);
    let model = has_model.then(|| format!("  {}", escaped(&gpu.model)));
    for word in figures(gpu).into_iter().chain(model) {
        // Half a figure would be another one.
        let Some(left) = room.checked_sub(word.chars().count()) else { break };
        room = left;
        told.push(Span::raw(word));
    }
    Line::from(told)
}

fn gib(bytes: u64) -> String {
    format!("{:.1}G", part(bytes, GIB))
}

/// A column behind the names: its heading, its width, and whether it goes first where there is little room.
struct Column {
    heading: &'static str,
    width: usize,
    rank: u8,
}

const COLUMNS: [Column; 9] = [
    Column { heading: "GPU", width: 4, rank: 0 },
    Column { heading: "MEMORY", width: 14, rank: 0 },
    Column { heading: "", width: 8, rank: 2 },
    Column { heading: "CTX", width: 5, rank: 4 },
    Column { heading: "BUSY", width: 5, rank: 0 },
    Column { heading: "OF", width: 5, rank: 1 },
    Column { heading: "HELD", width: 5, rank: 1 },
    Column { heading: "OOM", width: 5, rank: 2 },
    Column { heading: "AGE", width: 5, rank: 3 },
];

/// The columns for which a terminal of this width has room, and how wide names are then: no wider than
/// `longest`, so that the eye finds what belongs to a name.
fn columns(width: usize, longest: usize) -> (Vec<usize>, usize) {
    // What contexts take is worth less than names that can be read.
    let mut ranks = [(4, 2 * NAMES), (3, NAMES), (2, NAMES), (1, NAMES)].into_iter();
    let mut shown: Vec<usize> = (0..COLUMNS.len()).collect();
    loop {
        let taken: usize = shown.iter().map(|index| COLUMNS[*index].width + 1).sum();
        match ranks.next() {
            Some((rank, names)) if width < taken + names => shown.retain(|index| COLUMNS[*index].rank < rank),
            Some((4, _)) => {}
            _ => return (shown, width.saturating_sub(taken).min(longest.max(NAMES)).max(1)),
        }
    }
}

/// `text` in `width` cells. What is left out is marked, in the middle: names of one origin begin alike.
fn cell(text: &str, width: usize, is_right: bool) -> String {
    let length = text.chars().count();
    if length > width {
        let end = width.saturating_sub(1) / 2;
        let begin = width.saturating_sub(1) - end;
        return text.chars().take(begin).chain(['…']).chain(text.chars().skip(length - end)).collect();
    }
    let space = " ".repeat(width - length);
    if is_right { space + text } else { text.to_owned() + &space }
}

fn shares(area: Rect, buffer: &mut Buffer, overview: &Overview, rates: &Rates, view: &View, theme: Theme) {
    let longest = overview.shares.iter().map(|share| title(share).chars().count()).max().unwrap_or(0);
    let (shown, names) = columns(usize::from(area.width), longest);
    let heading = shown.iter().map(|index| cell(COLUMNS[*index].heading, COLUMNS[*index].width, true));
    let heading = format!("{} {}", cell("CONTAINER", names, false), heading.collect::<Vec<_>>().join(" "));
    let mut lines = vec![Line::from(Span::styled(heading, theme.heading))];
    let rows = view.rows(overview, rates);
    let room = usize::from(area.height).saturating_sub(1);
    let processes = view.processes().unwrap_or_default();
    let room =
        room.saturating_sub(if view.processes().is_some() { processes.len().min(room / 2) + 1 } else { 0 });
    let first = view.selected().saturating_sub(room.saturating_sub(1));
    for (index, row) in rows.iter().enumerate().skip(first).take(room) {
        let line = match row {
            Row::Group { name, used_bytes, shares } => Line::from(Span::styled(
                format!("{}  {} in {shares} shares", escaped(name), gib(*used_bytes)),
                theme.heading,
            )),
            Row::Part(share, part) => share_line(overview, (share, part), rates, &shown, names, theme),
        };
        let is_selected = index == view.selected() && view.is_live();
        lines.push(if is_selected { line.style(theme.selected) } else { line });
    }
    if rows.is_empty() {
        lines.push(Line::from(match overview.shares.is_empty() {
            true => "no container holds a share",
            false => "no share fits the filter",
        }));
    }
    if view.processes().is_some() {
        lines.push(Line::from(Span::styled("      PID  PROCESS", theme.heading)));
        let line =
            |process: &crate::overview::Process| format!("{:>9}  {}", process.pid, escaped(&process.name));
        lines.extend(
            processes.iter().take(usize::from(area.height) / 2).map(|process| Line::from(line(process))),
        );
    }
    Paragraph::new(lines).render(area, buffer);
}

/// What stands in the column of names.
fn title(share: &ShareView) -> String {
    escaped(&match (share.violations.is_empty(), share.state) {
        (false, _) => format!("CHEATING {}", share.name),
        (true, "active") => share.name.clone(),
        (true, state) => format!("{} ({state})", share.name),
    })
}

fn share_line(
    overview: &Overview,
    (share, part): (&ShareView, &PartView),
    rates: &Rates,
    shown: &[usize],
    names: usize,
    theme: Theme,
) -> Line<'static> {
    let used = part.used_bytes;
    let is_full = part.is_full();
    let is_cheating = !share.violations.is_empty();
    let percent =
        |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{:.0}%", value * 100.0));
    let held = rates.held(share.lease, part);
    let (full, rest, free) = bar(8, crate::page::part_of(used, part.limit_bytes.unwrap_or(0)), 0.0);
    let mut spans = vec![Span::styled(
        cell(&title(share), names, false),
        if is_cheating { theme.full } else { Style::new() },
    )];
    for index in shown {
        let width = COLUMNS[*index].width;
        let right = |text: String| cell(&text, width, true);
        spans.push(Span::raw(" "));
        spans.push(match index {
            0 => Span::raw(right(part.gpu.clone())),
            // Nobody counts what containers use that take turns.
            1 if part.limit_bytes.is_none() => Span::raw(right("-".to_owned())),
            1 => {
                let limit = part.limit_bytes.map_or_else(String::new, |limit| format!("/{}", gib(limit)));
                let mark = if is_full { "!" } else { "" };
                Span::styled(
                    right(format!("{mark}{}{limit}", gib(used))),
                    if is_full { theme.full } else { Style::new() },
                )
            }
            2 if part.limit_bytes.is_none() => Span::raw(right(String::new())),
            2 => Span::styled(format!("{full}{rest}{free}"), if is_full { theme.full } else { theme.used }),
            3 => Span::raw(right(part.context_bytes.map_or_else(|| "-".to_owned(), gib))),
            4 => Span::raw(right(percent(rates.busy(share.lease, part)))),
            5 => Span::raw(right(match (share.mode, part.cores) {
                ("exclusive", _) => "all".to_owned(),
                ("time-slice", _) => "turns".to_owned(),
                (_, Some(percent)) => format!("{percent}%"),
                (_, None) => "-".to_owned(),
            })),
            6 => Span::styled(
                right(percent(held)),
                if held.is_some_and(|held| held > 0.05) { theme.held } else { Style::new() },
            ),
            7 => Span::raw(right(share.allocations_refused.to_string())),
            _ => Span::raw(right(short(&age(overview, share.granted_at)))),
        });
    }
    Line::from(spans)
}

/// How long before the look `since` was, in seconds since 1970: what is frozen grows no older.
fn age(overview: &Overview, since: u64) -> String {
    span(Duration::from_secs(overview.at.saturating_sub(since)))
}

/// An age in its largest unit, as `3d`.
fn short(age: &str) -> String {
    let largest = age.split(' ').next().unwrap_or(age);
    let units =
        [("years", "y"), ("year", "y"), ("months", "mo"), ("month", "mo"), ("days", "d"), ("day", "d")];
    units.into_iter().fold(largest.to_owned(), |age, (long, short)| age.replace(long, short))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn overview() -> Overview {
        let gpu = |number: usize, used: u64| GpuView {
            number: number.to_string(),
            uuid: format!("GPU-{number}"),
            model: "NVIDIA H100 80GB HBM3".to_owned(),
            memory_bytes: Some(80 * GIB),
            granted_bytes: 40 * GIB,
            used_bytes: used * GIB,
            utilisation_percent: Some(63),
            celsius: Some(45),
            watts: Some(210.4),
            sm_megahertz: Some(1755),
            ..GpuView::default()
        };
        let share = |lease: i64, name: &str, gpu: usize, used: u64, cores: Option<u8>| ShareView {
            lease,
            name: name.to_owned(),
            mode: "share",
            state: "active",
            granted_at: 1,
            allocations_refused: 2,
            parts: vec![PartView {
                gpu: gpu.to_string(),
                uuid: format!("GPU-{gpu}"),
                limit_bytes: Some(8 * GIB),
                memory_bytes: Some(8 * GIB),
                used_bytes: used * GIB,
                cores,
                ..PartView::default()
            }],
            ..ShareView::default()
        };
        let mut shares = vec![
            share(1, "web", 0, 3, Some(30)),
            share(2, "team/trainer-0/main-container-with-a-long-name", 1, 8, None),
            share(3, "evil\u{1b}[2J", 1, 0, Some(5)),
        ];
        shares[2].violations = vec!["it holds more".to_owned()];
        let mut sick = GpuView { number: "2".to_owned(), ..GpuView::default() };
        sick.fault = Some("GPU 2 is out of service: Xid 79".to_owned());
        Overview {
            at: 1 + 3 * 3600,
            driver: "535.309.01".to_owned(),
            is_metered: true,
            gpus: vec![gpu(0, 12), gpu(1, 20), sick],
            shares,
            ..Overview::default()
        }
    }

    fn drawn(width: u16, height: u16) -> Vec<String> {
        let area = Rect::new(0, 0, width, height);
        let mut buffer = Buffer::empty(area);
        let (overview, rates) = (overview(), Rates::default());
        let mut view = View::default();
        view.fit(&overview, &rates);
        page(area, &mut buffer, &overview, &rates, &view, Theme::plain());
        lines_of(&buffer)
    }

    #[test]
    fn a_terminal_of_80_columns_has_all_that_matters() {
        let want = "\
gpushare top  driver 535.309.01  3 GPUs  3 shares
   0 ██▒▒▒·····  12.0G used,  40.0G of 80.0G granted   63%  45°C   210W  1755MHz
   1 ███▒▒·····  20.0G used,  40.0G of 80.0G granted   63%  45°C   210W  1755MHz
   2 GPU 2 is out of service: Xid 79
CONTAINER              GPU         MEMORY           BUSY    OF  HELD   OOM   AGE
web                      0      3.0G/8.0G ███·····     -   30%     -     2    3h
team/train…-long-name    1     !8.0G/8.0G ████████     -     -     -     2    3h
CHEATING e…l\\u{1b}[2J    1      0.0G/8.0G ········     -    5%     -     2    3h

q quit  s sort: age  / filter  t tree  p processes  f freeze";
        let mut lines = drawn(80, 10);
        lines.iter_mut().for_each(|line| *line = line.trim_end().to_owned());
        assert_eq!(lines.join("\n"), want);
    }

    #[test]
    fn a_narrow_terminal_loses_what_matters_least_and_none_breaks() {
        let wide = drawn(200, 50);
        assert!(
            wide.iter().any(|line| line.contains("team/trainer-0/main-container-with-a-long-name")),
            "{wide:#?}"
        );
        let narrow = drawn(50, 12).join("\n");
        assert!(narrow.contains("!8.0G/8.0G") && !narrow.contains("AGE"), "{narrow}");
        for (width, height) in [(1, 1), (3, 2), (20, 4), (79, 3), (500, 200)] {
            let lines = drawn(width, height);
            assert!(lines.iter().all(|line| line.chars().count() <= usize::from(width)), "{width}x{height}");
        }
    }

    #[test]
    fn a_thousand_shares_on_sixteen_gpus_are_drawn() {
        let mut many = overview();
        many.gpus = vec![many.gpus[0].clone(); 16];
        many.shares = vec![many.shares[0].clone(); 1000];
        let text = text(&many, &Rates::default(), (120, 2000));
        assert_eq!(text.lines().filter(|line| line.starts_with("web ")).count(), 1000);
    }
}
