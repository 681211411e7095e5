//! `gpushare top`: the node live, in a terminal.

mod draw;
mod rates;
mod view;

use std::io::{self, IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use gpushare_config::Config;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use signal_hook::consts::{SIGHUP, SIGTERM};

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
    // Whoever ends it gets the terminal back as it was.
    let ended = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&ended))?;
    }
    let mut terminal = ratatui::init();
    let done = live(&mut terminal, &mut looker, asked.interval, &ended);
    ratatui::restore();
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

fn live(
    terminal: &mut DefaultTerminal,
    looker: &mut Looker,
    interval: Duration,
    ended: &AtomicBool,
) -> Result<()> {
    let (mut view, mut rates) = (View::default(), Rates::default());
    let mut overview = Overview::default();
    let theme = Theme::of_environment();
    let mut looked: Option<Instant> = None;
    while !ended.load(Ordering::Relaxed) {
        if looked.is_none_or(|looked| looked.elapsed() >= interval) && !view.is_frozen() {
            looker.renew();
            overview = looker.look()?;
            rates.look(&overview);
            looked = Some(Instant::now());
        }
        view.fit(&overview, &rates);
        terminal.draw(|frame| draw::frame(frame, &overview, &rates, &view, theme))?;
        if !event::poll(KEYS)? {
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
    Ok(())
}
