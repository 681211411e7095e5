//! The conformance table: below its mark `docs/dialects.md` holds what the sets say, and `make test` prints
//! the short one.

use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

use gpushare_request::{Container, read};

use super::golden::{gpus, granted, policy};
use super::sets::{Set, Sets, UUIDS, all};

/// Everything above this mark is written by hand.
const MARK: &str = "<!-- What follows is written by GPUSHARE_UPDATE_DOCS=1 cargo test -p gpushare-tests --test dialects -->\n";

fn page() -> String {
    let all = all();
    let mut page = summary(&all);
    for sets in &all {
        let _ = write!(page, "\n## {}\n\n{}.\n\n", sets.dialect, sets.writers);
        if let Some(example) =
            sets.set.iter().find_map(by_docker).or_else(|| sets.set.iter().find_map(by_ctr))
        {
            let _ = writeln!(page, "{example}");
        }
        page += "| case | the bundle has | outcome | on a strict node |\n|---|---|---|---|\n";
        for set in &sets.set {
            let cells = [set.case.clone(), words(set), outcome(set), strictly(set)];
            let _ = writeln!(page, "| {} |", cells.map(|cell| cell.replace('|', "\\|")).join(" | "));
        }
    }
    UUIDS
        .iter()
        .zip(["GPU-a", "GPU-b", "GPU-c", "GPU-d"])
        .fold(page, |page, (uuid, name)| page.replace(uuid, name))
}

/// One row per dialect: its channels, and how many of its sets each engine has run.
pub fn summary(all: &[Sets]) -> String {
    let mut table = "| dialect | channels | granted | refused | not a request | through runc | through docker | through CRI |\n\
                     |---|---|---|---|---|---|---|---|\n"
        .to_owned();
    for Sets { dialect, set: sets, .. } in all {
        let count = |is: fn(&Set) -> bool| sets.iter().filter(|set| is(set)).count();
        let has = |is: fn(&Set) -> bool, name: &'static str| sets.iter().any(is).then_some(name);
        let channels = [
            has(|set| !set.env.is_empty(), "variables"),
            has(|set| !set.annotations.is_empty(), "annotations"),
            has(|set| !set.mounts.is_empty(), "mounts"),
            has(|set| !set.nodes.is_empty(), "device nodes"),
        ];
        let channels: Vec<&str> = channels.into_iter().flatten().collect();
        let _ = writeln!(
            table,
            "| {dialect} | {} | {} | {} | {} | {} | {} | {} |",
            channels.join(", "),
            count(|set| !set.grants.is_empty()),
            count(|set| !set.refused.is_empty()),
            count(|set| set.passes),
            sets.len(),
            count(super::engines::is_dockers),
            count(Set::is_pods),
        );
    }
    table
}

/// The command by which docker asks for the set on the page's node; `None` where it cannot.
fn by_docker(set: &Set) -> Option<String> {
    let flags: Vec<String> = set.env.iter().map(|entry| format!("-e '{entry}'")).collect();
    let command = format!("    docker run --rm --runtime=gpushare {} IMAGE nvidia-smi\n", flags.join(" "));
    (is_usual(set) && super::engines::is_dockers(set)).then_some(command)
}

/// The command by which ctr asks for the set; `None` where it cannot. ctr passes annotations, and the outcome
/// is the same as from a pod.
fn by_ctr(set: &Set) -> Option<String> {
    let as_ctr = Set { engine: String::new(), ..set.clone() };
    let read = read(&Container::from_json(&as_ctr.bundle()), &policy(set, false), &gpus(15360));
    let same = matches!(read, Ok(Some(request)) if granted(&request) == set.grants);
    let annotations = set.annotations.iter().map(|(key, value)| format!("--annotation '{key}={value}'"));
    let env = set.env.iter().map(|entry| format!("--env '{entry}'"));
    let flags: Vec<String> = annotations.chain(env).collect();
    let command = format!(
        "    ctr run --rm --runc-binary /usr/local/bin/gpushare-runtime {} IMAGE NAME nvidia-smi\n",
        flags.join(" ")
    );
    (is_usual(set) && same && set.mounts.is_empty() && set.nodes.is_empty()).then_some(command)
}

/// Whether the set is granted under the shipped settings on the usual GPUs.
fn is_usual(set: &Set) -> bool {
    !set.grants.is_empty() && set.settings.is_empty() && set.total.is_none()
}

fn words(set: &Set) -> String {
    let engine = match set.engine.as_str() {
        "cri" => Some("containerd CRI:".to_owned()),
        "cri-o" => Some("CRI-O:".to_owned()),
        "podman" => Some("podman:".to_owned()),
        _ => None,
    };
    let code = |text: String| format!("`{}`", text.replace('`', "'"));
    let env = set.env.iter().cloned().map(code);
    let annotations = set.annotations.iter().map(|(key, value)| format!("annotation `{key}: {value}`"));
    let mounts = set.mounts.iter().map(|mount| format!("mount `{mount}`"));
    let nodes = set.nodes.iter().map(|node| format!("node `{node}`"));
    let settings = (!set.settings.is_empty())
        .then(|| format!("(settings `{}`)", set.settings.trim().replace('\n', " ")));
    let total = set.total.map(|total| format!("(GPUs of {total} MiB)"));
    let all = engine
        .into_iter()
        .chain(env)
        .chain(annotations)
        .chain(mounts)
        .chain(nodes)
        .chain(settings)
        .chain(total);
    all.collect::<Vec<_>>().join(" ")
}

fn outcome(set: &Set) -> String {
    match (set.passes, set.refused.is_empty()) {
        (true, _) => "no request".to_owned(),
        (_, false) => format!("refused: {}", set.refused),
        _ => set.grants.join("; "),
    }
}

/// The outcome on a strict node. A refusal that differs is given in full, since users meet it.
fn strictly(set: &Set) -> String {
    if set.strictly.is_empty() {
        return "the same".to_owned();
    }
    let container = Container::from_json(&set.bundle());
    match read(&container, &policy(set, true), &gpus(set.total.unwrap_or(15360))) {
        Err(error) => format!("refused: {}", gpushare_inject::one_line(&error)),
        Ok(_) => "granted".to_owned(),
    }
}

#[test]
fn the_page_of_dialects_is_what_the_sets_say() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/dialects.md");
    let text = fs::read_to_string(&path).unwrap();
    let (head, found) = text.split_once(MARK).expect("the page has its mark");
    let wanted = format!("\n{}", page());
    if env::var_os("GPUSHARE_UPDATE_DOCS").is_some() {
        fs::write(&path, format!("{head}{MARK}{wanted}")).unwrap();
        return;
    }
    assert!(
        found == wanted,
        "docs/dialects.md differs; if the sets are as they should be: GPUSHARE_UPDATE_DOCS=1"
    );
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    fs::write(folder.join("dialects.md"), summary(&all())).unwrap();
}
