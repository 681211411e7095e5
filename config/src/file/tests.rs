use std::os::unix::fs::{PermissionsExt, symlink};

use gpushare_request::Policy;

use super::salvage::without_slips;
use super::*;

fn load(texts: &[&str]) -> Result<Config, ConfigError> {
    let folder = tempfile::tempdir().unwrap();
    let files: Vec<PathBuf> = (0..)
        .zip(texts)
        .map(|(number, text)| {
            let path = folder.path().join(format!("{number}.toml"));
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
            path
        })
        .collect();
    config(&files, Path::new("/opt/gpushare/bin"))
}

#[test]
fn the_shipped_file_is_whole_and_companions_lie_beside_the_program() {
    let config = load(&[]).unwrap();
    assert_eq!(
        config.roots,
        Roots { unusable_memory: DeviceMemory::from_bytes(16 << 20), ..Roots::default() }
    );
    assert_eq!(config.paths.state, Path::new("/run/gpushare"));
    assert_eq!(config.paths.cache, Path::new("/var/cache/gpushare"));
    assert_eq!(config.paths.hook, Path::new("/opt/gpushare/bin/gpushare-hook"));
    assert_eq!(config.paths.libraries, Path::new("/opt/gpushare/lib/gpushare"));
    assert_eq!(config.request, Policy::default());
    assert_eq!(config.quota, Admission::default());
    let grace = Duration::from_secs(30);
    assert_eq!(config.rules, Rules { idle: None, hold: None, grace, preempts: false });
}

#[test]
fn nothing_can_be_written_as_zero() {
    let unusable = |text: &str| {
        let file = format!("[node]\nunusable_memory = \"{text}\"\n");
        load(&[&file]).map(|config| config.roots.unusable_memory.bytes()).map_err(|error| error.to_string())
    };
    for (text, want) in [("", 0), ("0", 0), ("0MiB", 0), ("00Gi", 0), ("32MiB", 32 << 20)] {
        assert_eq!(unusable(text), Ok(want), "{text:?}");
    }
    for text in ["0%", "0x", "0.5", "16", "5%", "-1MiB"] {
        assert!(unusable(text).unwrap_err().contains("node.unusable_memory"), "{text:?}");
    }
}

#[test]
fn rules_have_times_with_a_unit() {
    let rules = |text: &str| load(&[&format!("[rules]\n{text}\n")]).map(|config| config.rules);
    let found = rules("idle = \"90m\"\nhold = \"7d\"\non_hold = \"end\"\npreemption = \"lower\"").unwrap();
    let rule = |seconds, ends| Some(Rule { after: Duration::from_secs(seconds), ends });
    assert_eq!((found.idle, found.hold, found.preempts), (rule(5400, false), rule(604_800, true), true));
    for text in [
        "idle = \"90\"",
        "idle = \"0m\"",
        "idle = \"-1m\"",
        "hold = \"99999999999999999999d\"",
        "hold = \"400d\"",
        "grace = \"\"",
        "on_idle = \"kill\"",
        "preemption = \"on\"",
    ] {
        let told = rules(text).unwrap_err().to_string();
        let key = text.split(' ').next().unwrap();
        assert!(told.contains(&format!("rules.{key}")), "{text}: {told}");
    }
}

#[test]
fn a_later_file_changes_only_what_it_names() {
    let config =
        load(&["[quota]\nplacement = \"spread\"\nreserve = \"1GiB\"\n", "[quota]\nreserve = \"2GiB\"\n"]);
    let quota = config.unwrap().quota;
    assert_eq!((quota.placement, quota.reserve.bytes()), (Placement::Spread, 2 << 30));
    assert_eq!(quota.memory_percent, 100);
}

#[test]
fn a_mistake_names_file_and_line() {
    for (text, line, word) in [
        ("[quota]\nplacment = \"spread\"\n", 2, "placment"),
        ("\n\n[quotas]\n", 3, "quotas"),
        ("[request]\nstrict = \"yes\"\n", 2, "invalid type"),
        ("[request\n", 1, ""),
        ("[[inject.mounts]]\nsource = \"/a\"\ndestination = \"/b\"\nrw = true\n", 4, "rw"),
    ] {
        let error = load(&[text]).unwrap_err();
        let ConfigError::Mistake { path, line: found, message } = &error else { panic!("{text:?}: {error}") };
        assert!(path.ends_with("0.toml") && *found == line && message.contains(word), "{text:?}: {error}");
        assert!(!error.to_string().contains('\n'), "{error}");
    }
}

#[test]
fn a_value_without_meaning_is_refused() {
    for text in [
        "[quota]\nplacement = \"best\"\n",
        "[quota]\nreserve = \"10%\"\n",
        "[quota]\nmemory_percent = 0\n",
        "[request]\ndefault_memory = \"8\"\n",
        "[request]\nnvidia = \"\"\n",
        "[request]\nenv_ceiling = \"8\"\n",
        "[request]\nunread_dialects = [\"hamy\"]\n",
        "[request]\nhonoured_switches = [\"PATH\"]\n",
        "[request]\ninterceptor = \"none\"\n",
        "[request]\nhonoured_switches = [\"CUDA_OVERSUBSCRIBE\"]\n",
        "[dialects.aliyun]\nindex = \"uuid\"\n",
        "[dialects.aliyun]\nunit = \"GB\"\n",
        "[dialects.hami]\nzero = \"\"\n",
        "[dialects.slurm]\nmps_memory = \"all\"\n",
        "[inject]\ndriver_limit = \"on\"\n",
        "[inject]\nleave_out = [\"/usr/bin/nvidia-smi\"]\n",
        "[inject]\nleave_out = [\"lib*.so\"]\n",
        "[inject]\nleave_out = [\"libcuda*\"]\n",
        "[inject]\nleave_out = [\"*\"]\n",
        "[mps]\ncompute_mode = \"default\"\n",
        "[mps]\ncompute_mode = \"\"\n",
        "[request]\ncapabilities = \"compute,cuda\"\n",
        "[paths]\nstate = \"run\"\n",
        "[runtime]\ncandidates = [\"runc\"]\n",
        "[log]\nlevel = \"loud\"\n",
        "[cdi]\nshares = [\"4GiB\", \"25%\"]\n",
    ] {
        let error = load(&["", text, "[quota]\n"]).unwrap_err();
        let ConfigError::Mistake { path, line, message } = &error else { panic!("{text:?}: {error}") };
        let key = text.lines().last().unwrap().split(' ').next().unwrap();
        assert!(path.ends_with("1.toml") && *line == 2 && message.contains(key), "{text:?}: {error}");
    }
    let mounts = "[[inject.mounts]]\nsource = \"a\"\ndestination = \"/b\"\n";
    let error = load(&[mounts]).unwrap_err();
    assert!(matches!(error, ConfigError::Mistake { line: 1, .. }), "{error}");
}

#[test]
fn mps_has_cards_alone_unless_their_mode_stays() {
    let is_exclusive = |text: &str| load(&[text]).map(|config| config.mps_is_exclusive);
    for (text, want) in [
        ("", true),
        ("[mps]\n", true),
        ("[mps]\ncompute_mode = \"exclusive\"\n", true),
        ("[mps]\ncompute_mode = \"unchanged\"\n", false),
    ] {
        assert_eq!(is_exclusive(text).ok(), Some(want), "{text:?}");
    }
    let error = is_exclusive("[mps]\ncompute_mode = \"default\"\n").unwrap_err().to_string();
    assert!(error.contains("must be exclusive or unchanged"), "{error}");
}

#[test]
fn a_file_that_others_may_write_and_a_link_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.toml");
    fs::write(&path, "").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o664)).unwrap();
    assert!(matches!(merge(std::slice::from_ref(&path)), Err(ConfigError::Unsafe { .. })));
    let link = folder.path().join("b.toml");
    symlink(&path, &link).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    assert!(matches!(merge(&[link]), Err(ConfigError::Unsafe { .. })));
    assert!(merge(&[path]).is_ok());
}

#[test]
fn runtimes_and_state_are_saved_from_a_file_with_a_mistake() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.toml");
    let text = "[runtime]\ncandidates = [\"/usr/bin/crun\"]\n[paths]\nstate = \"/s\"\n[quota]\nplacment = \"spread\"\n";
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    assert!(merge(std::slice::from_ref(&path)).is_err());
    let saved = salvage(std::slice::from_ref(&path)).unwrap().into_config(Path::new("/opt/bin")).unwrap();
    assert_eq!((saved.runtimes, saved.paths.state), (vec!["/usr/bin/crun".into()], "/s".into()));
    for lost in [
        "[runtime\n",
        "[runtme]\ncandidates = [\"/usr/bin/crun\"]\n",
        "candidates = [\"/usr/bin/crun\"]\n",
        "[runtime]\ncandidate = [\"/usr/bin/crun\"]\n",
        "[runtime]\ncandidate = [\"/usr/bin/crun\"]\n[request]\nstrict = fasle\n",
    ] {
        fs::write(&path, lost).unwrap();
        assert!(salvage(std::slice::from_ref(&path)).is_none(), "{lost}");
    }
}

#[test]
fn lines_that_are_no_toml_hide_no_runtime_unless_they_may_be_about_it() {
    let crun = "[runtime]\ncandidates = [\"/usr/bin/crun\"]\n";
    let candidates = |text: &str| {
        let table = without_slips(text)?;
        Some(table.get("runtime").and_then(|runtime| runtime.get("candidates")).map(ToString::to_string))
    };
    let found = Some(Some("[\"/usr/bin/crun\"]".to_owned()));
    for (text, want) in [
        (format!("{crun}[request]\nstrict = fasle\n"), &found),
        (format!("[request]\nstrict = fasle\nenv = \n[log]\nfile = \"/x\n{crun}"), &found),
        ("[request]\nstrict = fasle\n".to_owned(), &Some(None)),
        // The lost text may be about the runtime.
        (crun.replace(']', "]]"), &None),
        (format!("[request]\nstrict = fasle\n{}", crun.replacen('[', "", 1)), &None),
        ("[runtime]\ncandidates = [\n\"/usr/bin/crun\"\n\"/usr/bin/runc\"\n]\n".to_owned(), &None),
        (format!("[quota]\ncordoned = [\"a\",\n{crun}"), &None),
        (format!("[log]\nfile = \"\"\"\n{crun}\"\"\"\n[request]\nstrict = fasle\n"), &None),
        (format!("junk\n{crun}"), &None),
        (format!("{crun}[request]\n{}", "strict fasle\n".repeat(20)), &None),
    ] {
        assert_eq!(&candidates(&text), want, "{text}");
    }
    let shipped = SHIPPED.replace("strict = false", "strict = fasle");
    assert!(shipped != SHIPPED && without_slips(&shipped).is_some());
}

#[test]
fn what_is_shown_can_be_read_again() {
    let text = show(&[]).unwrap();
    let again: Table = toml::from_str(&text).unwrap();
    assert_eq!(again, toml::from_str(SHIPPED).unwrap());
}

#[test]
fn defaults_are_those_of_the_shipped_file() {
    let shipped = merge_text(Path::new("shipped"), SHIPPED).unwrap();
    assert_eq!(format!("{:?}", File::default()), format!("{shipped:?}"));
}
