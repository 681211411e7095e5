//! The reader of the container's state on a hook's standard input, which the low-level runtime writes from an
//! image's strings.

use oci_spec::runtime::State;

/// Reads `data` as the hook does.
pub fn state(data: &[u8]) {
    let Ok(state) = serde_json::from_slice::<State>(data) else { return };
    let text = serde_json::to_vec(&state).expect("a state can be written");
    let again: State = serde_json::from_slice(&text).expect("what was written can be read");
    assert_eq!((state.id(), state.pid()), (again.id(), again.pid()));
}
