//! The page for people: the GPUs as bars with the shares in them, the last hour as lines, and what was refused.
//! It is whole without scripts; the script only takes a new one from time to time.

use std::fmt::Write;

use gpushare_inventory::DeviceMemory;

use crate::overview::{GpuView, Overview, PartView, ShareView};
use crate::table::{age, span};

/// The style sheet, at `/page.css`.
pub const STYLE: &[u8] = include_bytes!("page/page.css");
/// The script, at `/page.js`.
pub const SCRIPT: &[u8] = include_bytes!("page/page.js");

/// How many colours the style sheet has for shares.
const COLOURS: usize = 8;
/// The most rows of a table. A page with more would be of no use to people.
const ROWS: usize = 500;

/// The GPUs at one moment of the last hour.
pub struct Point {
    /// Seconds since 1970.
    pub at: u64,
    /// Those that are in service.
    pub gpus: Vec<PointOfGpu>,
}

/// A GPU at such a moment.
pub struct PointOfGpu {
    /// Its UUID.
    pub uuid: String,
    /// The part of its memory that is in use, 0 to 1.
    pub memory: f64,
    /// The part of the time in which it had work, 0 to 1; `None` where the driver does not tell.
    pub busy: Option<f64>,
}

/// The page. `hour` holds the last hour, oldest first.
pub fn html(overview: &Overview, hour: &[&Point]) -> String {
    let mut page = String::from(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>GPUs of this node</title>\n\
         <link rel=\"stylesheet\" href=\"page.css\">\n<script src=\"page.js\" defer></script>\n\
         <noscript><meta http-equiv=\"refresh\" content=\"10\"></noscript>\n</head>\n<body>\n<main>\n",
    );
    let host = nix::unistd::gethostname().unwrap_or_default();
    // Writing into a String cannot fail.
    let _ = writeln!(page, "<h1>GPUs of {}</h1>", text(&host.to_string_lossy()));
    if !overview.is_metered {
        page += "<p class=\"warn\">gpushare meter does not run: figures are the containers' own.</p>\n";
    }
    if overview.gpus.is_empty() {
        page += "<p>No GPU is there.</p>\n";
    }
    for gpu in &overview.gpus {
        card(&mut page, gpu, overview, hour);
    }
    shares(&mut page, overview);
    refusals(&mut page, overview);
    page + "</main>\n</body>\n</html>\n"
}

/// `raw` as text of HTML, also inside quotes. Control characters have no place there.
fn text(raw: &str) -> String {
    let shown = |c: char| match c {
        '&' => "&amp;".to_owned(),
        '<' => "&lt;".to_owned(),
        '>' => "&gt;".to_owned(),
        '"' => "&quot;".to_owned(),
        '\'' => "&#39;".to_owned(),
        c if c.is_control() => text(&c.escape_default().to_string()),
        c => c.to_string(),
    };
    raw.chars().map(shown).collect()
}

fn size(bytes: u64) -> String {
    DeviceMemory::from_bytes(bytes).to_string()
}

/// The part that `some` is of `all`; 0 of nothing.
#[expect(clippy::cast_precision_loss, reason = "a part for the eye")]
pub fn part_of(some: u64, all: u64) -> f64 {
    if all == 0 { 0.0 } else { some as f64 / all as f64 }
}

fn seconds(nanoseconds: u64) -> String {
    format!("{:.1} s", std::time::Duration::from_nanos(nanoseconds).as_secs_f64())
}

fn card(page: &mut String, gpu: &GpuView, overview: &Overview, hour: &[&Point]) {
    let _ = writeln!(
        page,
        "<section class=\"gpu\">\n<h2>GPU {} <small>{}</small></h2>",
        text(&gpu.number),
        text(&gpu.model)
    );
    if let Some(fault) = &gpu.fault {
        let _ = writeln!(page, "<p class=\"bad\">{}</p>\n</section>", text(fault));
        return;
    }
    let all = gpu.memory_bytes.unwrap_or(0);
    let told = [
        Some(format!("{} of {} in use", size(gpu.used_bytes), size(all))),
        Some(format!("{} granted", size(gpu.granted_bytes))),
        (gpu.granted_cores > 0).then(|| format!("{}% of compute granted", gpu.granted_cores)),
        gpu.utilisation_percent.map(|percent| format!("{percent}% busy")),
        gpu.celsius.map(|celsius| format!("{celsius} °C")),
        gpu.watts.map(|watts| format!("{watts:.0} W")),
        gpu.is_cordoned.then(|| "cordoned".to_owned()),
    ];
    let _ = writeln!(
        page,
        "<p class=\"figures\">{}</p>",
        told.into_iter().flatten().collect::<Vec<_>>().join(" · ")
    );
    bar(page, gpu, all, overview);
    lines(page, gpu, hour);
    *page += "</section>\n";
}

/// The card's memory: each share's grant, with what it uses filled.
fn bar(page: &mut String, gpu: &GpuView, all: u64, overview: &Overview) {
    let label = format!("Memory of GPU {}", gpu.number);
    let _ = writeln!(
        page,
        "<svg class=\"bar\" viewBox=\"0 0 1000 28\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"{}\">\n\
         <rect class=\"free\" width=\"1000\" height=\"28\"/>",
        text(&label)
    );
    let mut at = 0.0;
    let mut legend = String::new();
    for (index, share, part) in on(gpu, overview) {
        let granted = part.memory_bytes.filter(|bytes| *bytes > 0).unwrap_or(part.used_bytes);
        let wide = (part_of(granted, all) * 1000.0).min(1000.0 - at);
        let used = (part_of(part.used_bytes, granted) * wide).min(wide);
        let colour = index % COLOURS;
        let title = format!("{}: {} of {}", share.name, size(part.used_bytes), size(granted));
        let _ = writeln!(
            page,
            "<g><title>{}</title><rect class=\"c{colour} granted\" x=\"{at:.1}\" width=\"{wide:.1}\" height=\"28\"/>\
             <rect class=\"c{colour}\" x=\"{at:.1}\" y=\"4\" width=\"{used:.1}\" height=\"20\"/></g>",
            text(&title)
        );
        let _ = writeln!(legend, "<li class=\"c{colour}\">{}</li>", text(&share.name));
        at += wide;
    }
    *page += "</svg>\n";
    if !legend.is_empty() {
        let _ = writeln!(page, "<ul class=\"legend\">\n{legend}</ul>");
    }
}

/// The shares on a GPU, each with its place in the list of all.
fn on<'a>(
    gpu: &GpuView,
    overview: &'a Overview,
) -> impl Iterator<Item = (usize, &'a ShareView, &'a PartView)> {
    let parts =
        |(index, share): (usize, &'a ShareView)| share.parts.iter().map(move |part| (index, share, part));
    overview.shares.iter().enumerate().flat_map(parts).filter(|(_, _, part)| part.uuid == gpu.uuid).take(ROWS)
}

fn lines(page: &mut String, gpu: &GpuView, hour: &[&Point]) {
    let (Some(first), Some(last)) = (hour.first(), hour.last()) else { return };
    if last.at <= first.at {
        return;
    }
    let of = |value: fn(&PointOfGpu) -> Option<f64>| {
        let point = |point: &&Point| {
            let value = point.gpus.iter().find(|point| point.uuid == gpu.uuid).and_then(value)?;
            let x = part_of(point.at - first.at, last.at - first.at) * 1000.0;
            Some(format!("{x:.0},{:.1}", 98.0 - value.clamp(0.0, 1.0) * 96.0))
        };
        hour.iter().filter_map(point).collect::<Vec<_>>().join(" ")
    };
    let long = span(std::time::Duration::from_secs(last.at - first.at));
    let _ = writeln!(
        page,
        "<figure>\n<svg class=\"lines\" viewBox=\"0 0 1000 100\" preserveAspectRatio=\"none\" role=\"img\" \
         aria-label=\"The last {long}\">\n<polyline class=\"memory\" points=\"{}\"/>\n<polyline class=\"busy\" points=\"{}\"/>\n\
         </svg>\n<figcaption>the last {long}: <span class=\"memory\">memory in use</span>, <span class=\"busy\">busy</span>\
         </figcaption>\n</figure>",
        of(|point| Some(point.memory)),
        of(|point| point.busy)
    );
}

fn shares(page: &mut String, overview: &Overview) {
    *page += "<section>\n<h2>Shares</h2>\n";
    if overview.shares.is_empty() {
        *page += "<p>No container holds a share.</p>\n</section>\n";
        return;
    }
    *page += "<div class=\"wide\"><table>\n<thead><tr><th>Container<th>GPU<th>Memory<th>Compute<th>GPU time<th>Held back\
              <th>Refused<th>Since</tr></thead>\n<tbody>\n";
    for share in overview.shares.iter().take(ROWS) {
        for part in &share.parts {
            row(page, share, part);
        }
    }
    *page += "</tbody>\n</table></div>\n";
    if overview.shares.len() > ROWS {
        let _ = writeln!(page, "<p>and {} more: see gpushare ps</p>", overview.shares.len() - ROWS);
    }
    *page += "</section>\n";
}

fn row(page: &mut String, share: &ShareView, part: &PartView) {
    let is_full = part.is_full();
    let compute = match part.cores {
        _ if share.mode == "time-slice" || share.mode == "exclusive" => share.mode.to_owned(),
        Some(percent) => format!("{percent}%"),
        None => "no limit".to_owned(),
    };
    let memory = match part.memory_bytes {
        Some(granted) => format!("{} of {}", size(part.used_bytes), size(granted)),
        None => size(part.used_bytes),
    };
    let contexts = part.context_bytes.map(|bytes| format!("contexts {} · ", size(bytes)));
    let contexts = contexts.unwrap_or_default();
    let memory = format!("{memory}<small>{contexts}held by {}</small>", share.held_by);
    let about = [&share.image, &share.project].into_iter().filter(|about| !about.is_empty());
    let about = about.map(|about| text(about)).collect::<Vec<_>>().join(" · ");
    let _ = writeln!(
        page,
        "<tr{}><td>{}<small>{about}</small><td>{}<td>{memory}<td>{}<td>{}<td>{}<td>{}<td>{}</tr>",
        if is_full { " class=\"full\"" } else { "" },
        text(&share.name),
        text(&part.gpu),
        text(&compute),
        part.gpu_nanoseconds.map_or_else(|| "–".to_owned(), seconds),
        seconds(part.throttled_nanoseconds),
        share.allocations_refused,
        age(share.granted_at),
    );
    for violation in &share.violations {
        let _ = writeln!(page, "<tr class=\"bad\"><td colspan=\"8\">{}</tr>", text(violation));
    }
}

fn refusals(page: &mut String, overview: &Overview) {
    if overview.refusals.is_empty() {
        return;
    }
    *page += "<section>\n<h2>Refused lately</h2>\n<ul class=\"refused\">\n";
    for refused in &overview.refusals {
        let (name, reason) = (text(&refused.name), text(&refused.reason));
        let _ = writeln!(page, "<li><b>{name}</b> {} ago: {reason}</li>", age(refused.at));
    }
    *page += "</ul>\n</section>\n";
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::overview::RefusalView;

    #[test]
    fn no_name_becomes_markup() {
        let evil = "<script>alert(1)</script>\"'&\u{1b}[2J";
        let part = PartView { uuid: "GPU-1".to_owned(), memory_bytes: Some(1), ..PartView::default() };
        let share = ShareView {
            name: evil.to_owned(),
            image: evil.to_owned(),
            project: evil.to_owned(),
            violations: vec![evil.to_owned()],
            parts: vec![part],
            ..ShareView::default()
        };
        let gpu = GpuView { uuid: "GPU-1".to_owned(), model: evil.to_owned(), ..GpuView::default() };
        let refused = RefusalView {
            id: evil.to_owned(),
            name: evil.to_owned(),
            at: 0,
            reason: evil.to_owned(),
            kind: None,
        };
        let gpus = || vec![PointOfGpu { uuid: "GPU-1".to_owned(), memory: 0.5, busy: Some(2.0) }];
        let point = |at| Point { at, gpus: gpus() };
        let overview =
            Overview { gpus: vec![gpu], shares: vec![share], refusals: vec![refused], ..Overview::default() };
        let page = html(&overview, &[&point(0), &point(3600)]);
        assert!(!page.contains("<script>alert") && !page.contains('\u{1b}'), "{page}");
        assert!(
            page.matches("&lt;script&gt;alert(1)&lt;/script&gt;&quot;&#39;&amp;\\u{1b}[2J").count() >= 6,
            "{page}"
        );
        assert!(
            page.contains("points=\"0,50.0 1000,50.0\"") && page.contains("points=\"0,2.0 1000,2.0\""),
            "{page}"
        );
    }
}
