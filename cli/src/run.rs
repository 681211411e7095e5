//! `gpushare run`: `docker run` or `podman run` of a container with a share. It only adds the words by which the
//! share is asked for, and becomes the engine's own program.

use std::borrow::Cow;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow};
use clap::ValueEnum;
use gpushare_config::Config;
use gpushare_request::{ComputePolicy, Cores, MemoryRequest, Priority};

use crate::failure::Failure;
use crate::program::in_shell;
use crate::{program, table};

/// The share, and the engine's words.
#[derive(clap::Args)]
pub struct Run {
    /// Memory on each GPU, as 4GiB or 25%.
    #[arg(long, value_name = "SIZE")]
    memory: Option<MemoryRequest>,
    /// What the memory may grow to while the GPU has it.
    #[arg(long, value_name = "SIZE")]
    memory_limit: Option<MemoryRequest>,
    /// Compute on each GPU in percent.
    #[arg(long, value_name = "PERCENT")]
    cores: Option<Cores>,
    /// fixed (hard cap), burst (idle time may be used) or none (no compute limit).
    #[arg(long, value_name = "POLICY")]
    compute_policy: Option<ComputePolicy>,
    /// How many GPUs.
    #[arg(long, value_name = "NUMBER")]
    count: Option<u32>,
    /// GPUs by index or UUID, with commas between them.
    #[arg(long, value_name = "GPUS")]
    devices: Option<String>,
    /// share, mps, time-slice or exclusive.
    #[arg(long, value_name = "MODE")]
    mode: Option<String>,
    /// 0 (low) to 9.
    #[arg(long, value_name = "LEVEL")]
    priority: Option<Priority>,
    /// The engine; else docker, or podman where there is no docker.
    #[arg(long)]
    engine: Option<Engine>,
    /// Print the engine's command line in place of running it.
    #[arg(long)]
    print: bool,
    /// The engine's own options for `run`, the image, and its command. Options of gpushare come before them: what
    /// follows the first other word is the engine's, to which --memory is memory of the host.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "WORDS")]
    words: Vec<OsString>,
}

/// An engine that people call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Engine {
    /// docker, which knows the runtime by `gpushare configure docker`.
    Docker,
    /// podman, to which the runtime is named.
    Podman,
}

impl Engine {
    const ALL: [Self; 2] = [Self::Docker, Self::Podman];

    const fn program(self) -> &'static str {
        match self {
            Self::Docker => "docker",
            Self::Podman => "podman",
        }
    }
}

/// Runs the container, and ends as the engine does. Returns only without a container.
pub fn run(asked: &Run) -> Result<()> {
    if asked.keys().is_empty() {
        let message = "no share is asked for: put --memory SIZE or another option of gpushare's before the engine's own, as in \
                       `gpushare run --memory 4GiB --rm IMAGE`";
        let first =
            asked.words.first().map(|word| word.to_string_lossy()).filter(|word| word.starts_with("--"));
        let message = first.map_or(message.to_owned(), |word| format!("{message}; {word} is none of them"));
        return Err(Failure::usage(message).into());
    }
    let own = beside()?;
    if let Some(other) =
        named_runtime(&asked.words).filter(|named| named != "gpushare" && Path::new(named) != own)
    {
        let message = format!("--runtime {other} is another runtime, and gives no share: take it out");
        return Err(Failure::usage(message).into());
    }
    let config = Config::load()?;
    let installed = |engine: &Engine| program(engine.program()).is_some();
    let engine = match asked.engine {
        Some(engine) => engine,
        None => Engine::ALL
            .into_iter()
            .find(installed)
            .ok_or_else(|| anyhow!("neither docker nor podman is installed: install one of them"))?,
    };
    let program = program(engine.program())
        .with_context(|| format!("{} is not installed, or not in PATH", engine.program()))?;
    let words = words(asked, engine, !config.request.ignore_env, &own);
    if asked.print {
        return Ok(table::line(&shell_line(engine.program(), &words))?);
    }
    if engine == Engine::Docker {
        knows_the_runtime(&program)?;
    }
    Err(Command::new(&program).args(&words).exec())
        .with_context(|| format!("cannot run {}", program.display()))
}

/// The engine's words: `run`, the runtime, the request, and the user's own.
fn words(asked: &Run, engine: Engine, reads_variables: bool, runtime: &Path) -> Vec<OsString> {
    let mut words: Vec<OsString> = vec!["run".into()];
    match engine {
        Engine::Docker => words.push("--runtime=gpushare".into()),
        Engine::Podman => words.extend(["--runtime".into(), runtime.into()]),
    }
    for (key, value) in asked.keys() {
        // docker takes annotations from version 24 on alone.
        if engine == Engine::Docker && reads_variables {
            let name = key.to_uppercase().replace('-', "_");
            words.extend(["--env".into(), format!("GPUSHARE_{name}={value}").into()]);
        } else {
            words.extend(["--annotation".into(), format!("gpushare.io/{key}={value}").into()]);
        }
    }
    words.extend(asked.words.iter().cloned());
    words
}

impl Run {
    /// What is asked for, as keys of gpushare's own dialect.
    fn keys(&self) -> Vec<(&'static str, String)> {
        let plain = |memory: MemoryRequest| match memory {
            MemoryRequest::Bytes(memory) => format!("{}MiB", memory.bytes() >> 20),
            other => other.to_string(),
        };
        let keys = [
            ("memory", self.memory.map(plain)),
            ("memory-limit", self.memory_limit.map(plain)),
            ("cores", self.cores.map(|cores| cores.percent().to_string())),
            ("compute-policy", self.compute_policy.map(|policy| policy.name().to_owned())),
            ("count", self.count.map(|count| count.to_string())),
            ("devices", self.devices.clone()),
            ("mode", self.mode.clone()),
            ("priority", self.priority.map(|priority| priority.level().to_string())),
        ];
        keys.into_iter().filter_map(|(key, value)| Some((key, value?))).collect()
    }
}

/// Where the shell would find a program.
fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|path| path.is_file())
}

/// Flags of `docker run` (29) and `podman run` (5) that take no value.
const WITHOUT_VALUE: [&str; 31] = [
    "--detach",
    "--disable-content-trust",
    "--env-host",
    "--help",
    "--http-proxy",
    "--init",
    "--interactive",
    "--no-healthcheck",
    "--no-hostname",
    "--no-hosts",
    "--oom-kill-disable",
    "--passwd",
    "--privileged",
    "--publish-all",
    "--quiet",
    "--read-only",
    "--read-only-tmpfs",
    "--remote",
    "--replace",
    "--rm",
    "--rmi",
    "--rootfs",
    "--sig-proxy",
    "--syslog",
    "--tls-verify",
    "--trace",
    "--transient-store",
    "--tty",
    "--unsetenv-all",
    "--use-api-socket",
    "--version",
];
/// The same by single letters, which may be joined.
const LETTERS_WITHOUT_VALUE: &str = "diPqt";

/// The runtime that the engine's words name, up to the image. The last one would count there.
fn named_runtime(words: &[OsString]) -> Option<String> {
    let mut words = words.iter().map(|word| word.to_string_lossy());
    while let Some(word) = words.next() {
        let flag = word.strip_prefix('-').filter(|flag| !flag.is_empty())?;
        let takes_next = match flag.strip_prefix('-') {
            Some(name) => !name.is_empty() && !name.contains('=') && !WITHOUT_VALUE.contains(&&*word),
            // `-e`, and `-ite`; `-eNAME` has its value in it.
            None => flag.find(|letter| !LETTERS_WITHOUT_VALUE.contains(letter)) == Some(flag.len() - 1),
        };
        let value = takes_next.then(|| words.next()).flatten().unwrap_or_default();
        if word == "--runtime" {
            return Some(value.into_owned());
        }
        // Of a flag that nobody knows here it is not known whether it takes the next word.
        if value == "--runtime" {
            return words.next().map(Cow::into_owned);
        }
        if let Some(runtime) = [&word, &value].iter().find_map(|word| word.strip_prefix("--runtime=")) {
            return Some(runtime.to_owned());
        }
    }
    None
}

/// The runtime beside this program.
fn beside() -> Result<PathBuf> {
    let own = std::env::current_exe().context("cannot tell where this program lies")?;
    Ok(own.with_file_name("gpushare-runtime"))
}

/// docker's own message would not say what to do.
fn knows_the_runtime(docker: &Path) -> Result<()> {
    if known_runtimes(docker).is_some_and(|known| !known.contains("\"gpushare\"")) {
        let message = "docker does not know the runtime: run `sudo gpushare configure docker`, then `sudo systemctl reload docker`";
        return Err(Failure::not_found(message).into());
    }
    Ok(())
}

/// Whether a docker that runs here says that it knows no runtime of ours, by whatever name.
pub fn docker_lacks_the_runtime() -> bool {
    let known = program(Engine::Docker.program()).and_then(|docker| known_runtimes(&docker));
    known.is_some_and(|known| !known.contains("gpushare-runtime"))
}

/// The runtimes of docker as JSON: their names and programs. What it cannot say now, `docker run` says better.
fn known_runtimes(docker: &Path) -> Option<String> {
    let mut info = Command::new(docker);
    let told = program::output(info.args(["info", "--format", "{{json .Runtimes}}"])).ok()?;
    Some(String::from_utf8_lossy(&told.stdout).into_owned()).filter(|told| told.trim_start().starts_with('{'))
}

/// The command line as one types it.
fn shell_line(program: &str, words: &[OsString]) -> String {
    let quoted = |word: &OsString| in_shell(&word.to_string_lossy());
    [program.to_owned()].into_iter().chain(words.iter().map(quoted)).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[test]
    fn another_runtime_is_found_before_the_image_alone() {
        for (line, want) in [
            ("--rm --runtime runc ubuntu true", Some("runc")),
            ("--runtime=runc ubuntu", Some("runc")),
            ("-it -e A=b --name x -v /a:/b --runtime runc ubuntu", Some("runc")),
            ("-ite A=b --runtime runc ubuntu", Some("runc")),
            ("-h name --runtime runc ubuntu", Some("runc")),
            ("--sig-proxy --runtime runc ubuntu", Some("runc")),
            ("--newer-than-this --runtime runc ubuntu", Some("runc")),
            ("--newer-than-this --runtime=runc ubuntu", Some("runc")),
            ("--rm ubuntu --runtime runc", None),
            ("--rmi ubuntu --runtime runc", None),
            ("-it ubuntu program --runtime=x", None),
            ("ubuntu", None),
            ("", None),
        ] {
            let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
            assert_eq!(named_runtime(&words).as_deref(), want, "{line}");
        }
    }

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        run: Run,
    }

    fn line(text: &str, engine: Engine, reads_variables: bool) -> String {
        let line = Line::try_parse_from(text.split(' ')).unwrap();
        shell_line(
            engine.program(),
            &words(&line.run, engine, reads_variables, Path::new("/opt/gpushare-runtime")),
        )
    }

    #[test]
    fn only_the_share_is_added_to_the_engines_own_words() {
        let text = "run --memory 4GiB --cores 30 --rm -it -v /a:/b pytorch python train.py --memory 1";
        assert_eq!(
            line(text, Engine::Docker, true),
            "docker run --runtime=gpushare --env GPUSHARE_MEMORY=4096MiB --env GPUSHARE_CORES=30 --rm -it -v /a:/b pytorch \
             python train.py --memory 1"
        );
        assert_eq!(
            line("run --memory 25% --compute-policy burst --devices 0,1 ubuntu", Engine::Podman, true),
            "podman run --runtime /opt/gpushare-runtime --annotation gpushare.io/memory=25% --annotation \
             gpushare.io/compute-policy=burst --annotation gpushare.io/devices=0,1 ubuntu"
        );
        // Where variables count for nothing, docker is given annotations, too.
        assert!(
            line("run --memory 4GiB ubuntu", Engine::Docker, false)
                .contains("--annotation gpushare.io/memory")
        );
        assert!(line("run ubuntu sh -c it's", Engine::Docker, true).ends_with(r"ubuntu sh -c 'it'\''s'"));
        for wrong in ["run --memory much ubuntu", "run --memory 4GiB", "run --cores 101 ubuntu", "run"] {
            assert!(Line::try_parse_from(wrong.split(' ')).is_err(), "{wrong}");
        }
    }
}
