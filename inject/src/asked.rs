//! What a container asks for under the node's settings, and that nobody asks in vain.

use gpushare_request::{Asked, Container, NvidiaPolicy, Policy, RequestError, ask, read};

/// Why there is no answer to what a container asks for.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum AskError {
    /// The request cannot be read.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// It asks where nobody looks.
    #[error(
        "its GPUSHARE_ variables are no request on this node (request.env); ask by annotation as gpushare.io/memory (docker \
         run --annotation, from docker 24 on), leave them and gpushare's CDI devices out, or have the administrator change \
         request.env"
    )]
    Unread,
}

/// What `container` asks for; `None` when it asks for nothing, and its bundle must stay as it came.
///
/// # Errors
/// When the request cannot be read, or stands in variables alone where the settings have nobody read them: whoever set them
/// would get a container without the GPU, or with another share than the one they name.
pub fn asked<'a>(container: &'a Container, policy: &'a Policy) -> Result<Option<Asked<'a>>, AskError> {
    let request = ask(container, policy)?;
    if policy.ignore_env && by_variables_alone(container, policy) {
        return Err(AskError::Unread);
    }
    Ok(request)
}

/// Whether variables of gpushare's own ask for something, be it malformed, and nothing else that `policy` has read does.
fn by_variables_alone(container: &Container, policy: &Policy) -> bool {
    let own = |ignore_env| Policy { ignore_env, nvidia: NvidiaPolicy::Ignore, ..policy.clone() };
    read(container, &own(true), &[]) == Ok(None) && read(container, &own(false), &[]) != Ok(None)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn who_asks_by_variables_alone_is_told_where_they_are_not_read() {
        let sandbox = ("io.kubernetes.cri.container-type", "sandbox");
        let annotation = ("gpushare.io/memory", "4GiB");
        for (env, annotated, unread) in [
            (&["GPUSHARE_MEMORY=4GiB"][..], ("a", "b"), true),
            (&["GPUSHARE_MEM=4GiB"], ("a", "b"), true),
            (&["GPUSHARE_MEMORY=4GiB", "NVIDIA_VISIBLE_DEVICES=all"], ("a", "b"), true),
            (&["GPUSHARE_CDI_GPU_0=gpushare.io/gpu=0"], ("a", "b"), true),
            (&["GPUSHARE_MEMORY=8GiB"], annotation, false),
            (&["GPUSHARE_MEMORY=4GiB"], sandbox, false),
            (&["NVIDIA_VISIBLE_DEVICES=all"], ("a", "b"), false),
            (&["GPUSHARE_CONFIG=/etc/x", "GPUSHARE_MEMORY"], ("a", "b"), false),
        ] {
            let (name, value) = annotated;
            let json = json!({"process": {"env": env}, "annotations": {name: value}});
            let container = Container::from_json(&json);
            for nvidia in [NvidiaPolicy::Ignore, NvidiaPolicy::DefaultShare] {
                let ignore_env = Policy { ignore_env: true, nvidia, ..Policy::default() };
                let told = asked(&container, &ignore_env).map(drop);
                assert_eq!(told == Err(AskError::Unread), unread, "{env:?} {annotated:?}: {told:?}");
            }
            let read = asked(&container, &Policy::default()).map(drop);
            assert_ne!(read, Err(AskError::Unread), "{env:?}");
        }
    }

    #[test]
    fn a_dialect_that_is_not_read_is_no_other_request() {
        let env = ["GPUSHARE_MEMORY=4GiB", "NVIDIA_VISIBLE_DEVICES=0", "CUDA_DEVICE_MEMORY_LIMIT=4g"];
        let container = Container::from_json(&json!({"process": {"env": env}}));
        let unread_dialects = vec!["hami".to_owned()];
        let policy =
            Policy { ignore_env: true, nvidia: NvidiaPolicy::Ignore, unread_dialects, ..Policy::default() };
        assert_eq!(asked(&container, &policy).map(drop), Err(AskError::Unread));
    }
}
