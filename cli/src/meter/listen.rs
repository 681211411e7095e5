//! What the meter tells others: the figures at an address, or in a file for node_exporter.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use gpushare_config::Config;
use hyper::body::Bytes;
use tokio::task::{LocalSet, spawn_local};
use tokio::time::{MissedTickBehavior, interval};

use crate::overview::{GpuView, Looker, Overview};
use crate::page::{Point, PointOfGpu};
use crate::serve::{Address, Answer, Guard, serve};
use crate::{metrics, page};

/// An answer is this old at most. Whoever asks more often gets the same one.
const FRESH: Duration = Duration::from_secs(1);
/// The time between two points of the last hour, and how many of them there are.
const POINTS_APART: Duration = Duration::from_secs(15);
const POINTS: usize = 240;

/// What `gpushare meter` tells to whom.
#[derive(clap::Args)]
pub struct Telling {
    /// Answer at this address: figures for Prometheus at /metrics, a page for people at /. An address of
    /// this machine as 127.0.0.1:9836, or unix:/run/gpushare.sock.
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<Address>,
    /// Only who knows the token in this file gets an answer, as bearer or as password. Other machines never
    /// get one without.
    #[arg(long, value_name = "FILE", requires = "listen")]
    token_file: Option<PathBuf>,
    /// Write the figures into this file (*.prom) every 15 seconds, for node_exporter's textfile collector.
    #[arg(long, value_name = "FILE")]
    textfile: Option<PathBuf>,
}

impl Telling {
    /// Starts the thread that tells, if anything is to be told.
    ///
    /// # Errors
    /// When the address or a file cannot be used.
    pub fn start(self, config: &Config) -> Result<()> {
        if self.listen.is_none() && self.textfile.is_none() {
            return Ok(());
        }
        let guard = self.listen.as_ref().map(|address| Guard::of(address, self.token_file.as_deref()));
        let guard = guard.transpose()?;
        if let Some(file) = &self.textfile
            && file.extension().is_none_or(|extension| extension != "prom")
        {
            bail!("--textfile {}: node_exporter reads files that end in .prom", file.display());
        }
        let config = config.clone();
        let (started, starts) = std::sync::mpsc::channel();
        let tell = move || {
            let told = Looker::open(config).and_then(|looker| {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
                LocalSet::new().block_on(&runtime, self.tell(looker, guard, &started))
            });
            if let Err(error) = told {
                let _ = started.send(Err(error));
            }
        };
        thread::Builder::new().name("tell".to_owned()).spawn(tell)?;
        starts.recv().context("the thread that answers has ended")?
    }

    async fn tell(
        self,
        looker: Looker,
        guard: Option<Guard>,
        started: &std::sync::mpsc::Sender<Result<()>>,
    ) -> Result<()> {
        let known = Rc::new(RefCell::new(Known::of(looker)));
        spawn_local(note(Rc::clone(&known), self.textfile));
        let (Some(address), Some(guard)) = (self.listen, guard) else {
            let _ = started.send(Ok(()));
            return std::future::pending().await;
        };
        let answer = move |path: &str| known.borrow_mut().answer(path);
        let _ = started.send(Ok(()));
        match serve(&address, guard, answer).await {}
    }
}

/// Looks again and again: for the last hour, and for the file.
async fn note(known: Rc<RefCell<Known>>, textfile: Option<PathBuf>) {
    let mut ticks = interval(POINTS_APART);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let mut known = known.borrow_mut();
        known.note();
        let written = textfile.as_ref().map(|file| known.figures().and_then(|text| write(file, &text)));
        if let Some(Err(error)) = written {
            tracing::warn!(%error, "the figures cannot be written into the file");
        }
    }
}

/// Replaces `file` as a whole: node_exporter must not read a part. The folder may be the exporter's, so nothing
/// that lies there is written through.
fn write(file: &Path, text: &[u8]) -> io::Result<()> {
    let new = file.with_extension("prom.new");
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    OpenOptions::new().write(true).create_new(true).mode(0o644).open(&new)?.write_all(text)?;
    fs::rename(new, file)
}

/// What is known of the node, for a moment.
struct Known {
    looker: Looker,
    overview: Overview,
    looked: Option<Instant>,
    /// The last answers, until the next look.
    figures: Option<Bytes>,
    page: Option<Bytes>,
    /// Oldest first.
    hour: VecDeque<Point>,
}

impl Known {
    fn of(looker: Looker) -> Self {
        let overview = Overview::default();
        Self { looker, overview, looked: None, figures: None, page: None, hour: VecDeque::new() }
    }

    fn look(&mut self) {
        if self.looked.is_some_and(|looked| looked.elapsed() < FRESH) {
            return;
        }
        self.looked = Some(Instant::now());
        (self.figures, self.page) = (None, None);
        match self.looker.look() {
            Ok(overview) => self.overview = overview,
            Err(error) => tracing::warn!(error = format!("{error:#}"), "the node cannot be looked at"),
        }
    }

    fn note(&mut self) {
        self.looker.renew();
        self.looked = None;
        self.look();
        self.hour.push_back(point(&self.overview));
        if self.hour.len() > POINTS {
            self.hour.pop_front();
        }
    }

    fn figures(&mut self) -> io::Result<Bytes> {
        self.look();
        if let Some(figures) = &self.figures {
            return Ok(figures.clone());
        }
        let figures = Bytes::from(metrics::text(&self.overview, self.looker.totals())?);
        self.figures = Some(figures.clone());
        Ok(figures)
    }

    fn page(&mut self) -> Bytes {
        self.look();
        let made = || {
            // The lines end where the figures above them are.
            let now = point(&self.overview);
            let hour: Vec<&Point> = self.hour.iter().chain([&now]).collect();
            Bytes::from(page::html(&self.overview, &hour))
        };
        self.page.get_or_insert_with(made).clone()
    }

    fn answer(&mut self, path: &str) -> Option<Answer> {
        Some(match path {
            "/metrics" => Answer { kind: metrics::TEXT, body: self.figures().ok()? },
            "/" => Answer { kind: "text/html; charset=utf-8", body: self.page() },
            "/page.css" => Answer { kind: "text/css; charset=utf-8", body: Bytes::from_static(page::STYLE) },
            "/page.js" => {
                Answer { kind: "text/javascript; charset=utf-8", body: Bytes::from_static(page::SCRIPT) }
            }
            _ => return None,
        })
    }
}

/// The GPUs in service at the moment of `overview`.
fn point(overview: &Overview) -> Point {
    let of = |gpu: &GpuView| {
        let memory = page::part_of(gpu.used_bytes, gpu.memory_bytes.unwrap_or(0));
        let busy = gpu.utilisation_percent.map(|percent| f64::from(percent) / 100.0);
        PointOfGpu { uuid: gpu.uuid.clone(), memory, busy }
    };
    let well = overview.gpus.iter().filter(|gpu| gpu.fault.is_none());
    Point { at: overview.at, gpus: well.map(of).collect() }
}
