//! The reader of the administrator's settings, which may hold mistakes.

use std::path::Path;

use gpushare_config::{Config, ConfigError};

/// Reads `data` as a settings file.
pub fn settings(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match Config::from_text(Path::new("fuzzed.toml"), text, Path::new("/opt/gpushare/bin")) {
        Ok(config) => {
            let paths = &config.paths;
            for path in [&paths.state, &paths.cache, &paths.hook, &paths.cli, &paths.libraries] {
                assert!(path.is_absolute(), "{path:?}");
            }
            assert!(config.runtimes.iter().all(|path| path.is_absolute()));
            let quota = &config.quota;
            assert!(
                [quota.memory_percent, quota.cores_percent]
                    .iter()
                    .all(|percent| (1..=1000).contains(percent))
            );
        }
        Err(error) => {
            let told = error.to_string();
            assert!(!told.contains('\n'), "one line: {told:?}");
            if let ConfigError::Mistake { line, .. } = error {
                assert!(line >= 1 && line <= 1 + text.matches('\n').count(), "{told}");
            }
        }
    }
}
