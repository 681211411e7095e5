//! Finds variables by which a container's loader would take the driver's own files in place of ours.

use std::path::{Component, Path};

use gpushare_region::path::DRIVER_FOLDER;
use serde_json::Value;

use crate::parts::texts;

/// The loader's variables that hold lists of folders or libraries.
const VARIABLES: [&str; 3] = ["LD_LIBRARY_PATH", "LD_PRELOAD", "LD_AUDIT"];

/// The first of these variables in the bundle's environment that names the driver's private folder.
///
/// A link of the image that leads there under another name is not seen. No loader finds a library by name in
/// that folder, and a program that loads one by its path does so on purpose.
pub(crate) fn names_driver(json: &Value) -> Option<&'static str> {
    texts(json, "/process/env").find_map(|entry| {
        let (name, list) = entry.split_once('=')?;
        let variable = VARIABLES.into_iter().find(|variable| *variable == name)?;
        list.split([':', ';', ' ', '\t', '\n']).any(is_drivers).then_some(variable)
    })
}

/// Whether `item` is the folder or lies in it. It may be spelt in any way: relative, with `..`, or with
/// `$LIB`.
fn is_drivers(item: &str) -> bool {
    let mut parts = Vec::new();
    for part in Path::new(item).components() {
        match part {
            Component::Normal(name) => parts.push(name),
            Component::ParentDir => drop(parts.pop()),
            _ => {}
        }
    }
    let wanted: Vec<_> = Path::new(DRIVER_FOLDER).iter().collect();
    let [.., home, folder] = &wanted[..] else { return false };
    parts.windows(2).any(|pair| pair == [*home, *folder])
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_variable_that_names_the_drivers_folder_is_found_however_it_is_spelt() {
        for (entry, want) in [
            ("LD_LIBRARY_PATH=/usr/lib/gpushare/driver", true),
            ("LD_LIBRARY_PATH=/opt/lib:/usr/lib/gpushare/driver/:", true),
            ("LD_LIBRARY_PATH=/opt/lib;/usr//lib/./gpushare/x/../driver", true),
            ("LD_LIBRARY_PATH=/usr/$LIB/gpushare/driver", true),
            ("LD_LIBRARY_PATH=usr/lib/gpushare/driver", true),
            ("LD_LIBRARY_PATH=/proc/self/root/usr/lib/gpushare/driver", true),
            ("LD_PRELOAD=/lib/x.so /usr/lib/gpushare/driver/cuda", true),
            ("LD_AUDIT=/usr/lib/gpushare/driver/cuda", true),
            ("LD_LIBRARY_PATH=/usr/lib/gpushare", false),
            ("LD_LIBRARY_PATH=/usr/lib/gpushare/drivers:/driver", false),
            ("LD_LIBRARY_PATH=/usr/local/cuda/lib64", false),
            ("PATH=/usr/lib/gpushare/driver", false),
            ("LD_LIBRARY_PATH", false),
        ] {
            let json = json!({"process": {"env": ["A=b", entry]}});
            assert_eq!(names_driver(&json).is_some(), want, "{entry}");
        }
    }
}
