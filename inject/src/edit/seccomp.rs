//! No user namespace inside a share: in one, anybody may mount another file over the limits. The bundle's seccomp filter
//! is the one place of a bundle that can deny it.
//!
//! Of the three system calls that make one (clone(2), unshare(2)), two have their flags in the first argument, where a
//! filter can see them. clone3's are in memory: the C libraries do without it where it does not exist.

use serde_json::{Value, json};

use super::{EditError, list, object};

/// In the flags (sched.h).
const CLONE_NEWUSER: u64 = 0x1000_0000;
const EPERM: u32 = 1;
const ENOSYS: u32 = 38;
const BY_FLAGS: [&str; 2] = ["clone", "unshare"];
const IN_MEMORY: &str = "clone3";
/// Actions that keep a call from being made.
const DENYING: [&str; 5] =
    ["SCMP_ACT_ERRNO", "SCMP_ACT_KILL", "SCMP_ACT_KILL_PROCESS", "SCMP_ACT_KILL_THREAD", "SCMP_ACT_TRAP"];

/// Makes the filter of this config.json deny user namespaces, with everything else as it was.
///
/// # Errors
/// When it has an unknown form, or a condition that no second one can be added to.
pub(super) fn deny_user_namespaces(json: &mut Value) -> Result<(), EditError> {
    let linux = object(json, &["linux"], "linux")?;
    if linux.get("seccomp").is_none_or(Value::is_null) {
        // All that a program on x86-64 can call: of an architecture that is not listed, every call is fatal.
        linux.insert(
            "seccomp".to_owned(),
            json!({
                "defaultAction": "SCMP_ACT_ALLOW",
                "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
            }),
        );
    }
    let seccomp = object(json, &["linux", "seccomp"], "linux.seccomp")?;
    let default_denies = seccomp.get("defaultAction").is_some_and(is_denying);
    let rules = list(seccomp, "syscalls", "linux.seccomp.syscalls")?;
    let mut changed = Vec::with_capacity(rules.len());
    for rule in rules.drain(..) {
        changed.extend(without_new_users(rule)?);
    }
    if !default_denies {
        for rule in [
            json!({
                "names": BY_FLAGS, "action": "SCMP_ACT_ERRNO", "errnoRet": EPERM,
                "args": [{"index": 0, "value": CLONE_NEWUSER, "valueTwo": CLONE_NEWUSER, "op": "SCMP_CMP_MASKED_EQ"}]
            }),
            json!({"names": [IN_MEMORY], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS}),
        ] {
            changed.retain(|other| *other != rule);
            changed.push(rule);
        }
    }
    *rules = changed;
    Ok(())
}

/// Whether the filter denies them already, for a bundle that nobody can change any more.
pub(super) fn denies_user_namespaces(json: &Value) -> bool {
    let mut denying = json.clone();
    deny_user_namespaces(&mut denying).is_ok() && denying == *json
}

/// The rules that stand for `rule`, which may allow what makes a namespace.
fn without_new_users(rule: Value) -> Result<Vec<Value>, EditError> {
    let wrong = || EditError::Kind { field: "linux.seccomp.syscalls", kind: "a list of rules" };
    if rule.get("action").is_some_and(is_denying) {
        return Ok(vec![rule]);
    }
    let names = rule.get("names").and_then(Value::as_array).ok_or_else(wrong)?;
    let of = |kind: &[&str]| -> Vec<Value> {
        names.iter().filter(|name| name.as_str().is_some_and(|name| kind.contains(&name))).cloned().collect()
    };
    let (by_flags, in_memory) = (of(&BY_FLAGS), of(&[IN_MEMORY]));
    if by_flags.is_empty() && in_memory.is_empty() || sees_flags(&rule) && in_memory.is_empty() {
        return Ok(vec![rule]);
    }
    let mut rules = Vec::new();
    let others: Vec<Value> =
        names.iter().filter(|name| !by_flags.contains(name) && !in_memory.contains(name)).cloned().collect();
    if !others.is_empty() {
        rules.push(with(&rule, "names", others.into()));
    }
    if sees_flags(&rule) {
        rules.push(with(&rule, "names", by_flags.into()));
    } else if !by_flags.is_empty() {
        // Runtimes take two conditions on one argument for "either".
        let args = rule.get("args").and_then(Value::as_array).cloned().unwrap_or_default();
        if args.iter().any(|arg| arg.get("index").and_then(Value::as_u64) == Some(0)) {
            return Err(EditError::Seccomp { names: Value::from(by_flags).to_string() });
        }
        let mut args = args;
        args.push(json!({"index": 0, "value": CLONE_NEWUSER, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}));
        rules.push(with(&with(&rule, "names", by_flags.into()), "args", args.into()));
    }
    if !in_memory.is_empty() {
        rules.push(json!({"names": in_memory, "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS}));
    }
    Ok(rules)
}

/// Whether the rule lets only calls pass whose flags have no new user namespace.
fn sees_flags(rule: &Value) -> bool {
    let number = |arg: &Value, name: &str| arg.get(name).and_then(Value::as_u64).unwrap_or(0);
    let sees = |arg: &Value| {
        arg.get("op").and_then(Value::as_str) == Some("SCMP_CMP_MASKED_EQ")
            && number(arg, "index") == 0
            && number(arg, "value") & CLONE_NEWUSER != 0
            && number(arg, "valueTwo") & CLONE_NEWUSER == 0
    };
    let args = rule.get("args").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let of_first = args.iter().filter(|arg| number(arg, "index") == 0).count();
    of_first == 1 && args.iter().any(sees)
}

fn with(rule: &Value, field: &str, value: Value) -> Value {
    let mut rule = rule.clone();
    rule[field] = value;
    rule
}

fn is_denying(action: &Value) -> bool {
    action.as_str().is_some_and(|action| DENYING.contains(&action))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEW: u64 = CLONE_NEWUSER;

    fn denied(seccomp: Value) -> Value {
        let mut json = json!({"linux": {"seccomp": seccomp}});
        deny_user_namespaces(&mut json).unwrap();
        let once = json.clone();
        deny_user_namespaces(&mut json).unwrap();
        assert_eq!(json, once, "twice is once");
        assert!(denies_user_namespaces(&json));
        json["linux"]["seccomp"]["syscalls"].take()
    }

    fn deny() -> Value {
        json!({"names": ["clone", "unshare"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1,
               "args": [{"index": 0, "value": NEW, "valueTwo": NEW, "op": "SCMP_CMP_MASKED_EQ"}]})
    }

    fn absent() -> Value {
        json!({"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38})
    }

    #[test]
    fn a_bundle_without_a_filter_gets_one_that_denies_nothing_else() {
        for seccomp in [Value::Null, json!({"defaultAction": "SCMP_ACT_ALLOW"})] {
            assert_eq!(denied(seccomp), json!([deny(), absent()]));
        }
        assert!(!denies_user_namespaces(&json!({"linux": {}})));
    }

    #[test]
    fn what_a_filter_allows_is_allowed_without_a_new_user_namespace() {
        let allowed =
            |names: Value, args: Value| json!({"names": names, "action": "SCMP_ACT_ALLOW", "args": args});
        let masked =
            |value: u64| json!({"index": 0, "value": value, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"});
        let filter = |rules: Value| json!({"defaultAction": "SCMP_ACT_ERRNO", "syscalls": rules});
        // Docker's: threads and processes, but no namespaces.
        let dockers = json!([
            allowed(json!(["read"]), json!([])),
            allowed(json!(["clone"]), json!([masked(0x7e02_0000)]))
        ]);
        assert_eq!(denied(filter(dockers.clone())), dockers);
        // With CAP_SYS_ADMIN it allows them all.
        let rules = denied(filter(
            json!([{"names": ["mount", "unshare", "clone3", "clone"], "action": "SCMP_ACT_ALLOW"}]),
        ));
        let want = json!([
            {"names": ["mount"], "action": "SCMP_ACT_ALLOW"},
            allowed(json!(["unshare", "clone"]), json!([masked(NEW)])),
            absent(),
        ]);
        assert_eq!(rules, want);
        let other = json!({"index": 1, "value": 7, "op": "SCMP_CMP_EQ"});
        let rules = denied(filter(json!([allowed(json!(["clone"]), json!([other]))])));
        assert_eq!(rules, json!([allowed(json!(["clone"]), json!([other, masked(NEW)]))]));
        // One that sees other flags only cannot be narrowed.
        let first = json!({"linux": {"seccomp": filter(json!([allowed(json!(["clone"]), json!([masked(0x2_0000)]))]))}});
        assert!(matches!(deny_user_namespaces(&mut first.clone()), Err(EditError::Seccomp { .. })));
    }
}
