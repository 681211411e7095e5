//! Which engines of this machine know the runtime, by their settings alone; for `gpushare doctor`.

use serde_json::Value;

use super::target::{self, Target};
use super::{Engine, WRAPPER, check, file, toml_text};

/// The engines that run containers on this machine, and whether their settings name the runtime. Left out are
/// containerd where docker uses it, podman, which takes a runtime by its path, and an engine whose settings
/// cannot be read, about which `gpushare configure` says more.
pub fn engines() -> Vec<(Engine, bool)> {
    let mut here = vec![Engine::Docker, Engine::Containerd, Engine::Crio];
    here.retain(|engine| check::program(*engine).is_some());
    let known = here.iter().filter_map(|engine| {
        let knows = knows(*engine, &target::find(*engine, None).ok()?)?;
        let is_dockers = *engine == Engine::Containerd && here.contains(&Engine::Docker);
        (knows || !is_dockers).then_some((*engine, knows))
    });
    known.collect()
}

/// Whether the settings name our program as a runtime; `None` when they cannot be read.
fn knows(engine: Engine, target: &Target) -> Option<bool> {
    let mut settings = Vec::new();
    for path in [&target.file, &target.main] {
        let Some(text) = file::read(path).ok()? else { continue };
        settings.push(match engine {
            Engine::Docker => serde_json::from_str(&text).ok()?,
            _ => serde_json::to_value(toml_text::values(&text).ok()?).ok()?,
        });
    }
    for others in &target.others {
        settings.push(serde_json::to_value(others).ok()?);
    }
    Some(settings.iter().any(names_the_wrapper))
}

fn names_the_wrapper(values: &Value) -> bool {
    match values {
        Value::String(text) => text.rsplit('/').next() == Some(WRAPPER),
        Value::Array(list) => list.iter().any(names_the_wrapper),
        Value::Object(fields) => fields.values().any(names_the_wrapper),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn an_engine_knows_the_runtime_when_its_settings_name_our_program() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("settings");
        let target = target::find(Engine::Docker, Some(&path)).unwrap();
        assert_eq!(knows(Engine::Docker, &target), Some(false), "no file");
        for (engine, text, want) in [
            (
                Engine::Docker,
                r#"{"runtimes": {"gpushare": {"path": "/usr/bin/gpushare-runtime"}}}"#,
                Some(true),
            ),
            (Engine::Docker, r#"{"runtimes": {"gpushare-runtime": {"path": "/usr/bin/crun"}}}"#, Some(false)),
            (Engine::Docker, "{", None),
            (Engine::Docker, "{}", Some(false)),
            (Engine::Containerd, "[a.options]\nBinaryName = '/usr/bin/gpushare-runtime'\n", Some(true)),
            (Engine::Containerd, "# /usr/bin/gpushare-runtime\nversion = 2\n", Some(false)),
        ] {
            fs::write(&path, text).unwrap();
            assert_eq!(knows(engine, &target), want, "{text}");
        }
    }
}
