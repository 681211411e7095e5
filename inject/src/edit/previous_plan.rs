//! Finds what an earlier start by the wrapper left in a bundle that was not written anew.

use std::path::Path;

use serde_json::Value;

use super::EditError;
use crate::parts::{entries, text, texts};

/// Refuses a bundle that asks for no share and still holds an earlier plan: the low-level runtime would look
/// for mount sources that were removed with their lease. `hook` is the path of our hook's program.
///
/// # Errors
/// When the bundle holds an earlier plan.
pub fn refuse_previous_plan(json: &Value, hook: &Path) -> Result<(), EditError> {
    match entries(json, "/hooks/prestart").any(|entry| is_of_a_lease(entry, hook)) {
        true => Err(EditError::PreviousPlan),
        false => Ok(()),
    }
}

/// The lease of the earlier plan that the bundle holds. `hook` is the path of our hook's program.
pub fn lease_of_previous_plan(json: &Value, hook: &Path) -> Option<i64> {
    let ours = entries(json, "/hooks/prestart").find(|entry| is_of_a_lease(entry, hook))?;
    texts(ours, "/args").skip_while(|word| *word != "--lease").nth(1)?.parse().ok()
}

/// Whether the wrapper put this hook in. A hook that an administrator configured (hook-only mode) names no
/// lease.
fn is_of_a_lease(entry: &Value, hook: &Path) -> bool {
    Path::new(text(entry, "path")) == hook && texts(entry, "/args").any(|word| word == "--lease")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_a_hook_of_a_lease_is_an_earlier_plan() {
        let hook = Path::new("/bin/gpushare-hook");
        for (path, args, earlier) in [
            ("/bin/gpushare-hook", &["gpushare-hook", "prestart", "--state", "/s", "--lease", "7"][..], true),
            ("/bin/gpushare-hook", &["gpushare-hook", "prestart"], false),
            ("/bin/other", &["gpushare-hook", "prestart", "--state", "/s", "--lease", "7"], false),
        ] {
            let json = json!({"hooks": {"prestart": [{"path": "/x"}, {"path": path, "args": args}]}});
            assert_eq!(refuse_previous_plan(&json, hook).is_err(), earlier, "{path} {args:?}");
            assert_eq!(lease_of_previous_plan(&json, hook), earlier.then_some(7), "{path} {args:?}");
        }
        assert_eq!(refuse_previous_plan(&json!({"hooks": 7}), hook), Ok(()));
    }
}
