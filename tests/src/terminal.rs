//! A terminal as people have it: a tmux of the test's own, in which a program runs, is typed to and looked at.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::command::{eventually, run};
use crate::daemon::Daemon;
use crate::scratch::Scratch;

/// Where Debian's tmux is.
pub const TMUX: &str = "/usr/bin/tmux";
/// Far longer than a program takes to draw what a key asks for, on a machine with other work.
const SHOWS_WITHIN: Duration = Duration::from_secs(40);

/// A terminal; it and what runs in it end on drop.
#[derive(Debug)]
pub struct Terminal {
    scratch: Scratch,
    _tmux: Daemon,
}

impl Terminal {
    /// A terminal of `columns` and `rows` in which a shell runs `script`, with `environment` and its folder as SCRATCH.
    ///
    /// # Panics
    /// When tmux does not start.
    #[must_use]
    pub fn open((columns, rows): (u16, u16), script: &str, environment: &[(&str, &Path)]) -> Self {
        let scratch = Scratch::new("terminal");
        let settings = scratch.file("tmux.conf", "set -g status off\nset -s exit-empty off\n");
        let socket = scratch.path().join("socket");
        let mut server = Command::new(TMUX);
        // In the foreground, so that it is ours to end.
        server.args(["-D", "-u", "-f"]).arg(settings).arg("-S").arg(&socket);
        server.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("LC_ALL", "C.UTF-8");
        server.env("SHELL", "/bin/sh").env("SCRATCH", scratch.path()).envs(environment.iter().copied());
        let answers = || run(tmux(&socket).args(["show-options", "-g", "status"])).success();
        let daemon = Daemon::start(&mut server, scratch.path(), answers);
        let terminal = Self { scratch, _tmux: daemon };
        let size = [columns, rows].map(|length| length.to_string());
        terminal.tell(&["new-session", "-d", "-x", &size[0], "-y", &size[1], "/bin/sh", "-c", script]);
        terminal
    }

    /// A folder for files of what runs in it.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.scratch.path()
    }

    fn tell(&self, args: &[&str]) -> String {
        run(tmux(&self.scratch.path().join("socket")).args(args)).expect_success("tmux").stdout
    }

    /// Presses keys, by tmux's names for them: `s`, `Enter`, `Escape`, `Down`.
    ///
    /// # Panics
    /// When the terminal is gone.
    pub fn press(&self, keys: &[&str]) {
        self.tell(&[&["send-keys"], keys].concat());
    }

    /// Gives it another size.
    ///
    /// # Panics
    /// As [`Terminal::press`].
    pub fn resize(&self, (columns, rows): (u16, u16)) {
        self.tell(&["resize-window", "-x", &columns.to_string(), "-y", &rows.to_string()]);
    }

    /// Whether a program has taken the whole terminal, as an editor does, or hidden the cursor.
    ///
    /// # Panics
    /// As [`Terminal::press`].
    #[must_use]
    pub fn is_taken(&self) -> bool {
        self.tell(&["display-message", "-p", "#{alternate_on} #{cursor_flag}"]) != "0 1\n"
    }

    /// What it shows now.
    ///
    /// # Panics
    /// As [`Terminal::press`].
    #[must_use]
    pub fn screen(&self) -> Screen {
        Screen::parse(&self.tell(&["capture-pane", "-p", "-e"]))
    }

    /// Waits until it shows what `is_wanted`, and returns that.
    ///
    /// # Panics
    /// With the last screen, when that does not come.
    #[must_use]
    pub fn shows(&self, what: &str, is_wanted: impl Fn(&Screen) -> bool) -> Screen {
        let mut screen = self.screen();
        let is_shown = eventually(SHOWS_WITHIN, || {
            screen = self.screen();
            is_wanted(&screen)
        });
        assert!(is_shown, "it does not show {what}:\n{}", screen.text());
        screen
    }
}

fn tmux(socket: &PathBuf) -> Command {
    let mut command = Command::new(TMUX);
    command.arg("-u").arg("-S").arg(socket);
    command.env_clear().env("PATH", "/usr/bin:/bin").env("LC_ALL", "C.UTF-8");
    command
}

/// What a terminal shows: its lines, and how each of their letters is marked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Screen {
    lines: Vec<Vec<(char, char)>>,
}

impl Screen {
    /// From what tmux captured with the sequences for colours in it.
    fn parse(captured: &str) -> Self {
        let mut marks = BTreeSet::new();
        Self { lines: captured.lines().map(|line| cells(line, &mut marks)).collect() }
    }

    /// The lines, without spaces at their ends.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let text = |line: &Vec<(char, char)>| line.iter().map(|cell| cell.0).collect::<String>();
        self.lines.iter().map(|line| text(line).trim_end().to_owned()).collect()
    }

    /// The lines as one text.
    #[must_use]
    pub fn text(&self) -> String {
        self.lines().join("\n") + "\n"
    }

    /// For each letter how it is marked: `r` red and bold, `y` yellow, `g` green, `d` dim, `b` bold, `?`
    /// otherwise; a capital where letter and ground are exchanged (`V` for such a one without another mark).
    #[must_use]
    pub fn marks(&self) -> String {
        let marks = |line: &Vec<(char, char)>| line.iter().map(|cell| cell.1).collect::<String>();
        let lines: Vec<String> = self.lines.iter().map(|line| marks(line).trim_end().to_owned()).collect();
        lines.join("\n") + "\n"
    }

    /// The marks of the first place where `text` stands; empty where it does not.
    #[must_use]
    pub fn marks_of(&self, text: &str) -> String {
        let wanted: Vec<char> = text.chars().collect();
        let places = self.lines.iter().flat_map(|line| line.windows(wanted.len()));
        let mut found = places.filter(|place| place.iter().map(|cell| cell.0).eq(wanted.iter().copied()));
        found.next().unwrap_or_default().iter().map(|cell| cell.1).collect()
    }
}

/// The letters of a line with their marks. `on` is what the line before left switched on.
fn cells(line: &str, on: &mut BTreeSet<u8>) -> Vec<(char, char)> {
    let mut pieces = line.split("\u{1b}[");
    let mut cells: Vec<(char, char)> =
        pieces.next().unwrap_or_default().chars().map(|c| (c, mark(on))).collect();
    for piece in pieces {
        let (codes, text) = piece.split_once('m').unwrap_or((piece, ""));
        let codes: Vec<u8> = codes.split(';').map(|code| code.parse().unwrap_or(0)).collect();
        match codes[..] {
            // One of the eight colours, by its number in the long form.
            [38, 5, colour @ 0..8] => switch(on, 30 + colour),
            _ => codes.iter().for_each(|code| switch(on, *code)),
        }
        cells.extend(text.chars().map(|c| (c, mark(on))));
    }
    cells
}

/// Does what a code for colours (ECMA-48, SGR) says.
fn switch(on: &mut BTreeSet<u8>, code: u8) {
    match code {
        0 => on.clear(),
        22 => on.retain(|code| ![1, 2].contains(code)),
        27 => on.retain(|code| *code != 7),
        30..=38 | 90..=97 => {
            on.retain(|code| *code < 30);
            on.insert(code);
        }
        39 => on.retain(|code| *code < 30),
        // The ground's own colour.
        49 => {}
        _ => {
            on.insert(code);
        }
    }
}

/// One letter for what is switched on.
fn mark(on: &BTreeSet<u8>) -> char {
    let others: Vec<u8> = on.iter().copied().filter(|code| *code != 7).collect();
    let mark = match others[..] {
        [] => ' ',
        [1] => 'b',
        [2] => 'd',
        [1, 31] => 'r',
        [32] => 'g',
        [33] => 'y',
        _ => '?',
    };
    match (on.contains(&7), mark) {
        (true, ' ') => 'V',
        (true, mark) => mark.to_ascii_uppercase(),
        (false, mark) => mark,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_screen_is_its_letters_and_their_marks() {
        let screen = Screen::parse(
            "\u{1b}[1mab\u{1b}[0m c\u{1b}[1m\u{1b}[31m!8\u{1b}[0m\u{1b}[7mx \u{1b}[38;5;2m█\n\u{1b}[0m\u{1b}[2mé \u{1b}[0m\n",
        );
        assert_eq!(screen.text(), "ab c!8x █\né\n");
        assert_eq!(screen.marks(), "bb  rrVVG\ndd\n");
        assert_eq!((screen.marks_of("!8"), screen.marks_of("none")), ("rr".to_owned(), String::new()));
    }
}
