//! `gpushare top`: the node live, in a terminal.

mod draw;
mod rates;
mod view;

use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use gpushare_config::Config;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;

use self::draw::Theme;
use self::rates::Rates;
use self::view::{Done, View};
use crate::answer;
use crate::overview::{Looker, Overview};

/// The size of a frame that is printed: as much as there is to say, and no wider than a terminal is.
const PRINTED: (u16, u16) = (120, u16::MAX);
/// How often the keyboard is looked at while nothing comes from it.
const KEYS: Duration = Duration::from_millis(100);

/// How to show the node.
#[derive(clap::Args)]
pub struct Top {
    /// Print one frame, or with --json one object, and end.
    #[arg(long)]
    once: bool,
    /// Print each look as one line of JSON.
    #[arg(long)]
    json: bool,
    /// The time between two looks, as 2s or 500ms.
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = interval)]
    interval: Duration,
}

/// A time between two looks.
pub fn interval(text: &str) -> Result<Duration, String> {
    let time = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    let fits = (Duration::from_millis(100)..=Duration::from_secs(3600)).contains(&time);
    if fits { Ok(time) } else { Err("must be 100ms to 1h".to_owned()) }
}

/// Shows the node until the user ends it.
pub fn top(asked: &Top) -> Result<()> {
    let mut looker = Looker::open(Config::load()?)?;
    if asked.json {
        return stream(&mut looker, asked);
    }
    if asked.once {
        // Two looks, since use of time is what lies between them.
        let mut rates = Rates::default();
        rates.look(&looker.look()?);
        std::thread::sleep(asked.interval.min(Duration::from_secs(1)));
        let overview = looker.look()?;
        rates.look(&overview);
        return Ok(io::stdout().write_all(draw::text(&overview, &rates, PRINTED).as_bytes())?);
    }
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        bail!("this is no terminal: use --once or --json");
    }
    give_back_when_ended()?;
    let mut terminal = ratatui::init();
    let done = live(&mut terminal, &mut looker, asked.interval);
    let _ = (terminal.show_cursor(), ratatui::try_restore());
    // Dropped, it would complain on a terminal that is gone, which is a panic.
    std::mem::forget(terminal);
    done
}

fn stream(looker: &mut Looker, asked: &Top) -> Result<()> {
    loop {
        answer::print_line(looker.look()?)?;
        if asked.once {
            return Ok(());
        }
        std::thread::sleep(asked.interval);
        looker.renew();
    }
}

/// Gives the terminal back as it was, and ends, when the process is told to. A thread of its own does it: whoever
/// reads keys from a terminal that is gone may never return.
fn give_back_when_ended() -> io::Result<()> {
    let mut signals = Signals::new([SIGTERM, SIGHUP, SIGINT, SIGQUIT])?;
    let end = move || {
        if let Some(signal) = signals.forever().next() {
            // It may be gone.
            let _ = ratatui::try_restore();
            // As a shell tells of a process that a signal ended.
            std::process::exit(128 + signal);
        }
    };
    thread::Builder::new().name("signals".to_owned()).spawn(end)?;
    Ok(())
}

/// Whether the terminal is gone; waits for a key as long as `limit`.
fn is_gone(limit: Duration) -> bool {
    let limit = PollTimeout::try_from(limit).unwrap_or(PollTimeout::ZERO);
    let stdin = io::stdin();
    let mut polled = [PollFd::new(stdin.as_fd(), PollFlags::POLLIN)];
    let gone = PollFlags::POLLHUP | PollFlags::POLLERR | PollFlags::POLLNVAL;
    poll(&mut polled, limit).is_ok() && polled[0].revents().is_some_and(|seen| seen.intersects(gone))
}

fn live(terminal: &mut DefaultTerminal, looker: &mut Looker, interval: Duration) -> Result<()> {
    let (mut view, mut rates) = (View::default(), Rates::default());
    let mut overview = Overview::default();
    let theme = Theme::of_environment();
    let mut looked: Option<Instant> = None;
    loop {
        if looked.is_none_or(|looked| looked.elapsed() >= interval) && !view.is_frozen() {
            looker.renew();
            overview = looker.look()?;
            rates.look(&overview);
            looked = Some(Instant::now());
        }
        view.fit(&overview, &rates);
        terminal.draw(|frame| draw::frame(frame, &overview, &rates, &view, theme))?;
        // Some keys may be read already, and wait for their turn.
        if !event::poll(Duration::ZERO)? {
            if is_gone(KEYS) {
                return Ok(());
            }
            continue;
        }
        match event::read()? {
            Event::Key(key) if key.kind != KeyEventKind::Release => match view.key(key) {
                Done::Ends => return Ok(()),
                Done::Processes(lease) => view.show(looker.processes(lease)?),
                Done::Nothing => {}
            },
            // Another size is drawn anyway.
            _ => {}
        }
    }
}
