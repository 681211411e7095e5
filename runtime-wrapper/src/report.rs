//! Reports a failure where the engine's user sees it: on stderr, for podman and users, and as one line in the
//! engine's `--log` file, the only place where docker and containerd look.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::time::SystemTime;

use gpushare_config::{Config, reason_of};
use gpushare_inject::{Bundle, title};
use gpushare_quota::{Reason, StateFolder};
use gpushare_request::Container;
use nix::fcntl::OFlag;
use serde_json::json;

use crate::args::{Args, Command};

/// Reports the error to the engine, and to gpushare's own log and history if it refused a container. Ignores
/// a log that cannot be written.
pub fn failure(args: &Args, error: &anyhow::Error) {
    let text = format!("gpushare-runtime: {}", gpushare_inject::one_line(error.as_ref()));
    if matches!(args.command, Command::Create | Command::Run | Command::Restore) {
        tracing::info!(container = args.id.as_deref(), reason = %text, "lease refused");
        note(args, reason_of(error.as_ref()), &text);
    }
    to_engine(args, &text);
    // If stderr cannot be written to, the exit status must do.
    let _ = writeln!(io::stderr(), "{text}");
}

/// Records the text for `gpushare history`, since an engine may not show its log.
fn note(args: &Args, reason: Reason, text: &str) {
    let Some(config) = Config::load().ok().or_else(|| Config::salvaged(None)) else { return };
    if let Ok(state) = StateFolder::open(&config.paths.state) {
        let id = args.id.as_deref().unwrap_or_default();
        state.note_refusal(id, name(args, id).as_deref(), reason, text);
    }
}

/// The container's display name, if its bundle can be read.
fn name(args: &Args, id: &str) -> Option<String> {
    let bundle = Bundle::open(&args.bundle, args.config.as_deref()).ok()?;
    title(&Container::from_json(&bundle.json().ok()?), id, bundle.path())
}

fn to_engine(args: &Args, text: &str) {
    let Some(path) = &args.log else { return };
    // O_NONBLOCK: a FIFO without a reader must not block the engine.
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    let file = OpenOptions::new().append(true).create(true).mode(0o600).custom_flags(flags.bits()).open(path);
    if let Ok(mut file) = file {
        let _ = file.write_all(line(text, args.log_json).as_bytes());
    }
}

fn line(text: &str, as_json: bool) -> String {
    let time = humantime::format_rfc3339_seconds(SystemTime::now());
    if as_json {
        format!("{}\n", json!({"level": "error", "msg": text, "time": time.to_string()}))
    } else {
        format!("time=\"{time}\" level=error msg={text:?}\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_one_json_object_as_the_shim_reads_it() {
        let text = line("a \"b\"", true);
        assert!(
            text.starts_with(r#"{"level":"error","msg":"a \"b\"","time":"2"#) && text.ends_with("Z\"}\n"),
            "{text}"
        );
        assert!(line("a \"b\"", false).contains(r#"level=error msg="a \"b\"""#));
    }
}
