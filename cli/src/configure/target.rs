//! Which file an engine's runtime is written into, and what else the engine reads.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use glob::{MatchOptions, Pattern};
use toml::Table;

use super::Engine;
use super::{containerd, file, toml_text};
use crate::program::in_shell;

const DAEMON_JSON: &str = "/etc/docker/daemon.json";
const CONTAINERD: &str = "/etc/containerd/config.toml";
const CRIO: &str = "/etc/crio/crio.conf";
const CRIO_DROP_INS: &str = "/etc/crio/crio.conf.d";
const PODMAN: [&str; 2] = ["/usr/share/containers/containers.conf", "/etc/containers/containers.conf"];
const PODMAN_DROP_INS: &str = "/etc/containers/containers.conf.d";
/// Name of our drop-ins; they are read after those of packages.
const DROP_IN: &str = "99-gpushare";

/// A distribution of Kubernetes that brings a containerd of its own.
struct Distribution {
    /// Its containerd's folder.
    folder: &'static str,
    /// What to edit there.
    edited: &'static str,
    /// Patterns of the files there from which its containerd's settings are made.
    sources: &'static [&'static str],
    restart: &'static str,
}

const DISTRIBUTIONS: [Distribution; 4] = [
    Distribution {
        folder: "/var/lib/rancher/k3s/agent/etc/containerd",
        edited: "config.toml.tmpl (config-v3.toml.tmpl for containerd 2)",
        sources: &["*.tmpl", "*.d/*.toml"],
        restart: "systemctl restart k3s (or k3s-agent)",
    },
    Distribution {
        folder: "/var/lib/rancher/rke2/agent/etc/containerd",
        edited: "config.toml.tmpl (config-v3.toml.tmpl for containerd 2)",
        sources: &["*.tmpl", "*.d/*.toml"],
        restart: "systemctl restart rke2-server (or rke2-agent)",
    },
    Distribution {
        folder: "/var/snap/microk8s/current/args",
        edited: "containerd-template.toml",
        sources: &["containerd-template.toml"],
        restart: "snap restart microk8s.daemon-containerd",
    },
    Distribution {
        folder: "/etc/k0s",
        edited: "containerd.d/gpushare.toml",
        sources: &["containerd.toml", "containerd.d/*.toml"],
        restart: "systemctl restart k0sworker (or k0scontroller)",
    },
];

/// Where a runtime is written.
#[derive(Debug)]
pub struct Target {
    /// The file to edit, which is no link.
    pub file: PathBuf,
    /// The file that the engine reads first. For containerd it is the one whose imports count.
    pub main: PathBuf,
    /// Whether the engine reads `file` without being told to. It can then be asked about its usual settings.
    pub usual: bool,
    /// The settings that the engine reads before `file`, in its order.
    pub others: Vec<Table>,
    /// The command that makes the engine read it.
    pub restart: Option<&'static str>,
}

/// The target: the file that is named, else the engine's usual place.
///
/// # Errors
/// When several places are possible, or the one that is named is written anew by somebody else.
pub fn find(engine: Engine, named: Option<&Path>) -> Result<Target> {
    match engine {
        Engine::Docker => docker(named),
        Engine::Containerd => named.map_or_else(usual_containerd, named_containerd),
        Engine::Crio => drop_in(named, &[CRIO], CRIO_DROP_INS, Some("systemctl restart crio")),
        Engine::Podman => drop_in(named, &PODMAN, PODMAN_DROP_INS, None),
    }
}

/// The file that an engine reads where none of its flags names another.
pub fn usual(engine: Engine) -> &'static Path {
    Path::new(match engine {
        Engine::Docker => DAEMON_JSON,
        Engine::Containerd => CONTAINERD,
        Engine::Crio => CRIO,
        Engine::Podman => PODMAN[1],
    })
}

/// What a containerd reads whose flag names `main`, be it a file that nobody is to edit.
pub fn read(main: &Path) -> Target {
    Target { file: main.to_owned(), main: main.to_owned(), usual: false, others: vec![], restart: None }
}

/// The file to name so that the engine which reads `file` gets a runtime, in words for the user.
pub fn edited_for(engine: Engine, file: &Path) -> String {
    match distribution(file).filter(|_| engine == Engine::Containerd) {
        Some(Distribution { folder, edited, .. }) => format!("{folder}/{edited}"),
        None => in_shell(&file.to_string_lossy()),
    }
}

/// The distribution whose containerd `file` belongs to.
fn distribution(file: &Path) -> Option<&'static Distribution> {
    DISTRIBUTIONS.iter().find(|distribution| file.starts_with(distribution.folder))
}

/// The files that an engine reads without being told to, or that its settings are made from; they may be
/// missing.
pub fn all_usual(engine: Engine) -> Vec<PathBuf> {
    let with_drop_ins = |mains: &[&str], folder: &str| {
        let mains = mains.iter().map(PathBuf::from);
        mains.chain(sorted(Path::new(folder), |name| name.ends_with(".conf"))).collect()
    };
    match engine {
        Engine::Docker => vec![PathBuf::from(DAEMON_JSON)],
        Engine::Crio => with_drop_ins(&[CRIO], CRIO_DROP_INS),
        Engine::Podman => with_drop_ins(&PODMAN, PODMAN_DROP_INS),
        Engine::Containerd => {
            let sources = DISTRIBUTIONS.iter().flat_map(|distribution| {
                let patterns = distribution.sources.iter();
                patterns.flat_map(|pattern| found(&Path::new(distribution.folder).join(pattern)))
            });
            sources.chain(with_imports(Path::new(CONTAINERD))).collect()
        }
    }
}

/// A containerd file and those that it imports, as far as it can be understood.
pub fn with_imports(main: &Path) -> Vec<PathBuf> {
    let imports = imports(main).unwrap_or_default();
    std::iter::once(main.to_owned()).chain(imports.iter().flat_map(Import::files)).collect()
}

/// Whether a distribution's containerd reads the file, or it is made for it.
pub fn is_of_distribution(file: &Path) -> bool {
    distribution(file).is_some()
}

fn docker(named: Option<&Path>) -> Result<Target> {
    let file = file::resolve(named.unwrap_or(Path::new(DAEMON_JSON)))?;
    // On SIGHUP dockerd (20.10) takes new runtimes and another default from its file; running containers
    // stay.
    Ok(Target {
        main: file.clone(),
        usual: named.is_none(),
        file,
        others: vec![],
        restart: Some("systemctl reload docker"),
    })
}

fn named_containerd(path: &Path) -> Result<Target> {
    let file = file::resolve(path)?;
    let own = distribution(&file);
    let generated = file.file_name().is_some_and(|name| name == "config.toml" || name == "containerd.toml");
    if let Some(Distribution { folder, edited, .. }) =
        own.filter(|own| own.folder.contains("rancher") && generated)
    {
        bail!("{} is written anew at every start: name the template, {folder}/{edited}", file.display());
    }
    let restart = own.map_or("systemctl restart containerd", |own| own.restart);
    // What containerd makes of both files is checked if the usual file imports this one.
    let usual = Path::new(CONTAINERD);
    let imported = own.is_none() && file != usual && imports(usual)?.iter().any(|import| import.holds(&file));
    let main = if imported { usual.to_path_buf() } else { file.clone() };
    Ok(Target { file, main, usual: false, others: vec![], restart: Some(restart) })
}

/// The usual containerd, where no other is on the node. The handler goes where the tables of the CRI plugin
/// are: containerd 1.x replaces all of a plugin's settings by those of a file that it imports, so a drop-in
/// beside them would remove them.
fn usual_containerd() -> Result<Target> {
    let own: Vec<String> = DISTRIBUTIONS
        .iter()
        .filter(|own| folder_in_use(own.folder, own.edited))
        .map(|own| format!("{}/{}", own.folder, own.edited))
        .collect();
    if !own.is_empty() {
        bail!(
            "this node has a containerd of its distribution: name the file with --config: {}{}",
            own.join(" or "),
            if Path::new(CONTAINERD).exists() { format!(", or {CONTAINERD}") } else { String::new() }
        );
    }
    let main = file::resolve(Path::new(CONTAINERD))?;
    let file = containerd_file(&main)?;
    Ok(Target { file, main, usual: true, others: vec![], restart: Some("systemctl restart containerd") })
}

fn folder_in_use(folder: &str, edited: &str) -> bool {
    // The folders of k0s and microk8s hold other files as well, so a file in them is looked for.
    let sign = match folder {
        "/etc/k0s" => "/etc/k0s/containerd.toml".to_owned(),
        _ if folder.contains("rancher") => folder.to_owned(),
        _ => format!("{folder}/{edited}"),
    };
    Path::new(&sign).exists()
}

fn containerd_file(main: &Path) -> Result<PathBuf> {
    if has_cri(main)?.is_none() {
        return Ok(main.to_path_buf());
    }
    let imports = imports(main)?;
    let files = with_imports(main);
    for file in &files {
        // A file that has the handler already is brought up to date, or the handler is taken out.
        if file::read(file)?.is_some_and(|text| text.contains(toml_text::BEGIN)) {
            return Ok(file.clone());
        }
    }
    let mut found = None;
    for file in files {
        if has_cri(&file)? == Some(true) {
            found = Some(file);
        }
    }
    let drop_in = || imports.iter().find_map(Import::drop_in);
    Ok(found.or_else(drop_in).unwrap_or_else(|| main.to_path_buf()))
}

/// Whether a file has tables of the CRI plugin; `None` is no file.
fn has_cri(path: &Path) -> Result<Option<bool>> {
    let Some(text) = file::read(path)? else { return Ok(None) };
    Ok(Some(containerd::has_cri(&values(path, &text)?)))
}

fn values(path: &Path, text: &str) -> Result<Table> {
    toml_text::values(text).map_err(|mistake| anyhow::anyhow!("{}, {mistake}", path.display()))
}

/// An entry of containerd's `imports`: a file, or a pattern of files.
#[derive(Clone, Debug)]
pub struct Import {
    path: PathBuf,
}

/// The imports of a containerd file, by absolute path.
pub fn imports(main: &Path) -> Result<Vec<Import>> {
    let Some(text) = file::read(main)? else { return Ok(vec![]) };
    let base = main.parent().unwrap_or(Path::new("/"));
    let imports = containerd::imports(&values(main, &text)?);
    Ok(imports.into_iter().map(|entry| Import { path: base.join(entry) }).collect())
}

/// What Go's filepath.Glob matches, by which containerd reads patterns: nothing goes beyond a folder.
const AS_GO: MatchOptions = MatchOptions {
    case_sensitive: true,
    require_literal_separator: true,
    require_literal_leading_dot: false,
};

impl Import {
    /// The pattern in the words of another syntax; `None` where the entry is a path. containerd takes one with a
    /// star alone for a pattern.
    fn pattern(path: &Path) -> Option<String> {
        let text = path.to_str().filter(|text| text.contains('*'))?;
        // Go negates by `^` alone; no file's name depends on its `!`.
        let mut text = text.replace("[!", "[").replace("[^", "[!");
        // A second star means more there.
        while text.contains("**") {
            text = text.replace("**", "*");
        }
        Some(text)
    }

    /// Whether the import leads to `file`.
    pub fn holds(&self, file: &Path) -> bool {
        match Self::pattern(&self.path) {
            None => self.path == file,
            Some(pattern) => {
                Pattern::new(&pattern).is_ok_and(|pattern| pattern.matches_path_with(file, AS_GO))
            }
        }
    }

    /// The files that are there, in containerd's order.
    pub fn files(&self) -> Vec<PathBuf> {
        found(&self.path).into_iter().filter(|path| path.is_file()).collect()
    }

    /// Our own drop-in, where the import has room for it.
    fn drop_in(&self) -> Option<PathBuf> {
        let folders = found(self.path.parent()?);
        let own = folders.into_iter().map(|folder| folder.join(format!("{DROP_IN}.toml")));
        let is_pattern = Self::pattern(&self.path).is_some();
        own.into_iter().find(|path| is_pattern && self.holds(path))
    }
}

/// What a path or a pattern leads to, in the order of names. A path leads to itself, be there anything or not.
fn found(path: &Path) -> Vec<PathBuf> {
    match Import::pattern(path) {
        None => vec![path.to_owned()],
        Some(pattern) => glob::glob_with(&pattern, AS_GO).into_iter().flatten().flatten().collect(),
    }
}

/// The regular files of a folder whose names fit, in the order of names.
pub fn sorted(folder: &Path, fits: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries
        .filter(|entry| fits(&entry.file_name().to_string_lossy()))
        .map(|entry| entry.path())
        .filter(|path| path.is_file())
        .collect();
    files.sort();
    files
}

/// A drop-in of our own in `folder`, or the file that is named.
fn drop_in(
    named: Option<&Path>,
    mains: &[&str],
    folder: &str,
    restart: Option<&'static str>,
) -> Result<Target> {
    let own = Path::new(folder).join(format!("{DROP_IN}.conf"));
    let file = file::resolve(named.unwrap_or(&own))?;
    let in_folder = file.parent() == Some(Path::new(folder));
    let mut others = Vec::new();
    if in_folder {
        let mains = mains.iter().map(PathBuf::from);
        let before = sorted(Path::new(folder), |name| name.ends_with(".conf"));
        for path in mains.chain(before.into_iter().filter(|path| *path < file)) {
            if let Some(text) = file::read(&path)? {
                others.push(values(&path, &text)?);
            }
        }
    }
    let main = mains.last().map_or_else(|| file.clone(), PathBuf::from);
    Ok(Target { usual: in_folder || main == file, file, main, others, restart })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target_in(main: &str, imported: &[(&str, &str)]) -> String {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.toml");
        fs::write(&path, main).unwrap();
        fs::create_dir(folder.path().join("conf.d")).unwrap();
        for (name, text) in imported {
            fs::write(folder.path().join("conf.d").join(name), text).unwrap();
        }
        let found = containerd_file(&path).unwrap();
        found.strip_prefix(folder.path()).unwrap().to_string_lossy().into_owned()
    }

    #[test]
    fn the_handler_goes_where_the_tables_of_the_cri_plugin_are() {
        let cri = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\nsandbox_image = \"pause\"\n";
        let imports = "imports = [\"conf.d/*.toml\"]\n";
        for (main, imported, want) in [
            ("version = 2\n".to_owned(), vec![], "config.toml"),
            (format!("{imports}version = 2\n"), vec![], "conf.d/99-gpushare.toml"),
            (format!("{imports}{cri}"), vec![], "config.toml"),
            (format!("{imports}{cri}"), vec![("a.toml", "version = 2\n")], "config.toml"),
            (format!("{imports}{cri}"), vec![("a.toml", cri), ("b.toml", cri)], "conf.d/b.toml"),
            (format!("{imports}version = 2\n"), vec![("a.toml", cri), ("b.conf", cri)], "conf.d/a.toml"),
            ("imports = [\"conf.d/cri.toml\"]\nversion = 2\n".to_owned(), vec![], "config.toml"),
            (format!("{imports}{cri}"), vec![("a.toml", "# BEGIN gpushare \"gpushare\"\n")], "conf.d/a.toml"),
            ("imports = [\"*/?.toml\"]\nversion = 2\n".to_owned(), vec![("a.toml", cri)], "conf.d/a.toml"),
            ("imports = [\"c*.d/*.toml\"]\nversion = 2\n".to_owned(), vec![], "conf.d/99-gpushare.toml"),
            (
                "imports = [\"*/[!b-z]*.toml\"]\nversion = 2\n".to_owned(),
                vec![("b.toml", cri)],
                "conf.d/b.toml",
            ),
            // A star alone makes a pattern, and `^` alone negates, as in Go.
            (
                "imports = [\"conf.d/[^a]*.toml\"]\nversion = 2\n".to_owned(),
                vec![("a.toml", cri)],
                "conf.d/99-gpushare.toml",
            ),
            ("imports = [\"conf.d/?.toml\"]\nversion = 2\n".to_owned(), vec![("a.toml", cri)], "config.toml"),
        ] {
            assert_eq!(target_in(&main, &imported), want, "{main:?} with {imported:?}");
        }
    }

    #[test]
    fn what_k3s_writes_anew_is_not_edited() {
        let path = Path::new("/var/lib/rancher/k3s/agent/etc/containerd/config.toml");
        let error = named_containerd(path).unwrap_err().to_string();
        assert!(error.contains("config.toml.tmpl"), "{error}");
        let template = path.with_extension("toml.tmpl");
        assert_eq!(
            named_containerd(&template).unwrap().restart,
            Some("systemctl restart k3s (or k3s-agent)")
        );
    }
}
