//! The manifests and examples are objects of the API without a misspelt field, and call the agent as it is.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use gpushare_tests::artifacts::kubectl;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::scratch::Scratch;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
    ValidatingWebhookConfiguration,
};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Pod, Service, ServiceAccount};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceClaimTemplate};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("manifests")
}

/// A folder of the examples for people.
fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples").join(name)
}

/// The folders with a kustomization.
fn kustomizations() -> [PathBuf; 5] {
    ["", "extender", "extender/own", "extender/roles", "webhook"].map(|name| folder().join(name))
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("the folder is there").flatten().map(|entry| entry.path());
    entries.filter(|path| path.extension().is_some_and(|end| end == "yaml")).collect()
}

/// What a kustomization names: files beside it, and other kustomizations.
fn listed(folder: &Path) -> Vec<String> {
    let listed = objects(&folder.join("kustomization.yaml"))[0]["resources"].clone();
    serde_json::from_value(listed).expect("a list of names")
}

/// The files with the objects of a kustomization.
fn files_of(folder: &Path) -> Vec<PathBuf> {
    let of = |name: &String| match folder.join(name) {
        path if path.is_dir() => files_of(&path),
        path => vec![path],
    };
    listed(folder).iter().flat_map(of).collect()
}

fn objects(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).expect("it can be read");
    let read =
        |document: &str| serde_saphyr::from_str(document).unwrap_or_else(|why| panic!("{path:?}: {why}"));
    text.split("\n---\n").map(read).collect()
}

/// Reads the object by its type and writes it again: a field that the type does not have is lost then.
fn again<T: DeserializeOwned + Serialize>(object: &Value) -> Value {
    let typed: T = serde_json::from_value(object.clone()).unwrap_or_else(|why| panic!("{object}: {why}"));
    serde_json::to_value(typed).expect("it can be written")
}

/// The first field of `written` that `read` lacks.
fn lost(written: &Value, read: &Value, path: &str) -> Option<String> {
    match (written, read) {
        (Value::Object(written), Value::Object(read)) => written.iter().find_map(|(key, value)| {
            let path = format!("{path}.{key}");
            read.get(key).map_or(Some(path.clone()), |read| lost(value, read, &path))
        }),
        (Value::Array(written), Value::Array(read)) if written.len() == read.len() => {
            written.iter().zip(read).find_map(|(written, read)| lost(written, read, &format!("{path}[]")))
        }
        // A quantity may be written as a number, and is read as text.
        (Value::Number(written), Value::String(read)) if written.to_string() == *read => None,
        _ => (written != read).then(|| path.to_owned()),
    }
}

fn lost_of(object: &Value) -> Option<String> {
    let read = match object["kind"].as_str() {
        Some("ClusterRole") => again::<ClusterRole>(object),
        Some("ClusterRoleBinding") => again::<ClusterRoleBinding>(object),
        Some("ConfigMap") => again::<ConfigMap>(object),
        Some("Deployment") => again::<Deployment>(object),
        Some("MutatingWebhookConfiguration") => again::<MutatingWebhookConfiguration>(object),
        Some("Role") => again::<Role>(object),
        Some("RoleBinding") => again::<RoleBinding>(object),
        Some("Service") => again::<Service>(object),
        Some("ValidatingWebhookConfiguration") => again::<ValidatingWebhookConfiguration>(object),
        Some("DaemonSet") => again::<DaemonSet>(object),
        Some("DeviceClass") => again::<DeviceClass>(object),
        Some("Namespace") => again::<Namespace>(object),
        Some("Pod") => again::<Pod>(object),
        Some("ResourceClaim") => again::<ResourceClaim>(object),
        Some("ResourceClaimTemplate") => again::<ResourceClaimTemplate>(object),
        Some("ServiceAccount") => again::<ServiceAccount>(object),
        Some("ValidatingAdmissionPolicy") => again::<ValidatingAdmissionPolicy>(object),
        Some("ValidatingAdmissionPolicyBinding") => again::<ValidatingAdmissionPolicyBinding>(object),
        other => panic!("an object of kind {other:?}"),
    };
    lost(object, &read, "")
}

#[test]
fn every_object_is_of_the_api_and_has_no_field_that_it_does_not_know() {
    let mut all: Vec<PathBuf> = kustomizations().iter().flat_map(|folder| files(folder)).collect();
    all.extend(files(&folder().join("examples")));
    all.extend(files(&example("kubernetes")));
    let all = all.iter().filter(|path| !path.ends_with("kustomization.yaml"));
    let mut count = 0;
    for (path, object) in all.flat_map(|path| objects(path).into_iter().map(move |object| (path, object))) {
        assert_eq!(lost_of(&object), None, "{path:?}");
        count += 1;
    }
    assert!(count >= 15, "{count} objects");
    let misspelt = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {}, "spec": {
        "containers": [{"name": "a", "resources": {"claims": [{"name": "b", "requests": "c"}]}}]}});
    assert_eq!(lost_of(&misspelt).as_deref(), Some(".spec.containers[].resources.claims[].requests"));
}

#[test]
fn every_service_of_the_compose_examples_asks_the_runtime_for_a_share() {
    for path in ["compose", "vllm"].iter().flat_map(|name| files(&example(name))) {
        let object = &objects(&path)[0];
        let services = object["services"].as_object().unwrap_or_else(|| panic!("{path:?} has no services"));
        assert!(services.len() >= 2, "{path:?}");
        for (name, service) in services {
            assert_eq!(service["runtime"], "gpushare", "{path:?}: {name}");
            assert!(service["environment"]["GPUSHARE_MEMORY"].is_string(), "{path:?}: {name}");
        }
    }
}

#[test]
fn the_kustomization_names_every_file() {
    for folder in kustomizations() {
        let mut listed = listed(&folder);
        listed.retain(|name| !folder.join(name).is_dir());
        let files = files(&folder);
        let mut names: Vec<_> = files.iter().filter_map(|path| path.file_name()?.to_str()).collect();
        names.retain(|name| *name != "kustomization.yaml");
        listed.sort_unstable();
        names.sort_unstable();
        assert_eq!(listed, names);
    }
}

#[test]
fn kubectl_builds_the_kustomization_with_every_object_of_it() {
    if !met(&[Need::Kubectl]) {
        return;
    }
    for folder in kustomizations() {
        let built = Command::new(kubectl()).arg("kustomize").arg(&folder).output().expect("it runs");
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        let text = String::from_utf8(built.stdout).expect("it is text");
        let name = |object: &Value| format!("{} {}", object["kind"], object["metadata"]["name"]);
        let read = |text: &str| name(&serde_saphyr::from_str(text).expect("it is YAML"));
        let mut built: Vec<String> = text.split("\n---\n").map(read).collect();
        let all = files_of(&folder).into_iter().flat_map(|path| objects(&path));
        let mut written: Vec<String> = all.map(|object| name(&object)).collect();
        built.sort();
        written.sort();
        assert_eq!(built, written);
    }
}

#[test]
fn kubectl_finds_its_plugin() {
    if !met(&[Need::Kubectl]) {
        return;
    }
    let scratch = Scratch::new("plugin");
    symlink(env!("CARGO_BIN_EXE_gpushare-kube"), scratch.path().join("kubectl-gpushare")).expect("a link");
    let mut path = scratch.path().as_os_str().to_owned();
    path.push(":/usr/bin:/bin");
    let told = Command::new(kubectl()).args(["gpushare", "--help"]).env("PATH", path).output();
    let told = String::from_utf8(told.expect("it runs").stdout).expect("it is text");
    for word in ["gpus", "shares", "why"] {
        assert!(told.contains(word), "{told}");
    }
}

#[test]
fn programs_are_called_by_options_that_they_have() {
    for file in ["node.yaml", "extender/scheduler.yaml", "webhook/webhook.yaml"] {
        let all = objects(&folder().join(file));
        let containers = all
            .iter()
            .filter_map(|object| object["spec"]["template"]["spec"]["containers"].as_array().cloned());
        let commands = containers.flatten().map(|container| container["command"].clone());
        let commands: Vec<Vec<String>> =
            commands.map(|command| serde_json::from_value(command).expect("a list of words")).collect();
        let ours = commands.iter().find_map(|words| {
            let program = words.iter().position(|word| word.ends_with("/gpushare-kube"))?;
            Some(&words[program + 1..])
        });
        // With an option that there is not behind them: all others are read first.
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpushare-kube"));
        let told = command.args(ours.expect("it is called")).arg("--no-such").output();
        let told = String::from_utf8(told.expect("it runs").stderr).expect("it is text");
        assert!(told.contains("unexpected argument '--no-such'"), "{file}: {told}");
    }
}
