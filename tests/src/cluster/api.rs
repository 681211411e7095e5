//! A simulated API server: objects by their paths, over real HTTP. It checks resource versions as the real
//! one does, and can be away.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use crate::cluster::kubelet::NODE;
use crate::scratch::Scratch;
use serde_json::{Value, json};

/// The path below which the API's group of claims and slices is.
const GROUP: &str = "/apis/resource.k8s.io/v1";

/// The server, until it is dropped.
pub struct Api {
    state: Arc<Mutex<State>>,
    address: String,
    scratch: Scratch,
}

#[derive(Default)]
struct State {
    objects: BTreeMap<String, Value>,
    version: u64,
    /// Whether it takes no calls.
    is_away: bool,
    /// Whether it answers as a proxy does that knows no such path.
    is_proxy: bool,
    /// Whether it drops taints of devices, as a server does that has their feature off.
    drops_taints: bool,
    /// Calls of GET by path.
    asked: BTreeMap<String, usize>,
    connections: Vec<TcpStream>,
    /// Answers to the next bindings.
    refusals: Vec<(u16, Value)>,
    /// Whether it does what the next binding says, and does not tell.
    loses_answers: bool,
    /// What has changed, the oldest first.
    changes: Vec<Change>,
}

/// One change of an object.
#[derive(Clone)]
struct Change {
    version: u64,
    kind: &'static str,
    path: String,
    object: Value,
}

/// Where pods are: below their namespaces.
const PODS: &str = "/api/v1/namespaces/team/pods";

/// Where events are.
const EVENTS: &str = "/api/v1/namespaces/team/events/";

impl Api {
    /// A server that knows the node `node`.
    pub fn start(node: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let address = listener.local_addr().expect("it is bound").to_string();
        let state = Arc::new(Mutex::new(State::default()));
        let serving = Arc::clone(&state);
        thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                let state = Arc::clone(&serving);
                thread::spawn(move || serve(connection, &state));
            }
        });
        let api = Self { state, address, scratch: Scratch::new("api") };
        let of_node =
            json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node, "uid": "uid-of-node"}});
        api.put(&format!("/api/v1/nodes/{node}"), of_node);
        api
    }

    /// A file by which clients find it.
    pub fn kubeconfig(&self) -> std::path::PathBuf {
        let text = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "it",
            "clusters": [{"name": "it", "cluster": {"server": format!("http://{}", self.address)}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
            "users": [{"name": "it", "user": {}}],
        });
        self.scratch.file("kubeconfig", text.to_string())
    }

    /// Makes it go away, or come back. Connections break.
    pub fn set_away(&self, is_away: bool) {
        let mut state = self.state();
        state.is_away = is_away;
        state.connections.drain(..).for_each(|connection| drop(connection.shutdown(Shutdown::Both)));
    }

    /// Makes it answer 404 to everything, as a proxy does, or no more.
    pub fn set_proxy(&self, is_proxy: bool) {
        self.state().is_proxy = is_proxy;
    }

    /// Makes it answer the next bindings with these codes.
    pub fn refuse(&self, codes: &[u16]) {
        self.state().refusals = codes.iter().rev().map(|code| (*code, failure("Refused", *code))).collect();
    }

    /// Makes it bind the next pod without telling so.
    pub fn lose_answer(&self) {
        self.state().loses_answers = true;
    }

    /// Makes any object, or changes it.
    pub fn put(&self, path: &str, object: Value) {
        self.state().store(path, object);
    }

    /// Any object.
    pub fn get(&self, path: &str) -> Option<Value> {
        self.state().objects.get(path).cloned()
    }

    /// All pods.
    pub fn pods(&self) -> Vec<Value> {
        let state = self.state();
        let pods = state.objects.iter().filter(|(path, _)| path.contains("/pods/"));
        pods.map(|(_, pod)| pod.clone()).collect()
    }

    /// Deletes any object.
    pub fn remove(&self, path: &str) {
        self.state().remove(path);
    }

    /// Makes it drop taints of devices.
    pub fn drop_taints(&self) {
        self.state().drops_taints = true;
    }

    /// How often the object at the end of a path was asked for.
    #[must_use]
    pub fn asked(&self, name: &str) -> usize {
        let state = self.state();
        let its = state.asked.iter().filter(|(path, _)| path.ends_with(&format!("/{name}")));
        its.map(|(_, count)| count).sum()
    }

    /// Makes the pod `name` in the namespace `team`, bound to the node, with the UID `uid-of-NAME`.
    pub fn pod(&self, name: &str, spec: &Value, status: &Value) {
        let metadata = json!({"name": name, "namespace": "team", "uid": format!("uid-of-{name}")});
        let mut pod =
            json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status});
        pod["spec"]["nodeName"] = json!(NODE);
        self.put(&format!("{PODS}/{name}"), pod);
    }

    /// Gives the pod `name` these annotations, and no others.
    pub fn annotate_pod(&self, name: &str, annotations: &Value) {
        self.annotate(&format!("{PODS}/{name}"), annotations);
    }

    /// Gives the claim `name` these annotations, and no others.
    pub fn annotate_claim(&self, name: &str, annotations: &Value) {
        self.annotate(&format!("{GROUP}/namespaces/team/resourceclaims/{name}"), annotations);
    }

    fn annotate(&self, path: &str, annotations: &Value) {
        let mut state = self.state();
        let mut object = state.objects.get(path).expect("it is there").clone();
        object["metadata"]["annotations"] = annotations.clone();
        state.store(path, object);
    }

    /// The events about the object `name`, each as its reason, count and message.
    #[must_use]
    pub fn events(&self, name: &str) -> Vec<(String, u64, String)> {
        let text = |value: &Value| value.as_str().expect("it is text").to_owned();
        let state = self.state();
        let all = state.objects.iter().filter(|(path, _)| path.starts_with(EVENTS)).map(|(_, event)| event);
        let its = all.filter(|event| event["involvedObject"]["name"] == name);
        its.map(|event| {
            let count = event["count"].as_u64().expect("it is a number");
            (text(&event["reason"]), count, text(&event["message"]))
        })
        .collect()
    }

    /// Deletes the pod `name`.
    pub fn forget_pod(&self, name: &str) {
        self.state().remove(&format!("{PODS}/{name}"));
    }

    /// Makes a slice of another driver.
    pub fn slice(&self, name: &str, spec: &Value) {
        let slice = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": name}, "spec": spec,
        });
        self.put(&format!("{GROUP}/resourceslices/{name}"), slice);
    }

    /// Deletes the slice `name`.
    pub fn forget_slice(&self, name: &str) {
        self.state().remove(&format!("{GROUP}/resourceslices/{name}"));
    }

    /// Makes the claim `name` in the namespace `team`, with this allocation, for the pod with the UID
    /// `uid-of-pod`.
    pub fn claim(&self, name: &str, uid: &str, results: &[Value], config: &[Value]) {
        self.put(
            &format!("{GROUP}/namespaces/team/resourceclaims/{name}"),
            json!({
                "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
                "metadata": {"name": name, "namespace": "team", "uid": uid},
                "spec": {},
                "status": {
                    "allocation": {"devices": {"results": results, "config": config}},
                    "reservedFor": [{"resource": "pods", "name": "pod", "uid": "uid-of-pod"}],
                },
            }),
        );
    }

    /// Changes the claim `name`.
    pub fn change_claim(&self, name: &str, change: impl FnOnce(&mut Value)) {
        let path = format!("{GROUP}/namespaces/team/resourceclaims/{name}");
        change(self.state().objects.get_mut(&path).expect("the claim is there"));
    }

    /// Deletes the claim `name`.
    pub fn forget_claim(&self, name: &str) {
        self.state().remove(&format!("{GROUP}/namespaces/team/resourceclaims/{name}"));
    }

    /// All slices.
    pub fn slices(&self) -> Vec<Value> {
        let prefix = format!("{GROUP}/resourceslices/");
        let state = self.state();
        state
            .objects
            .iter()
            .filter(|(path, _)| path.starts_with(&prefix))
            .map(|(_, slice)| slice.clone())
            .collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nobody panics while it is locked")
    }
}

impl State {
    fn store(&mut self, path: &str, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let old = self.objects.insert(path.to_owned(), object.clone());
        self.note(if old.is_some() { "MODIFIED" } else { "ADDED" }, path, &object);
        object
    }

    fn remove(&mut self, path: &str) {
        let Some(mut object) = self.objects.remove(path) else { return };
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.note("DELETED", path, &object);
    }

    fn note(&mut self, kind: &'static str, path: &str, object: &Value) {
        let (version, path, object) = (self.version, path.to_owned(), object.clone());
        self.changes.push(Change { version, kind, path, object });
    }

    /// The list of pods or slices, as their path asks for all of them.
    fn list(&self, path: &str) -> Option<Value> {
        let collection = Collection::at(path)?;
        let kind = collection.kind;
        let of = self.objects.iter().filter(|(path, object)| collection.has(path, object));
        let items: Vec<&Value> = of.map(|(_, object)| object).collect();
        Some(json!({
            "apiVersion": "v1", "kind": kind, "metadata": {"resourceVersion": self.version.to_string()},
            "items": items,
        }))
    }

    /// The name of an object that is made.
    fn name_of(&self, metadata: &Value) -> String {
        let text = |field: &str| metadata[field].as_str().map(str::to_owned);
        let drawn = || format!("{}{}", text("generateName").expect("objects have names"), self.version);
        text("name").unwrap_or_else(drawn)
    }

    /// Stores what a client sent, or only says what it would be then.
    fn take(&mut self, path: &str, mut sent: Value, is_dry: bool) -> Value {
        for device in sent["spec"]["devices"].as_array_mut().into_iter().flatten() {
            if self.drops_taints {
                device.as_object_mut().expect("a device is an object").remove("taints");
            }
            for taint in device.get_mut("taints").and_then(Value::as_array_mut).into_iter().flatten() {
                let taint = taint.as_object_mut().expect("a taint is an object");
                taint.entry("timeAdded").or_insert_with(|| json!("2026-01-01T00:00:00Z"));
            }
        }
        if is_dry { sent } else { self.store(path, sent) }
    }

    /// Binds a pod, as the API server does: once, and only the one with that UID.
    fn bind(&mut self, path: &str, binding: &Value) -> (u16, Value) {
        let Some(mut pod) = self.objects.get(path).cloned() else { return (404, failure("NotFound", 404)) };
        let is_it = pod["metadata"]["uid"] == binding["metadata"]["uid"];
        if !is_it || pod["spec"]["nodeName"].is_string() {
            return (409, failure("Conflict", 409));
        }
        pod["spec"]["nodeName"] = binding["target"]["name"].clone();
        for (key, value) in binding["metadata"]["annotations"].as_object().into_iter().flatten() {
            pod["metadata"]["annotations"][key] = value.clone();
        }
        self.store(path, pod);
        if std::mem::take(&mut self.loses_answers) {
            return (504, failure("Timeout", 504));
        }
        (201, json!({"kind": "Status", "apiVersion": "v1", "status": "Success"}))
    }

    /// Status and body of the answer to a call.
    fn answer(&mut self, method: &str, path: &str, body: &[u8]) -> (u16, Value) {
        let is_dry = path.contains("dryRun=All");
        let list = (method == "GET").then(|| self.list(path)).flatten();
        let path = path.split('?').next().unwrap_or(path);
        if self.is_proxy {
            return (404, json!("404 page not found"));
        }
        if method == "GET" {
            *self.asked.entry(path.to_owned()).or_default() += 1;
        }
        let sent = || serde_json::from_slice::<Value>(body).expect("clients send JSON");
        if let Some(list) = list {
            return (200, list);
        }
        if let ("POST", Some(pod)) = (method, path.strip_suffix("/binding")) {
            if let Some(answer) = self.refusals.pop() {
                return answer;
            }
            return self.bind(pod, &sent());
        }
        match (method, self.objects.get(path)) {
            ("GET", Some(object)) => (200, object.clone()),
            ("PUT", Some(object)) => {
                let sent = sent();
                if sent["metadata"]["resourceVersion"] != object["metadata"]["resourceVersion"] {
                    return (409, failure("Conflict", 409));
                }
                (200, self.take(path, sent, is_dry))
            }
            ("PATCH", Some(object)) => {
                let merged = merged(object.clone(), sent());
                (200, self.store(path, merged))
            }
            ("POST", None) => {
                let sent = sent();
                let name = self.name_of(&sent["metadata"]);
                let path = format!("{path}/{name}");
                let mut sent = sent;
                sent["metadata"]["name"] = json!(name);
                match self.objects.contains_key(&path) {
                    true => (409, failure("AlreadyExists", 409)),
                    false => (201, self.take(&path, sent, is_dry)),
                }
            }
            ("DELETE", Some(_)) => {
                self.remove(path);
                (200, json!({"kind": "Status", "apiVersion": "v1", "status": "Success"}))
            }
            _ => {
                let mut failure = failure("NotFound", 404);
                failure["details"] = json!({"name": path.rsplit('/').next()});
                (404, failure)
            }
        }
    }
}

/// An object after a JSON merge patch (RFC 7396).
fn merged(object: Value, patch: Value) -> Value {
    match (object, patch) {
        (Value::Object(mut object), Value::Object(patch)) => {
            for (key, value) in patch {
                match object.remove(&key) {
                    _ if value.is_null() => {}
                    Some(old) => drop(object.insert(key, merged(old, value))),
                    None => drop(object.insert(key, value)),
                }
            }
            Value::Object(object)
        }
        (_, patch) => patch,
    }
}

/// A list of objects.
struct Collection {
    kind: &'static str,
    /// What the paths of its objects begin with, and hold.
    begins: String,
    holds: &'static str,
    /// The node to which its pods are bound.
    node: Option<String>,
}

impl Collection {
    /// The collection at a path. Of selectors those of a name and of a pod's node count.
    fn at(path: &str) -> Option<Self> {
        let (path, query) = path.split_once('?').unwrap_or((path, ""));
        let (kind, begins, holds) = match path {
            "/api/v1/pods" => ("PodList", "/api/v1/namespaces/".to_owned(), "/pods/"),
            "/api/v1/nodes" => ("NodeList", "/api/v1/nodes/".to_owned(), ""),
            "/apis/resource.k8s.io/v1/resourceslices" => {
                ("ResourceSliceList", "/apis/resource.k8s.io/v1/resourceslices/".to_owned(), "")
            }
            maps if maps.ends_with("/configmaps") => ("ConfigMapList", format!("{maps}/"), ""),
            _ => return None,
        };
        let name = query.split('&').find_map(|part| part.strip_prefix("fieldSelector=metadata.name%3D"));
        let of_node = |part: &str| {
            let rest = part.strip_prefix("fieldSelector=spec.nodeName%3D")?;
            rest.split(['%', '&']).next().map(str::to_owned)
        };
        let node = query.split('&').find_map(of_node);
        Some(Self { kind, begins: begins + name.unwrap_or_default(), holds, node })
    }

    fn has(&self, path: &str, object: &Value) -> bool {
        let is_bound = self.node.as_ref().is_none_or(|node| object["spec"]["nodeName"] == **node);
        path.starts_with(&self.begins) && path.contains(self.holds) && is_bound
    }
}

/// Sends changes as they come, until the seconds that the client asked for are over, or the server goes away.
fn watch(writer: &mut TcpStream, state: &Mutex<State>, path: &str) -> Option<()> {
    let parameter = |name: &str| {
        let all = path.split_once('?')?.1.split('&');
        all.filter_map(|one| one.split_once('=')).find(|(key, _)| *key == name)?.1.parse::<u64>().ok()
    };
    let collection = Collection::at(path)?;
    let mut version = parameter("resourceVersion")?;
    let end = Instant::now() + Duration::from_secs(parameter("timeoutSeconds")?);
    let head = "HTTP/1.1 200 it\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n";
    writer.write_all(head.as_bytes()).ok()?;
    while Instant::now() < end {
        let changes: Vec<Change> = {
            let state = state.lock().expect("nobody panics while it is locked");
            if state.is_away {
                return None;
            }
            let new = state.changes.partition_point(|change| change.version <= version);
            state.changes[new..]
                .iter()
                .filter(|change| collection.has(&change.path, &change.object))
                .cloned()
                .collect()
        };
        for change in changes {
            version = change.version;
            let text = format!("{}\n", json!({"type": change.kind, "object": change.object}));
            writer.write_all(format!("{:x}\r\n{text}\r\n", text.len()).as_bytes()).ok()?;
        }
        thread::sleep(Duration::from_millis(5));
    }
    writer.write_all(b"0\r\n\r\n").ok()
}

fn failure(reason: &str, code: u16) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": reason, "reason": reason, "code": code})
}

fn serve(connection: TcpStream, state: &Mutex<State>) {
    let Ok(mut writer) = connection.try_clone() else { return };
    {
        let mut state = state.lock().expect("nobody panics while it is locked");
        if state.is_away {
            return;
        }
        state.connections.extend(connection.try_clone());
    }
    let mut reader = BufReader::new(connection);
    while let Some((method, path, body)) = read(&mut reader) {
        if path.contains("watch=true") {
            match watch(&mut writer, state, &path) {
                Some(()) => continue,
                None => return,
            }
        }
        let mut state = state.lock().expect("nobody panics while it is locked");
        if state.is_away {
            return;
        }
        let (status, body) = state.answer(&method, &path, &body);
        let body = body.to_string();
        let head = format!(
            "HTTP/1.1 {status} it\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        if writer.write_all(format!("{head}{body}").as_bytes()).is_err() {
            return;
        }
    }
}

/// Method, path and body of the next call; `None` at the end.
fn read(reader: &mut BufReader<TcpStream>) -> Option<(String, String, Vec<u8>)> {
    let mut line = || {
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|bytes| *bytes > 0).map(|_| line.trim_end().to_owned())
    };
    let first = line()?;
    let mut length = 0;
    loop {
        let header = line()?.to_lowercase();
        if header.is_empty() {
            break;
        }
        if let Some(value) = header.strip_prefix("content-length:") {
            length = value.trim().parse().ok()?;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let mut words = first.split(' ').map(str::to_owned);
    Some((words.next()?, words.next()?, body))
}
