//! Denies user namespaces inside a share: in one, any user may mount another file over the limits. Only the
//! bundle's seccomp filter can deny them.
//!
//! Three system calls make a user namespace. clone(2) and unshare(2) have their flags in the first argument,
//! where a filter sees them. clone3(2) has them in memory, so it is answered with ENOSYS: the C libraries do
//! without it then.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::{EditError, list, object};
use crate::parts::{self, text};

/// The flag for a new user namespace (sched.h).
const CLONE_NEWUSER: u64 = 0x1000_0000;
const EPERM: u32 = 1;
const ENOSYS: u32 = 38;
const BY_FLAGS: [&str; 2] = ["clone", "unshare"];
const IN_MEMORY: &str = "clone3";
/// Actions that keep a call from being made.
const DENYING: [&str; 5] =
    ["SCMP_ACT_ERRNO", "SCMP_ACT_KILL", "SCMP_ACT_KILL_PROCESS", "SCMP_ACT_KILL_THREAD", "SCMP_ACT_TRAP"];

/// Makes the filter of this config.json deny user namespaces, and changes nothing else in it.
///
/// # Errors
/// When the filter has an unknown form, or a condition to which no second one can be added.
pub(super) fn deny_user_namespaces(json: &mut Value) -> Result<(), EditError> {
    let linux = object(json, &["linux"], "linux")?;
    if linux.get("seccomp").is_none_or(is_none) {
        // Every architecture whose calls a program on x86-64 can make. A call of one that is not listed is
        // fatal.
        linux.insert(
            "seccomp".to_owned(),
            json!({
                "defaultAction": "SCMP_ACT_ALLOW",
                "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
            }),
        );
    }
    let seccomp = object(json, &["linux", "seccomp"], "linux.seccomp")?;
    let default = seccomp.get("defaultAction").cloned().unwrap_or_default();
    let rules = list(seccomp, "syscalls", "linux.seccomp.syscalls")?;
    let mut changed = Vec::with_capacity(rules.len());
    for rule in rules.drain(..) {
        changed.extend(without_new_users(rule, &default)?);
    }
    if !is_denying(&default) {
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

/// Whether the filter denies them already. Asked of a bundle that can no longer be changed.
pub(super) fn denies_user_namespaces(json: &Value) -> bool {
    let mut denying = json.clone();
    deny_user_namespaces(&mut denying).is_ok() && denying == *json
}

/// Whether runtimes treat it as no filter.
fn is_none(seccomp: &Value) -> bool {
    let empty = |field: &str, text: &str| {
        seccomp.get(field).is_none_or(|value| value.is_null() || *value == json!(text) || *value == json!([]))
    };
    seccomp.is_null() || (seccomp.is_object() && empty("defaultAction", "") && empty("syscalls", ""))
}

/// The rules that replace `rule`, which may allow calls that make a user namespace.
fn without_new_users(rule: Value, default: &Value) -> Result<Vec<Value>, EditError> {
    let wrong = || EditError::Kind { field: "linux.seccomp.syscalls", kind: "a list of rules" };
    if rule.get("action").is_some_and(is_denying) {
        return Ok(vec![rule]);
    }
    let names = rule.get("names").and_then(Value::as_array).ok_or_else(wrong)?;
    let (mut by_flags, mut in_memory, mut others) = (Vec::new(), Vec::new(), Vec::new());
    for name in names {
        match name.as_str() {
            Some(text) if BY_FLAGS.contains(&text) => by_flags.push(name.clone()),
            Some(IN_MEMORY) => in_memory.push(name.clone()),
            _ => others.push(name.clone()),
        }
    }
    if in_memory.is_empty() && (by_flags.is_empty() || sees_flags(&rule)) {
        return Ok(vec![rule]);
    }
    let mut rules = Vec::new();
    if !others.is_empty() {
        rules.push(with(&rule, "names", others.into()));
    }
    // Runtimes ignore a rule whose action is the default one.
    if rule.get("action") == Some(default) {
        return Ok(rules);
    }
    if sees_flags(&rule) {
        rules.extend((!by_flags.is_empty()).then(|| with(&rule, "names", by_flags.into())));
    } else if !by_flags.is_empty() {
        let mut args = arguments(&rule).to_vec();
        args.push(json!({"index": 0, "value": CLONE_NEWUSER, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}));
        if is_either(&args) {
            return Err(EditError::Seccomp { names: Value::from(by_flags).to_string() });
        }
        rules.push(with(&with(&rule, "names", by_flags.into()), "args", args.into()));
    }
    if !in_memory.is_empty() {
        rules.push(json!({"names": in_memory, "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS}));
    }
    Ok(rules)
}

fn arguments(rule: &Value) -> &[Value] {
    rule.get("args").and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// A number of a condition. Runtimes read a missing one as 0.
fn number(arg: &Value, name: &str) -> u64 {
    parts::number(arg, name).unwrap_or(0)
}

/// Whether one argument has two conditions. Runtimes then let a call pass that meets any condition of the
/// rule, not all.
fn is_either(args: &[Value]) -> bool {
    let indexes: BTreeSet<u64> = args.iter().map(|arg| number(arg, "index")).collect();
    indexes.len() < args.len()
}

/// Whether the rule allows only calls whose flags ask for no new user namespace.
fn sees_flags(rule: &Value) -> bool {
    let sees = |arg: &Value| {
        text(arg, "op") == "SCMP_CMP_MASKED_EQ"
            && number(arg, "index") == 0
            && number(arg, "value") & CLONE_NEWUSER != 0
            && number(arg, "valueTwo") & CLONE_NEWUSER == 0
    };
    let args = arguments(rule);
    !is_either(args) && args.iter().any(sees)
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
        let of_default = json!([{"names": ["clone", "clone3"], "action": "SCMP_ACT_ALLOW",
                                 "args": [{"index": 0, "value": 0x2_0000, "op": "SCMP_CMP_MASKED_EQ"}]}]);
        for seccomp in [
            Value::Null,
            json!({}),
            json!({"defaultAction": "", "syscalls": []}),
            json!({"defaultAction": "SCMP_ACT_ALLOW"}),
            json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": of_default}),
        ] {
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
        // Docker's filter allows threads and processes, but no namespaces.
        let dockers = json!([
            allowed(json!(["read"]), json!([])),
            allowed(json!(["clone"]), json!([masked(0x7e02_0000)]))
        ]);
        assert_eq!(denied(filter(dockers.clone())), dockers);
        // With CAP_SYS_ADMIN docker's filter allows all of them.
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
        // These cannot be narrowed: one argument would have two conditions, of which runtimes take either.
        let not = |index: u64, value: u64| json!({"index": index, "value": value, "op": "SCMP_CMP_NE"});
        for args in [
            json!([masked(0x2_0000)]),
            json!([not(5, 7001), not(5, 7002)]),
            json!([masked(NEW), not(1, 1), not(1, 2)]),
            json!([{"value": 1, "op": "SCMP_CMP_NE"}]),
        ] {
            let mut json = json!({"linux": {"seccomp": filter(json!([allowed(json!(["unshare"]), args)]))}});
            assert!(!denies_user_namespaces(&json), "{json}");
            let told = deny_user_namespaces(&mut json);
            assert!(matches!(told, Err(EditError::Seccomp { .. })), "{json}: {told:?}");
        }
    }
}
