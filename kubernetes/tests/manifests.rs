//! The manifests and examples are objects of the API without a misspelt field, and call the agent as it is. The
//! manifests are what the chart makes.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use gpushare_tests::artifacts::{cli, helm, kubectl};
use gpushare_tests::command::{self, Outcome};
use gpushare_tests::machine::entries;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::scratch::Scratch;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
    ValidatingWebhookConfiguration,
};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Pod, Service, ServiceAccount};
use k8s_openapi::api::node::v1::RuntimeClass;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
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
fn kustomizations() -> [PathBuf; 6] {
    ["", "extender", "extender/own", "extender/roles", "image", "webhook"].map(|name| folder().join(name))
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
    objects_of(&fs::read_to_string(path).expect("it can be read"))
}

fn objects_of(text: &str) -> Vec<Value> {
    let read =
        |document: &str| serde_saphyr::from_str(document).unwrap_or_else(|why| panic!("{document}: {why}"));
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
        Some("PodDisruptionBudget") => again::<PodDisruptionBudget>(object),
        Some("RuntimeClass") => again::<RuntimeClass>(object),
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
    for file in ["node.yaml", "image/gpushare.yaml", "extender/scheduler.yaml", "webhook/webhook.yaml"] {
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

/// `helm ARGUMENTS CHART`, with values of its own.
fn of_chart(arguments: &[&str], values: &str) -> Outcome {
    let scratch = Scratch::new("values");
    let values = scratch.file("values.yaml", values);
    let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("chart");
    let mut run = Command::new(helm());
    // helm would look for settings and plugins of whoever runs the test.
    run.env("HOME", scratch.path()).args(["--namespace", "gpushare"]).args(arguments);
    command::run(run.arg(chart).arg("--values").arg(values))
}

/// The objects that the chart makes with these values.
fn made(values: &str) -> Vec<Value> {
    let text = of_chart(&["template", "gpushare"], values).expect_success(values).stdout;
    objects_of(text.strip_prefix("---\n").expect("helm begins each object so"))
}

fn names(objects: &[Value]) -> Vec<String> {
    let name = |object: &Value| {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        format!("{} {}", text(&object["kind"]), text(&object["metadata"]["name"]))
    };
    objects.iter().map(name).collect()
}

#[test]
fn the_manifests_are_what_the_chart_makes() {
    if !met(&[Need::Helm]) {
        return;
    }
    let scratch = Scratch::new("manifests");
    let top = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut run = Command::new(top.join("manifests.sh"));
    let _ = command::run(run.arg(helm()).arg(scratch.path())).expect_success("manifests.sh");
    let mut compared = 0;
    for entry in entries(scratch.path()).iter().filter(|path| scratch.path().join(path).is_file()) {
        let read = |folder: &Path| fs::read_to_string(folder.join(entry)).unwrap_or_default();
        let checkout = top.parent().expect("it is a folder of the checkout");
        assert!(
            read(scratch.path()) == read(checkout),
            "{}: run kubernetes/manifests.sh HELM",
            entry.display()
        );
        compared += 1;
    }
    assert!(compared > 10, "{compared} files");
    // Of its own accord the chart makes the same, but for the namespace.
    let image = objects(&folder().join("image/gpushare.yaml"));
    assert_eq!(names(&made("{}")), names(&image[1..]));
}

#[test]
fn the_chart_makes_objects_of_the_api_with_other_values_too() {
    if !met(&[Need::Helm]) {
        return;
    }
    let installer = "DaemonSet gpushare-installer";
    let (agent, meter) = ("DaemonSet gpushare-node", "DaemonSet gpushare-meter");
    let (scheduler, webhook) = ("Deployment gpushare-scheduler", "Deployment gpushare-webhook");
    let (budget, class) = ("PodDisruptionBudget gpushare-scheduler", "RuntimeClass gpushare");
    for (values, has, lacks) in [
        ("{}", vec![installer, agent, meter, class, "DeviceClass gpu.gpushare.io"], vec![scheduler, webhook]),
        (
            "installer: {mode: remove}\nextender: {enabled: true}",
            vec![installer],
            vec![agent, meter, scheduler, class],
        ),
        ("installer: {enabled: false}\nmeter: {enabled: false}", vec![agent], vec![installer, meter]),
        (
            "agent: {enabled: false}\nmeter: {listen: \"0.0.0.0:9836\", tokenSecret: figures}\n\
             runtimeClass: {nodeSelector: {gpu: \"yes\"}}",
            vec![installer, meter, class],
            vec![agent, "ServiceAccount gpushare-node", "DeviceClass gpu.gpushare.io"],
        ),
        (
            "settings: |\n  [request]\n  strict = true\nengine: {name: crio, unit: crio, defaultShare: 25%}\n\
             imagePullSecrets: [{name: registry}]\nagent: {arguments: [--metrics-address=127.0.0.1:9846]}\n\
             image: {repository: registry.test:5000/gpushare, tag: 1.2.3, pullPolicy: Always}",
            vec![installer, "ConfigMap gpushare-settings"],
            vec![],
        ),
        (
            "extender: {enabled: true, quota: other/quotas, arguments: [--policy=spread], nodeSelector: {a: b}}\n\
             webhook: {enabled: true, caBundle: AAAA, annotations: {a: b}, arguments: [--count-annotations]}",
            vec![scheduler, webhook, budget, "PodDisruptionBudget gpushare-webhook"],
            vec![],
        ),
    ] {
        let all = made(values);
        let names = names(&all);
        for object in &all {
            assert_eq!(lost_of(object), None, "{values}: {object}");
        }
        assert!(has.iter().all(|name| names.iter().any(|made| made == name)), "{values}: {names:?}");
        assert!(!lacks.iter().any(|name| names.iter().any(|made| made == name)), "{values}: {names:?}");
        // Those that work on nodes ask nothing of the cluster, but for the agent. The store is of the node's pids.
        for object in all.iter().filter(|object| object["kind"] == "DaemonSet") {
            let spec = &object["spec"]["template"]["spec"];
            assert_eq!(spec["automountServiceAccountToken"], false, "{values}: {object}");
            assert_eq!(spec["hostPID"], true, "{values}: {object}");
            assert_eq!(spec["priorityClassName"], "system-node-critical", "{values}: {object}");
        }
        let linted = of_chart(&["lint", "--strict"], values);
        assert!(linted.success(), "{values}: {linted:?}");
    }
}

#[test]
fn values_that_the_chart_does_not_have_are_refused() {
    if !met(&[Need::Helm]) {
        return;
    }
    for (values, want) in [
        ("agnt: {enabled: true}", "additional properties 'agnt' not allowed"),
        ("engine: {name: docker}", "at '/engine/name': value must be one of"),
        ("engine: {defaultShare: half}", "at '/engine/defaultShare'"),
        ("installer: {mode: purge}", "at '/installer/mode': value must be one of"),
        ("installer: {folder: /opt}", "at '/installer/folder'"),
        ("nodes: {selector: null}", "missing property 'selector'"),
        ("webhook: {replicas: 0}", "at '/webhook/replicas'"),
        // helm would write 1e+06.
        ("webhook: {replicas: 1000000}", "at '/webhook/replicas': maximum"),
        ("installer: {maxUnavailable: 1000000}", "at '/installer/maxUnavailable': maximum"),
        ("installer: {folder: /opt/..}", "at '/installer/folder'"),
        ("nodes: {programs: /usr/./bin}", "at '/nodes/programs'"),
        ("engine: {defaultShare: 0%}", "at '/engine/defaultShare'"),
        ("engine: {defaultShare: 101%}", "at '/engine/defaultShare'"),
        ("image: {repository: \"gpushare:1\"}", "at '/image/repository'"),
        ("image: {repository: a//b}", "at '/image/repository'"),
        ("image: {tag: 1.10}", "at '/image/tag': got number, want string"),
        ("extender: {kubeScheduler: \"a:b:c\"}", "at '/extender/kubeScheduler'"),
        ("agent: null", "missing property 'agent'"),
        // YAML would read another number.
        ("meter: {listen: \"127.0.0.1:0080\"}", "at '/meter/listen'"),
        ("meter: {listen: \"127.0.0.1:65536\"}", "at '/meter/listen'"),
        ("meter: {listen: \"127.0.0.1.test:80\"}", "at '/meter/listen'"),
    ] {
        let outcome = of_chart(&["template", "gpushare"], values);
        assert!(!outcome.success() && outcome.stderr.contains(want), "{values}: {outcome:?}");
    }
}

#[test]
fn the_chart_sends_pods_to_a_scheduler_that_is_there() {
    if !met(&[Need::Helm]) {
        return;
    }
    for (extender, name, want) in [
        (true, "", Some("--scheduler-name=gpushare-scheduler")),
        (false, "", None),
        (false, "theirs", Some("--scheduler-name=theirs")),
        (true, "theirs", Some("--scheduler-name=theirs")),
    ] {
        let values =
            json!({"extender": {"enabled": extender}, "webhook": {"enabled": true, "schedulerName": name}});
        let all = made(&values.to_string());
        let is_webhook = |object: &&Value| {
            object["kind"] == "Deployment" && object["metadata"]["name"] == "gpushare-webhook"
        };
        let webhook = all.iter().find(is_webhook).expect("it is made");
        let command = webhook["spec"]["template"]["spec"]["containers"][0]["command"].as_array();
        let mut words = command.expect("it has one").iter().filter_map(Value::as_str);
        assert_eq!(words.find(|word| word.starts_with("--scheduler-name")), want, "{values}");
    }
}

/// Addresses, and whether others than the meter's own pod reach them.
const LISTENS: [(&str, bool); 8] = [
    ("127.0.0.1:9836", false),
    ("127.9.9.9:9836", false),
    ("localhost:9836", false),
    ("[::1]:9836", false),
    ("0.0.0.0:9836", true),
    ("[::]:9836", true),
    ("[::ffff:127.0.0.1]:9836", true),
    ("10.0.0.7:65535", true),
];

#[test]
#[ignore = "needs the release build: runs it"]
fn the_meter_refuses_to_be_reached_by_others_without_a_token() {
    let scratch = Scratch::new("meter");
    let config = scratch.file("gpushare.toml", "");
    for (address, _) in LISTENS.iter().filter(|(_, is_others)| *is_others) {
        let mut meter = Command::new(cli());
        let told = command::run(meter.args(["meter", "--listen", address]).env("GPUSHARE_CONFIG", &config));
        assert!(!told.success() && told.stderr.contains("give --token-file"), "{address}: {told:?}");
    }
}

#[test]
fn the_chart_wants_a_token_where_others_reach_the_meter() {
    if !met(&[Need::Helm]) {
        return;
    }
    for (address, is_others) in LISTENS {
        let values = |secret: &str| json!({"meter": {"listen": address, "tokenSecret": secret}}).to_string();
        let told = of_chart(&["template", "gpushare"], &values(""));
        assert_eq!(told.stderr.contains("set meter.tokenSecret"), is_others, "{told:?}");
        assert_eq!(told.success(), !is_others, "{told:?}");
        // In the node's mounts lies what kubelet makes for the pod, where its container mounts it.
        let all = made(&values("figures"));
        let pod = all.iter().find(|object| object["metadata"]["name"] == "gpushare-meter");
        let pod = &pod.expect("it is made")["spec"]["template"]["spec"];
        let words = pod["containers"][0]["command"].to_string();
        assert!(words.contains("$(POD_UID)/volumes/kubernetes.io~secret/token/token"), "{words}");
        assert_eq!(pod["containers"][0]["env"][0]["name"], "POD_UID");
        assert_eq!(pod["containers"][0]["volumeMounts"][0]["name"], "token");
        let volumes = pod["volumes"].as_array().expect("a list").iter();
        let mut secrets = volumes.filter(|volume| volume["name"] == "token").map(|volume| &volume["secret"]);
        let wanted = json!({"secretName": "figures", "defaultMode": 0o400, "items": [{"key": "token", "path": "token"}]});
        assert_eq!(secrets.next(), Some(&wanted));
    }
}

/// Texts that YAML, a template or a shell could read as something else.
const ODD: [&str; 7] = ["123", "on", "null", "~", "a\nb: c", "{{ .Values.x }}", "\"'#: [{"];

#[test]
fn every_text_of_the_chart_is_bounded_or_comes_out_as_it_went_in() {
    if !met(&[Need::Helm]) {
        return;
    }
    let schema = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("chart/values.schema.json"));
    let schema: Value = serde_json::from_str(&schema.expect("it can be read")).expect("it is JSON");
    let mut free = Vec::new();
    unbounded(&schema, "", &mut free);
    free.sort();
    let amounts = "/definitions/amounts/additionalProperties";
    let annotations = "/properties/webhook/properties/annotations/additionalProperties";
    let selectors = ["nodes", "extender", "runtimeClass", "webhook"].map(|part| {
        let name = if part == "nodes" { "selector" } else { "nodeSelector" };
        format!("/properties/{part}/properties/{name}/additionalProperties")
    });
    let toleration = "/properties/nodes/properties/tolerations/items/properties";
    let mut known = vec![amounts.to_owned(), annotations.to_owned(), "/properties/settings".to_owned()];
    known.extend(selectors);
    known.extend(["key", "value"].map(|name| format!("{toleration}/{name}")));
    known.sort();
    assert_eq!(free, known, "others could become another object, or none");
    for odd in ODD {
        let values = json!({
            "settings": odd,
            "nodes": {"selector": {"a": odd}, "tolerations": [{"key": "a", "operator": "Equal", "value": odd}]},
            "extender": {"enabled": true, "nodeSelector": {"a": odd}},
            "runtimeClass": {"nodeSelector": {"a": odd}},
            "webhook": {"enabled": true, "nodeSelector": {"a": odd}, "annotations": {"a": odd}},
            "meter": {"resources": {"limits": {"a": odd}}},
        });
        let (plain, made) =
            (made(&values.to_string().replace(&json!(odd).to_string(), "\"x\"")), made(&values.to_string()));
        assert_eq!(names(&made), names(&plain), "{odd:?}");
        let text = |objects: &[Value]| json!(objects).to_string();
        let without = |text: String| text.replace(&hash(odd), "").replace(&hash("x"), "");
        let put_back = text(&made).replace(&json!(odd).to_string(), "\"x\"");
        assert_eq!(without(put_back), without(text(&plain)), "{odd:?}");
    }
}

/// The SHA-256 of a text, by which the installer's pods know new settings.
fn hash(text: &str) -> String {
    let scratch = Scratch::new("hash");
    let file = scratch.file("text", text);
    let told = command::run(Command::new("sha256sum").arg(file)).expect_success("sha256sum").stdout;
    told.split(' ').next().unwrap_or_default().to_owned()
}

/// The places below `schema` that take any text.
fn unbounded(schema: &Value, path: &str, found: &mut Vec<String>) {
    let takes_text = match &schema["type"] {
        Value::String(kind) => kind == "string",
        Value::Array(kinds) => kinds.contains(&json!("string")),
        _ => false,
    };
    if takes_text && schema["pattern"].is_null() {
        found.push(path.to_owned());
    }
    for (key, value) in schema.as_object().into_iter().flatten() {
        unbounded(value, &format!("{path}/{key}"), found);
    }
}

#[test]
fn names_that_look_like_numbers_and_words_of_yaml_stay_names() {
    if !met(&[Need::Helm]) {
        return;
    }
    let values = |name: &str| {
        json!({
            "namespace": {"create": true},
            "meter": {"tokenSecret": name},
            "image": {"repository": name, "tag": name},
            "imagePullSecrets": [{"name": name}],
            "nodes": {"priorityClassName": name},
            "extender": {
                "enabled": true, "kubeScheduler": name, "quota": format!("{name}/{name}"), "priorityClassName": name,
            },
            "webhook": {
                "enabled": true, "secret": name, "schedulerName": name, "priorityClassName": name, "caBundle": "1234",
            },
        })
    };
    for name in ["123", "on", "null", "0x1f", "1e3", "1.5"] {
        // The namespace of a quota has no dot.
        let values = values(name).to_string().replace("1.5/", "15/");
        for object in made(&values) {
            assert_eq!(lost_of(&object), None, "{name}: {object}");
        }
        let told = of_chart(&["template", "gpushare", "--namespace", &name.replace('.', "")], &values);
        for object in objects_of(told.expect_success(name).stdout.trim_start_matches("---\n")) {
            assert_eq!(lost_of(&object), None, "{name}: {object}");
        }
    }
    for (name, path) in
        [("a\nb", "/webhook/secret"), ("-", "/extender/priorityClassName"), ("A", "/webhook/schedulerName")]
    {
        let told = of_chart(&["template", "gpushare"], &values(name).to_string());
        assert!(!told.success() && told.stderr.contains(&format!("at '{path}'")), "{name:?}: {told:?}");
    }
}

#[test]
fn in_a_namespace_of_another_name_nothing_looks_for_the_usual_one() {
    if !met(&[Need::Helm]) {
        return;
    }
    let values = "extender: {enabled: true}\nwebhook: {enabled: true, annotations: {a: b}}";
    let told = of_chart(&["template", "gpushare", "--namespace", "other"], values).expect_success(values);
    let all = objects_of(told.stdout.trim_start_matches("---\n"));
    let mut told_where = 0;
    for object in &all {
        let place = &object["metadata"]["namespace"];
        assert!(["other", "kube-system"].map(Value::from).contains(place) || place.is_null(), "{object}");
        let containers = object["spec"]["template"]["spec"]["containers"].as_array();
        for command in containers.into_iter().flatten().map(|container| container["command"].to_string()) {
            let keeps_maps = ["\"node\"", "\"scheduler\""].iter().any(|verb| command.contains(verb));
            let is_ours = command.contains("/gpushare-kube\"");
            if is_ours && keeps_maps {
                assert!(command.contains("--namespace=other"), "{command}");
                told_where += 1;
            }
        }
        let text = object.to_string();
        for usual in ["namespace\":\"gpushare", "serviceaccount:gpushare:", "resourceNamespace: gpushare"] {
            assert!(!text.contains(usual), "{usual}: {object}");
        }
    }
    assert_eq!(told_where, 2, "agent and extender");
}

#[test]
fn the_chart_has_the_version_of_the_programs() {
    let chart = &objects(&Path::new(env!("CARGO_MANIFEST_DIR")).join("chart/Chart.yaml"))[0];
    for key in ["version", "appVersion"] {
        assert_eq!(chart[key], env!("CARGO_PKG_VERSION"), "{key}");
    }
}
