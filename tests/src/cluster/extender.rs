//! The scheduler extender under test, and what kube-scheduler asks of it.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use crate::command::eventually;

/// How long it may take to be ready.
const UP: Duration = Duration::from_secs(30);
/// How long an answer may take.
const ANSWER: Duration = Duration::from_secs(30);

/// The extender, until it is dropped.
pub struct Extender {
    child: Child,
    command: Command,
    address: String,
}

impl Extender {
    /// Starts `program` as an extender of the cluster in `kubeconfig`, with these arguments besides.
    ///
    /// # Panics
    /// When it cannot be started.
    #[must_use]
    pub fn start(program: &Path, kubeconfig: &Path, arguments: &[&str]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let address = listener.local_addr().expect("it is bound").to_string();
        drop(listener);
        let mut command = Command::new(program);
        command.args(["scheduler", "--address", &address]).args(arguments);
        command.env_clear().env("PATH", "/usr/bin:/bin").env("KUBECONFIG", kubeconfig).stdin(Stdio::null());
        Self { child: command.spawn().expect("the extender can be started"), command, address }
    }

    /// Starts it again after it was killed.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn revive(&mut self) {
        self.child = self.command.spawn().expect("the extender can be started");
    }

    /// Where it answers.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The extender's pid.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Status and body of the answer to a call; `None` where nobody answers.
    #[must_use]
    pub fn call(&self, method: &str, path: &str, body: Option<&Value>) -> Option<(u16, String)> {
        self.send(method, path, &body.map(Value::to_string).unwrap_or_default())
    }

    /// The same with a body that is text already.
    #[must_use]
    pub fn send(&self, method: &str, path: &str, body: &str) -> Option<(u16, String)> {
        let mut connection = TcpStream::connect(&self.address).ok()?;
        connection.set_read_timeout(Some(ANSWER)).ok()?;
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: it\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        connection.write_all(format!("{head}{body}").as_bytes()).ok()?;
        let mut answer = String::new();
        connection.read_to_string(&mut answer).ok()?;
        let (head, body) = answer.split_once("\r\n\r\n")?;
        let status = head.split(' ').nth(1)?.parse().ok()?;
        Some((status, body.to_owned()))
    }

    /// Waits until it decides.
    ///
    /// # Panics
    /// When it never does.
    pub fn wait(&self) {
        let _ = self.filter(&json!({"metadata": {"name": "asks"}}), &[]);
    }

    /// The answer of a verb, once it decides.
    ///
    /// # Panics
    /// When it never does.
    #[must_use]
    pub fn ask(&self, verb: &str, body: &Value) -> Value {
        let mut answer = None;
        let asked = || {
            answer = self.call("POST", &format!("/{verb}"), Some(body)).filter(|(status, _)| *status == 200);
            answer.is_some()
        };
        assert!(eventually(UP, asked), "{verb} is not answered");
        serde_json::from_str(&answer.expect("it is answered").1).expect("it is JSON")
    }

    /// Which of the nodes the pod gets on, and why it does not get on the others.
    #[must_use]
    pub fn filter(&self, pod: &Value, nodes: &[&str]) -> (Vec<String>, Value) {
        let told = self.ask("filter", &json!({"Pod": pod, "Nodes": null, "NodeNames": nodes}));
        let names = told["NodeNames"].as_array().cloned().unwrap_or_default();
        let names = names.iter().map(|name| name.as_str().expect("a name").to_owned()).collect();
        let mut why = told["FailedNodes"].clone();
        for (name, text) in told["FailedAndUnresolvableNodes"].as_object().into_iter().flatten() {
            why[name] = text.clone();
        }
        (names, why)
    }

    /// Binds the pod as kube-scheduler does. Returns the error's text.
    ///
    /// # Errors
    /// When it is not bound.
    pub fn bind(&self, pod: &Value, node: &str) -> Result<(), String> {
        let metadata = &pod["metadata"];
        let asked = json!({"PodName": metadata["name"], "PodNamespace": metadata["namespace"],
            "PodUID": metadata["uid"], "Node": node});
        let told = self.ask("bind", &asked);
        match told["Error"].as_str().expect("it is text") {
            "" => Ok(()),
            error => Err(error.to_owned()),
        }
    }

    /// Has the pod placed as kube-scheduler does: on the best of the nodes on which it gets.
    ///
    /// # Errors
    /// When it gets on none, or is not bound.
    pub fn schedule(&self, pod: &Value, nodes: &[&str]) -> Result<String, String> {
        let (names, why) = self.filter(pod, nodes);
        if names.is_empty() {
            return Err(why.to_string());
        }
        let told = self.ask("prioritize", &json!({"Pod": pod, "NodeNames": names}));
        let scores = told.as_array().cloned().unwrap_or_default();
        let best = scores.iter().max_by_key(|score| score["Score"].as_i64());
        let node = best.and_then(|best| best["Host"].as_str()).expect("a node is best").to_owned();
        self.bind(pod, &node).map(|()| node)
    }

    /// Kills it at once.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Ends it as a cluster does, and returns whether it ended in order.
    ///
    /// # Panics
    /// When it cannot be signalled.
    pub fn end(&mut self) -> bool {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(self.child.id()).expect("a pid fits"));
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).expect("it can be signalled");
        self.child.wait().expect("it can be waited for").success()
    }
}

impl Drop for Extender {
    fn drop(&mut self) {
        self.kill();
    }
}
