//! What the user chose to see: order, filter, tree, and the line that is selected.

use std::cmp::Reverse;

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::rates::Rates;
use crate::overview::{Overview, PartView, Process, ShareView};

/// What a key asks of the caller.
pub enum Done {
    /// Nothing more.
    Nothing,
    /// To end.
    Ends,
    /// The processes of this lease.
    Processes(i64),
}

/// By what shares are ordered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sort {
    /// The oldest first.
    #[default]
    Age,
    /// The most memory in use first.
    Memory,
    /// The most GPU time first.
    Compute,
    /// By name.
    Name,
}

impl Sort {
    const fn next(self) -> Self {
        match self {
            Self::Age => Self::Memory,
            Self::Memory => Self::Compute,
            Self::Compute => Self::Name,
            Self::Name => Self::Age,
        }
    }

    /// The word in the footer.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Age => "age",
            Self::Memory => "memory",
            Self::Compute => "compute",
            Self::Name => "name",
        }
    }
}

/// A line of the list.
pub enum Row<'a> {
    /// A pod's namespace or a compose project, with what its shares hold together.
    Group {
        /// Its name.
        name: String,
        /// Memory in use, in bytes.
        used_bytes: u64,
        /// How many shares.
        shares: usize,
    },
    /// A share's part of one GPU.
    Part(&'a ShareView, &'a PartView),
}

/// What the user chose.
#[derive(Default)]
pub struct View {
    sort: Sort,
    filter: String,
    is_filtering: bool,
    is_tree: bool,
    is_frozen: bool,
    selected: usize,
    /// The share that is selected, which stays so while lines move.
    lease: Option<i64>,
    lines: usize,
    processes: Option<Vec<Process>>,
}

impl View {
    /// The lines to show.
    pub fn rows<'a>(&self, overview: &'a Overview, rates: &Rates) -> Vec<Row<'a>> {
        let wanted = self.filter.to_lowercase();
        let fits = |share: &&ShareView| {
            let words = [&share.name, &share.id, &share.image, &share.project, &share.namespace];
            wanted.is_empty() || words.iter().any(|word| word.to_lowercase().contains(&wanted))
        };
        let mut shares: Vec<&ShareView> = overview.shares.iter().filter(fits).collect();
        let used = |share: &ShareView| share.parts.iter().map(|part| part.used_bytes).sum::<u64>();
        let busy = |share: &ShareView| -> f64 {
            share.parts.iter().filter_map(|part| rates.busy(share.lease, part)).sum()
        };
        match self.sort {
            Sort::Age => shares.sort_by_key(|share| share.granted_at),
            Sort::Memory => shares.sort_by_key(|share| Reverse(used(share))),
            Sort::Compute => shares.sort_by(|a, b| busy(b).total_cmp(&busy(a))),
            Sort::Name => shares.sort_by(|a, b| a.name.cmp(&b.name)),
        }
        let parts = |share: &'a ShareView| share.parts.iter().map(move |part| Row::Part(share, part));
        if !self.is_tree {
            return shares.into_iter().flat_map(parts).collect();
        }
        let mut groups: Vec<String> = Vec::new();
        for share in &shares {
            let group = group(share);
            if !groups.contains(&group) {
                groups.push(group);
            }
        }
        let of_group = |name: String| {
            let its: Vec<&ShareView> = shares.iter().copied().filter(|share| group(share) == name).collect();
            let used_bytes = its.iter().map(|share| used(share)).sum();
            let head = Row::Group { name, used_bytes, shares: its.len() };
            std::iter::once(head).chain(its.into_iter().flat_map(parts)).collect::<Vec<_>>()
        };
        groups.into_iter().flat_map(of_group).collect()
    }

    /// Keeps the selection on its share where the lines have changed.
    pub fn fit(&mut self, overview: &Overview, rates: &Rates) {
        let rows = self.rows(overview, rates);
        self.lines = rows.len();
        let lease = |row: &Row| match row {
            Row::Part(share, _) => Some(share.lease),
            Row::Group { .. } => None,
        };
        let at = rows.get(self.selected).and_then(lease);
        if self.lease.is_some()
            && at != self.lease
            && let Some(moved) = rows.iter().position(|row| lease(row) == self.lease)
        {
            self.selected = moved;
        }
        self.selected = self.selected.min(self.lines.saturating_sub(1));
        self.lease = rows.get(self.selected).and_then(lease);
    }

    /// Does what a key asks for.
    pub fn key(&mut self, key: KeyEvent) -> Done {
        if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) {
            return Done::Ends;
        }
        if self.is_filtering {
            self.type_filter(key.code);
            return Done::Nothing;
        }
        match key.code {
            KeyCode::Char('q') => return Done::Ends,
            KeyCode::Esc if self.processes.take().is_some() => {}
            KeyCode::Esc if !self.filter.is_empty() => self.filter.clear(),
            KeyCode::Esc => return Done::Ends,
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Char('t') => self.is_tree = !self.is_tree,
            KeyCode::Char('f') => self.is_frozen = !self.is_frozen,
            KeyCode::Char('/') => self.is_filtering = true,
            KeyCode::Char('p') | KeyCode::Enter => {
                if let (None, Some(lease)) = (self.processes.take(), self.lease) {
                    return Done::Processes(lease);
                }
            }
            KeyCode::Down | KeyCode::Char('j') => self.move_to(self.selected.saturating_add(1)),
            KeyCode::Up | KeyCode::Char('k') => self.move_to(self.selected.saturating_sub(1)),
            KeyCode::PageDown => self.move_to(self.selected.saturating_add(10)),
            KeyCode::PageUp => self.move_to(self.selected.saturating_sub(10)),
            KeyCode::Home => self.move_to(0),
            KeyCode::End => self.move_to(usize::MAX),
            _ => {}
        }
        Done::Nothing
    }

    fn type_filter(&mut self, key: KeyCode) {
        match key {
            KeyCode::Enter => self.is_filtering = false,
            KeyCode::Esc => {
                self.is_filtering = false;
                self.filter.clear();
            }
            KeyCode::Backspace => {
                self.filter.pop();
            }
            KeyCode::Char(letter) if self.filter.len() < 64 => self.filter.push(letter),
            _ => {}
        }
    }

    fn move_to(&mut self, line: usize) {
        self.selected = line.min(self.lines.saturating_sub(1));
        self.lease = None;
        self.processes = None;
    }

    /// Shows these processes of the selected share.
    pub fn show(&mut self, processes: Vec<Process>) {
        self.processes = Some(processes);
    }

    /// Whether nothing new is to be shown.
    pub const fn is_frozen(&self) -> bool {
        self.is_frozen
    }

    /// Whether somebody looks at it: a printed frame has no selection.
    pub const fn is_live(&self) -> bool {
        self.lines > 0
    }

    /// The selected line.
    pub const fn selected(&self) -> usize {
        self.selected
    }

    /// The processes of the selected share, where they were asked for.
    pub fn processes(&self) -> Option<&[Process]> {
        self.processes.as_deref()
    }

    /// What the last line says of the keys.
    pub fn footer(&self) -> String {
        if self.is_filtering {
            return format!("filter: {}_   Enter keeps it, Esc drops it", self.filter);
        }
        let filter =
            if self.filter.is_empty() { "/ filter".to_owned() } else { format!("/ filter: {}", self.filter) };
        let tree = if self.is_tree { "t list" } else { "t tree" };
        let freeze = if self.is_frozen { "f go on (FROZEN)" } else { "f freeze" };
        format!("q quit  s sort: {}  {filter}  {tree}  p processes  {freeze}", self.sort.name())
    }
}

/// Under what a share stands in the tree.
fn group(share: &ShareView) -> String {
    match (&*share.namespace, &*share.pod, &*share.project) {
        ("", _, "") => "others".to_owned(),
        ("", _, project) => format!("compose {project}"),
        (namespace, pod, _) => format!("pod {namespace}/{pod}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(lease: i64, name: &str, project: &str, used_bytes: u64) -> ShareView {
        let parts = vec![PartView { uuid: "GPU-1".to_owned(), used_bytes, ..PartView::default() }];
        let granted_at = lease.cast_unsigned();
        ShareView {
            lease,
            name: name.to_owned(),
            project: project.to_owned(),
            granted_at,
            parts,
            ..ShareView::default()
        }
    }

    fn overview() -> Overview {
        let shares = vec![share(1, "web", "shop", 5), share(2, "train", "", 9), share(3, "api", "shop", 7)];
        Overview { shares, ..Overview::default() }
    }

    fn names(view: &View, overview: &Overview) -> Vec<String> {
        let rates = Rates::default();
        let name = |row: Row| match row {
            Row::Group { name, shares, .. } => format!("{name} {shares}"),
            Row::Part(share, _) => share.name.clone(),
        };
        view.rows(overview, &rates).into_iter().map(name).collect()
    }

    fn press(view: &mut View, keys: &str) {
        for key in keys.chars() {
            let code = match key {
                '\n' => KeyCode::Enter,
                '\u{1b}' => KeyCode::Esc,
                key => KeyCode::Char(key),
            };
            let _ = view.key(KeyEvent::new(code, KeyModifiers::NONE));
        }
    }

    #[test]
    fn keys_do_what_the_footer_says() {
        let (overview, mut view) = (overview(), View::default());
        view.fit(&overview, &Rates::default());
        for (keys, want) in [
            ("", &["web", "train", "api"][..]),
            ("s", &["train", "api", "web"]),
            ("s", &["web", "train", "api"]),
            ("s", &["api", "train", "web"]),
            ("s", &["web", "train", "api"]),
            ("t", &["compose shop 2", "web", "api", "others 1", "train"]),
            ("t/SHO\n", &["web", "api"]),
            ("\u{1b}", &["web", "train", "api"]),
            ("/api\u{1b}", &["web", "train", "api"]),
        ] {
            press(&mut view, keys);
            assert_eq!(names(&view, &overview), want, "{keys:?}");
        }
        assert!(view.footer().contains("f freeze"));
        press(&mut view, "f");
        assert!(view.is_frozen() && view.footer().contains("FROZEN"));
        let key = |letter| KeyEvent::new(KeyCode::Char(letter), KeyModifiers::NONE);
        assert!(matches!(view.key(key('p')), Done::Processes(1)));
        assert!(matches!(view.key(key('q')), Done::Ends));
    }

    #[test]
    fn the_selection_stays_on_its_share() {
        let (mut overview, mut view) = (overview(), View::default());
        let rates = Rates::default();
        view.fit(&overview, &rates);
        press(&mut view, "jj");
        view.fit(&overview, &rates);
        assert_eq!(view.lease, Some(3));
        overview.shares.remove(0);
        view.fit(&overview, &rates);
        assert_eq!((view.selected(), view.lease), (1, Some(3)));
        overview.shares.clear();
        view.fit(&overview, &rates);
        assert_eq!((view.selected(), view.lease), (0, None));
    }
}
