//! Tests each engine's editing on configurations as they are found in the field (`tests/configure/`).

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::bail;
use toml::Table;

use super::{Engine, FileChange, Runtime, containerd, crio, docker, not_taken, podman, toml_text, write};

const ENGINES: [Engine; 4] = [Engine::Docker, Engine::Containerd, Engine::Crio, Engine::Podman];

fn runtime(default: bool) -> Runtime {
    Runtime { name: "gpushare".to_owned(), path: "/usr/local/bin/gpushare-runtime".to_owned(), default }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> = entries.filter(|path| path.is_file()).collect();
    files.sort();
    files
}

fn folder(engine: Engine) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/configure").join(engine.name())
}

fn each(mut test: impl FnMut(Engine, &Path, &str, &Runtime)) {
    for engine in ENGINES {
        let files = files(&folder(engine));
        assert!(files.len() >= 12, "{engine:?} has {} files", files.len());
        for file in files {
            let text = fs::read_to_string(&file).unwrap();
            for default in [false, true] {
                test(engine, &file, &text, &runtime(default));
            }
        }
    }
}

fn add(
    engine: Engine,
    file: &Path,
    before: &docker::Files,
    runtime: &Runtime,
) -> Result<docker::Files, String> {
    let text = before.settings.as_deref().unwrap_or_default();
    let added = match engine {
        Engine::Docker => return docker::with(before, runtime).map_err(|mistake| mistake.to_string()),
        Engine::Containerd => containerd::with(text, file, runtime),
        Engine::Crio => crio::with(text, &[], runtime),
        Engine::Podman => podman::with(text, &[], runtime),
    };
    added.map(settings).map_err(|mistake| mistake.to_string())
}

fn added(engine: Engine, file: &Path, before: &docker::Files, runtime: &Runtime) -> docker::Files {
    add(engine, file, before, runtime)
        .unwrap_or_else(|error| panic!("{} with {runtime:?}: {error}", file.display()))
}

fn remove(engine: Engine, files: &docker::Files, name: &str) -> Result<docker::Files, String> {
    let text = files.settings.as_deref().unwrap_or_default();
    let removed = match engine {
        Engine::Docker => return left_without(files, name),
        Engine::Containerd => containerd::removed(text, name),
        Engine::Crio => crio::removed(text, name),
        Engine::Podman => podman::removed(text, name),
    };
    removed.map(|settings| docker::Files { settings, record: None }).map_err(|mistake| mistake.to_string())
}

fn left_without(files: &docker::Files, name: &str) -> Result<docker::Files, String> {
    docker::without(files, name).map(|(files, _)| files).map_err(|mistake| mistake.to_string())
}

fn settings(text: impl Into<String>) -> docker::Files {
    docker::Files { settings: Some(text.into()), record: None }
}

fn text(files: &docker::Files) -> &str {
    files.settings.as_deref().unwrap_or_default()
}

/// The lines of `old` that are not in `new` in the same order. A line that was replaced stands in `new` as a
/// comment.
fn missing_lines<'a>(old: &'a str, new: &str) -> Vec<&'a str> {
    let mut lines = new.lines();
    old.lines()
        .filter(|line| !lines.any(|new| new == *line || is_former(new, line) || grew(new, line)))
        .collect()
}

fn is_former(new: &str, old: &str) -> bool {
    new.strip_prefix("# before gpushare configure for \"gpushare\": ") == Some(old)
}

/// Whether `new` is `old` with something added, as JSON and lists grow within a line: all letters of `old`
/// are in it, in order.
fn grew(new: &str, old: &str) -> bool {
    let mut letters = new.chars();
    let kept = old.chars().all(|letter| letters.any(|new| new == letter));
    kept && new.len() > old.len() || new.contains("default-runtime") && old.contains("default-runtime")
}

#[test]
fn a_runtime_comes_into_every_file_and_harms_no_line() {
    each(|engine, file, old, runtime| {
        let named = format!("{} with {runtime:?}", file.display());
        let new =
            add(engine, file, &settings(old), runtime).unwrap_or_else(|error| panic!("{named}: {error}"));
        assert_eq!(missing_lines(old, text(&new)), Vec::<&str>::new(), "{named}: {}", text(&new));
        assert!(new.settings.as_deref() != Some(old), "{named}");
        assert!(has_runtime(engine, text(&new), runtime), "{named}: {}", text(&new));
    });
}

/// Whether the runtime is in `text`, by a parser other than that of the editing where that is possible.
fn has_runtime(engine: Engine, text: &str, runtime: &Runtime) -> bool {
    if engine == Engine::Docker {
        let bare = text.trim_start_matches('\u{feff}');
        let values: serde_json::Value = serde_json::from_str(bare).unwrap();
        let default = values["default-runtime"] == "gpushare";
        return values["runtimes"]["gpushare"]["path"] == runtime.path && default == runtime.default;
    }
    let values = toml_text::values(text).unwrap();
    match engine {
        Engine::Containerd => {
            let found = containerd::fault(&values, runtime);
            assert_eq!(found, None);
            containerd::is_default(text, "gpushare") == runtime.default
        }
        Engine::Crio => {
            assert_eq!(crio::fault(&values, runtime), None);
            crio::is_default(text, "gpushare") == runtime.default
        }
        _ => {
            let engine = &values["engine"];
            let json = engine["runtime_supports_json"].as_array().unwrap();
            json.iter().any(|name| name.as_str() == Some("gpushare"))
                && engine["runtimes"]["gpushare"][0].as_str() == Some(&runtime.path)
                && (engine.get("runtime").and_then(toml::Value::as_str) == Some("gpushare"))
                    == runtime.default
        }
    }
}

#[test]
fn adding_twice_is_adding_once() {
    each(|engine, file, old, runtime| {
        let once = added(engine, file, &settings(old), runtime);
        let twice = added(engine, file, &once, runtime);
        assert_eq!(twice, once, "{}", file.display());
    });
}

#[test]
fn removing_gives_the_old_bytes_back() {
    each(|engine, file, old, runtime| {
        let new = added(engine, file, &settings(old), runtime);
        assert_eq!(remove(engine, &new, "gpushare").unwrap(), settings(old), "{}", file.display());
    });
}

#[test]
fn removing_from_a_file_without_us_changes_nothing() {
    each(|engine, file, old, _| {
        assert_eq!(remove(engine, &settings(old), "gpushare").unwrap(), settings(old), "{}", file.display());
    });
}

#[test]
fn another_path_replaces_the_old_one_and_removing_still_gives_the_old_bytes_back() {
    each(|engine, file, old, runtime| {
        let new = added(engine, file, &settings(old), runtime);
        let moved = Runtime { path: "/opt/gpushare/bin/gpushare-runtime".to_owned(), ..runtime.clone() };
        let newer = added(engine, file, &new, &moved);
        assert!(has_runtime(engine, text(&newer), &moved), "{}", file.display());
        assert!(!text(&newer).contains("/usr/local/bin/gpushare-runtime"), "{}", file.display());
        assert_eq!(remove(engine, &newer, "gpushare").unwrap(), settings(old), "{}", file.display());
    });
}

#[test]
fn a_file_that_was_made_for_the_runtime_goes_with_it() {
    for default in [false, true] {
        let runtime = runtime(default);
        let none = docker::Files::default();
        let made = docker::with(&none, &runtime).unwrap();
        assert_eq!(left_without(&made, "gpushare").unwrap(), none);
        for file in ["config.toml", "config.toml.tmpl"] {
            let file = Path::new(file);
            let made = containerd::with(containerd::head(file), file, &runtime).unwrap();
            assert_eq!(containerd::removed(&made, "gpushare").unwrap(), None);
        }
        let made = crio::with(crio::HEAD, &[], &runtime).unwrap();
        assert_eq!(crio::removed(&made, "gpushare").unwrap(), None);
        let made = podman::with(podman::HEAD, &[], &runtime).unwrap();
        assert_eq!(podman::removed(&made, "gpushare").unwrap(), None);
    }
}

#[test]
fn a_file_that_is_not_understood_is_refused_with_its_line() {
    for (engine, file, want) in [
        (Engine::Docker, "empty.json", "line 1: the file is empty: write {} into it, or delete it"),
        (Engine::Docker, "blank.json", "line 1: the file is empty"),
        (Engine::Docker, "comment.json", "line 2: not JSON: key must be a string (JSON has no comments)"),
        (Engine::Docker, "trailing-comma.json", "line 3: not JSON: trailing comma"),
        (Engine::Docker, "cut-off.json", "line 4: not JSON: EOF"),
        (Engine::Docker, "list.json", "line 1: an object { ... } is expected"),
        (Engine::Docker, "runtimes-as-list.json", "line 2: \"runtimes\" must be an object"),
        (Engine::Docker, "twice.json", "line 4: \"runtimes\" stands twice"),
        (Engine::Docker, "another-program.json", "line 3: the runtime \"gpushare\" is another program"),
        (Engine::Containerd, "cri-is-off.toml", "line 3: the CRI plugin is off"),
        (Engine::Containerd, "cri-is-off-version-3.toml", "line 2: the CRI plugin is off"),
        (Engine::Containerd, "not-toml.toml", "line 2: "),
        (Engine::Containerd, "version-5.toml", "line 1: settings of version 5 are not known"),
        (Engine::Containerd, "version-is-missing.toml", "line 2: this table is of version 2"),
        (Engine::Containerd, "inline-tables.toml", "line 3: "),
        (Engine::Containerd, "by-hand.toml", "line 2: the runtime \"gpushare\" is here already"),
        (Engine::Containerd, "half-a-block.toml", "line 2: \"# BEGIN gpushare"),
        (Engine::Containerd, "somebodys-table-in-our-block.toml", "line 2: metrics.address in this block"),
        (Engine::Crio, "not-toml.conf", "line 2: "),
        (Engine::Crio, "by-hand.conf", "line 1: the runtime \"gpushare\" is here already"),
        (Engine::Crio, "inline.conf", "line 2: "),
        (Engine::Crio, "end-alone.conf", "line 2: \"# END gpushare"),
        (Engine::Podman, "not-toml.conf", "line 2: "),
        (Engine::Podman, "by-hand.conf", "line 2: the runtime \"gpushare\" is here already"),
        (Engine::Podman, "list-of-tables.conf", "line 1: "),
        (Engine::Podman, "text-for-a-list.conf", "line 3: a list is expected here"),
        (Engine::Podman, "dotted-keys.conf", "line 1: this file is written in a form"),
    ] {
        let file = folder(engine).join("refused").join(file);
        let text = fs::read_to_string(&file).unwrap();
        let error = add(engine, &file, &settings(text), &runtime(true)).unwrap_err();
        assert!(error.contains(want), "{}: {error}", file.display());
        assert!(!error.contains('\n'), "{}: {error}", file.display());
    }
    let refused: usize = ENGINES.iter().map(|engine| files(&folder(*engine).join("refused")).len()).sum();
    assert_eq!(refused, 27, "every file is in the table");
}

/// The next number of a sequence that is the same in every run.
fn random(state: &mut u64) -> usize {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    usize::try_from(*state >> 33).unwrap()
}

/// Where a line may be put in: not within our block, nor between a line of ours and what it replaced.
fn gaps(text: &str) -> Vec<usize> {
    let mut inside = false;
    let mut gaps = Vec::new();
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        let bare = line.trim_end();
        inside |= bare.starts_with("# BEGIN gpushare");
        let ours = inside || bare.contains("gpushare configure for");
        if !ours && line.ends_with('\n') {
            gaps.push(at + line.len());
        }
        inside &= bare != "# END gpushare \"gpushare\"";
        at += line.len();
    }
    if !text.starts_with('\u{feff}') {
        gaps.push(0);
    }
    gaps
}

#[test]
fn comments_and_tables_of_others_stay_when_the_runtime_goes() {
    let mut state = 0x5eed_u64;
    each(|engine, file, old, runtime| {
        if engine == Engine::Docker || old.contains("\"\"\"") || old.contains("/*") {
            return; // JSON has its own test; a line within a text of several lines would be part of it
        }
        let new = added(engine, file, &settings(old), runtime);
        for round in 0..20 {
            // The same lines go into the text with the runtime and into the one without, after the same lines
            // of the old text.
            let (mut with, mut without) = (text(&new).to_owned(), old.to_owned());
            for number in 0..=random(&mut state) % 4 {
                let places = gaps(&without);
                if places.is_empty() {
                    break;
                }
                let at = places[random(&mut state) % places.len()];
                let line = format!("# {round}.{number} by somebody else\n");
                let Some(other) = same_place(&without, at, &with) else { continue };
                without.insert_str(at, &line);
                with.insert_str(other, &line);
            }
            if random(&mut state).is_multiple_of(2) && with.ends_with('\n') && without.ends_with('\n') {
                let table = format!("[somebody.s{round}]\nkey = {round}\n");
                with += &table;
                without += &table;
            }
            let left = remove(engine, &settings(&*with), "gpushare")
                .unwrap_or_else(|error| panic!("{}: {error} in {with}", file.display()));
            assert_eq!(text(&left), without, "{} from {with}", file.display());
            let again = added(engine, file, &settings(&*with), runtime);
            assert_eq!(text(&again), with, "{}: adding again changes nothing", file.display());
        }
    });
}

/// The byte of `with` that follows the same lines of the old text as `at` in `without`.
fn same_place(without: &str, at: usize, with: &str) -> Option<usize> {
    if at == 0 {
        return Some(0);
    }
    let wanted = without[..at].lines().count();
    let places = gaps(with);
    let plain = |end: usize| {
        let mut inside = false;
        let lines = with[..end].lines().filter(|line| {
            inside |= line.starts_with("# BEGIN gpushare");
            let counts =
                !inside && !line.trim_end().ends_with("# set by gpushare configure for \"gpushare\"");
            inside &= line.trim_end() != "# END gpushare \"gpushare\"";
            counts
        });
        lines.count()
    };
    let found = places.into_iter().filter(|end| *end > 0).find(|end| plain(*end) == wanted)?;
    let line = without[..at].split_inclusive('\n').next_back().unwrap_or_default();
    with[..found].ends_with(line).then_some(found)
}

#[test]
fn members_of_others_stay_when_the_runtime_goes() {
    let mut state = 0xca5e_u64;
    for file in files(&folder(Engine::Docker)) {
        let old = fs::read_to_string(&file).unwrap();
        for default in [false, true] {
            let new = docker::with(&settings(&*old), &runtime(default)).unwrap();
            for _ in 0..20 {
                // A tool of somebody else writes the file anew, with more members, in its own order and form.
                let bare = |text: &str| text.trim_start_matches('\u{feff}').to_owned();
                let (mut with, mut without): (serde_json::Value, serde_json::Value) = (
                    serde_json::from_str(&bare(text(&new))).unwrap(),
                    serde_json::from_str(&bare(&old)).unwrap(),
                );
                for number in 0..random(&mut state) % 3 {
                    for value in [&mut with, &mut without] {
                        value[format!("somebodys-{number}")] = serde_json::json!({ "n": number });
                        value["runtimes"][format!("theirs-{number}")] = serde_json::json!({ "path": "/x" });
                    }
                }
                let written = match random(&mut state) % 2 {
                    0 => with.to_string(),
                    _ => format!("{with:#}\n"),
                };
                let files = docker::Files { settings: Some(written), record: new.record.clone() };
                let left = left_without(&files, "gpushare").unwrap();
                let left: serde_json::Value = serde_json::from_str(text(&left)).unwrap();
                assert_eq!(left, without, "{}", file.display());
            }
        }
    }
}

#[test]
fn a_default_that_somebody_chose_since_is_his() {
    let file = Path::new("config.toml");
    let old =
        "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\ndefault_runtime_name = \"runc\"\n";
    let new = containerd::with(old, file, &runtime(true)).unwrap();
    let edited = new.replacen("default_runtime_name = \"gpushare\"", "default_runtime_name = \"kata\"", 1);
    assert_ne!(new, edited);
    assert_eq!(containerd::removed(&edited, "gpushare").unwrap(), Some(old.replace("runc", "kata")));

    let old = "{\n  \"default-runtime\": \"runc\"\n}\n";
    let new = docker::with(&settings(old), &runtime(true)).unwrap();
    let edited = text(&new).replace("\"default-runtime\": \"gpushare\"", "\"default-runtime\": \"kata\"");
    let left =
        left_without(&docker::Files { settings: Some(edited), record: new.record }, "gpushare").unwrap();
    assert_eq!(text(&left), old.replace("runc", "kata"));
}

#[test]
fn a_default_that_docker_does_not_know_any_more_is_not_put_back() {
    for (before, is_back) in [("nvidia", false), ("runc", true), ("io.containerd.runc.v2", true)] {
        let old = format!("{{\"default-runtime\": \"{before}\", \"runtimes\": {{\"nvidia\": {{}}}}}}");
        let new = docker::with(&settings(&*old), &runtime(true)).unwrap();
        let edited = text(&new).replace("\"nvidia\": {},", "");
        assert!(!edited.contains("\"nvidia\""), "{edited}");
        let files = docker::Files { settings: Some(edited), record: new.record };
        let (left, gone) = docker::without(&files, "gpushare").unwrap();
        assert_eq!(text(&left).contains(before), is_back, "{before}");
        assert_eq!(gone, (!is_back).then(|| format!("\"{before}\"")));
    }
}

#[test]
fn of_two_names_in_docker_the_one_that_goes_takes_nothing_of_the_others() {
    let old = settings("{\"default-runtime\": \"crun\", \"runtimes\": {\"crun\": {}}}");
    let ours = docker::with(&old, &runtime(true)).unwrap();
    let second = Runtime { name: "other".to_owned(), ..runtime(false) };
    let both = docker::with(&ours, &second).unwrap();
    let left = left_without(&both, "other").unwrap();
    assert_eq!(left, ours);
    assert!(docker::has_our_default(text(&left)));
    assert_eq!(left_without(&left, "gpushare").unwrap(), old);
    let other_stays = left_without(&both, "gpushare").unwrap();
    assert!(!docker::has_our_default(text(&other_stays)) && text(&other_stays).contains("crun"));
    assert_eq!(left_without(&other_stays, "other").unwrap(), old);
}

#[test]
fn what_is_remembered_of_docker_is_checked() {
    let old = settings("{\"default-runtime\": \"runc\"}");
    let mut new = docker::with(&old, &runtime(true)).unwrap();
    new.record = Some("{\"default-runtime\": \"a, b\"}".to_owned());
    assert!(left_without(&new, "gpushare").unwrap_err().contains("damaged"));
    new.record = None;
    let left = left_without(&new, "gpushare").unwrap();
    assert_eq!(text(&left), "{}", "without a record docker's own default is in force");
}

#[test]
fn runcs_settings_hold_for_ours_but_for_program_and_annotations() {
    let file = folder(Engine::Containerd).join("kubeadm.toml");
    let text = fs::read_to_string(&file).unwrap();
    let new: Table = toml_text::values(&containerd::with(&text, &file, &runtime(false)).unwrap()).unwrap();
    let handler = &new["plugins"]["io.containerd.grpc.v1.cri"]["containerd"]["runtimes"]["gpushare"];
    assert_eq!(handler["base_runtime_spec"].as_str(), Some("/etc/containerd/base.json"));
    assert_eq!(handler["options"]["Root"].as_str(), Some("/run/kube-runc"));
    assert_eq!(handler["options"]["SystemdCgroup"].as_bool(), Some(true));
    assert_eq!(handler["options"]["BinaryName"].as_str(), Some("/usr/local/bin/gpushare-runtime"));
    let pods = handler["pod_annotations"].as_array().unwrap();
    assert!(pods.iter().all(|pattern| pattern.as_str() != Some("*")), "{pods:?}");
}

#[test]
fn crio_finds_the_monitor_where_its_neighbours_have_it() {
    let neighbours = fs::read_to_string(folder(Engine::Crio).join("drop-in-of-1.30.conf")).unwrap();
    let new = crio::with(crio::HEAD, &[toml_text::values(&neighbours).unwrap()], &runtime(false)).unwrap();
    let handler = &toml_text::values(&new).unwrap()["crio"]["runtime"]["runtimes"]["gpushare"];
    assert_eq!(handler["monitor_path"].as_str(), Some("/usr/libexec/crio/conmon"));
    assert_eq!(handler.get("runtime_root"), None, "the neighbour's states are the neighbour's");
}

#[test]
fn podmans_list_of_runtimes_with_json_is_continued() {
    let others: Table = toml::from_str("[engine]\nruntime_supports_json = [\"mine\"]\n").unwrap();
    let new = podman::with(podman::HEAD, &[others], &runtime(false)).unwrap();
    let list = toml_text::values(&new).unwrap()["engine"]["runtime_supports_json"].clone();
    assert_eq!(list.to_string(), "[\"mine\", \"gpushare\", \"gpushare-runtime\"]");
}

#[test]
fn the_snippets_that_are_shipped_are_what_configure_writes() {
    let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("packaging");
    let shipped = |name: &str| fs::read_to_string(packaging.join(name)).unwrap();
    let runtime = Runtime { path: "@PREFIX@/bin/gpushare-runtime".to_owned(), ..runtime(false) };
    let docker = docker::with(&docker::Files::default(), &runtime).unwrap();
    assert_eq!(text(&docker), shipped("docker-daemon.json"));
    let file = Path::new("containerd.toml");
    assert_eq!(containerd::with(containerd::head(file), file, &runtime).unwrap(), shipped("containerd.toml"));
}

#[test]
fn a_runtimes_name_is_one_that_every_engine_takes() {
    for sound in ["gpushare", "gpu-2", "a"] {
        assert_eq!(super::name(sound).as_deref(), Ok(sound));
    }
    for bad in ["", "runc", "crun", "GPU", "a b", "a.b", "-a", "a-", "a\"b", &"a".repeat(64)] {
        assert!(super::name(bad).is_err(), "{bad:?}");
    }
}

#[test]
fn what_does_not_come_into_force_is_taken_back() {
    let folder = tempfile::tempdir().unwrap();
    let change = |name: &str, before: Option<&str>| FileChange {
        path: folder.path().join(name),
        before: before.map(str::to_owned),
        after: Some("new".to_owned()),
    };
    let changes = [change("made", None), change("changed", Some("old"))];
    let [made, changed] = [0, 1].map(|number| changes[number].path.as_path());
    fs::write(changed, "old").unwrap();
    let is_written =
        || [made, changed].iter().all(|path| fs::read_to_string(path).is_ok_and(|text| text == "new"));

    let error = write(&changes, || {
        assert!(is_written(), "the engine is asked about what was written");
        bail!("the engine takes another file")
    });
    assert_eq!(format!("{:#}", error.unwrap_err()), "the old settings stand: the engine takes another file");
    assert!(!made.exists());
    assert_eq!(fs::read_to_string(changed).unwrap(), "old");

    // If somebody else has written meanwhile, the error tells both problems.
    let error = write(&changes, || {
        fs::write(changed, "another's").unwrap();
        bail!("the engine takes another file")
    });
    let line = format!("{:#}", error.unwrap_err());
    assert!(line.starts_with("the engine takes another file; and the old settings could not"), "{line}");
    assert_eq!(fs::read_to_string(changed).unwrap(), "another's");
    fs::remove_file(made).unwrap();

    fs::write(changed, "old").unwrap();
    write(&changes, || Ok(())).unwrap();
    assert!(is_written());
}

#[test]
fn a_name_that_another_file_gives_to_another_program_is_refused() {
    let runtime = runtime(false);
    for (entry, text, is_taken) in [
        (podman::entry("gpushare"), "[engine.runtimes]\ngpushare = [\"/usr/bin/runc\"]\n", true),
        (
            podman::entry("gpushare"),
            "engine = { runtimes = { gpushare = [\"/opt/x/gpushare-runtime\"] } }\n",
            false,
        ),
        (podman::entry("gpushare"), "[engine.runtimes]\nother = [\"/usr/bin/runc\"]\n", false),
        (
            crio::entry("gpushare"),
            "[crio.runtime.runtimes.gpushare]\nruntime_path = \"/usr/bin/runc\"\n",
            true,
        ),
        (
            crio::entry("gpushare"),
            "[crio.runtime.runtimes.gpushare]\nruntime_path = \"/x/gpushare-runtime\"\n",
            false,
        ),
        (crio::entry("gpushare"), "[crio.runtime.runtimes.gpushare]\nruntime_type = \"oci\"\n", true),
    ] {
        let others: Table = toml::from_str(text).unwrap();
        let refused = not_taken(&[others], &entry, &runtime).err().map(|error| error.to_string());
        assert_eq!(refused.is_some(), is_taken, "{text}: {refused:?}");
        assert!(refused.is_none_or(|told| told.contains("choose another name (--name)")));
    }
}
