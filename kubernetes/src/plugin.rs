//! `kubectl gpushare`: what the cluster's GPUs hold, whose shares they are, and why a pod waits. It reads the
//! API server alone, with the user's own rights.

mod counted;
mod picture;
mod why;

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Subcommand;
use k8s_openapi::api::core::v1::{ConfigMap, Event, Pod};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::ListParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use serde_json::json;
use tokio::runtime;

use crate::gpus::LABEL;
use crate::scheduler::State;
use picture::Picture;

/// How the plugin finds the cluster, and what it shows.
#[derive(clap::Args, Clone, Debug)]
#[command(override_usage = "kubectl gpushare [OPTIONS] <COMMAND>")]
pub struct Options {
    #[command(subcommand)]
    shown: Shown,
    /// The namespace; else that of the context.
    #[arg(long, short, global = true, value_name = "NAME")]
    namespace: Option<String>,
    /// All namespaces.
    #[arg(long, short = 'A', global = true, conflicts_with = "namespace")]
    all_namespaces: bool,
    /// The file with clusters and users; else KUBECONFIG or ~/.kube/config.
    #[arg(long, global = true, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// The context in that file.
    #[arg(long, global = true, value_name = "NAME")]
    context: Option<String>,
    /// The namespace of gpushare's agents, whose ConfigMaps tell of GPUs that are counted by resources.
    #[arg(long, global = true, value_name = "NAME", default_value = "gpushare")]
    agents_namespace: String,
    /// JSON in place of text.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand, Clone, Debug)]
enum Shown {
    /// The GPUs of all nodes, and how much of each is given.
    Gpus,
    /// The shares, and the pods that hold them.
    Shares,
    /// Why a pod waits, or what it has.
    Why {
        /// The pod's name.
        pod: String,
    },
}

/// Prints what is asked for.
///
/// # Errors
/// When the cluster cannot be asked, or there is no such pod.
pub fn run(options: &Options) -> Result<()> {
    runtime::Builder::new_current_thread().enable_all().build()?.block_on(show(options))
}

async fn show(options: &Options) -> Result<()> {
    let (client, default) = client(options).await.context("cannot find the cluster")?;
    let namespace = options.namespace.clone().unwrap_or(default);
    let of_driver = ListParams::default().fields(&format!("spec.driver={}", crate::node::DRIVER));
    let slices = match Api::<ResourceSlice>::all(client.clone()).list(&of_driver).await {
        Ok(slices) => Some(slices.items),
        // A cluster that knows no claims.
        Err(kube::Error::Api(status)) if status.code == 404 => Some(Vec::new()),
        Err(kube::Error::Api(status)) if status.code == 403 => None,
        Err(error) => return Err(said(error)).context("the ResourceSlices cannot be listed"),
    };
    // Shares of other namespaces take room, too, but not everybody may see them.
    let all = Api::<ResourceClaim>::all(client.clone()).list(&ListParams::default()).await;
    let (claims, sees_all) = match all {
        Ok(claims) => (claims.items, true),
        Err(kube::Error::Api(status)) if status.code == 404 => (Vec::new(), true),
        Err(kube::Error::Api(status)) if status.code == 403 => {
            let own = Api::<ResourceClaim>::namespaced(client.clone(), &namespace);
            match own.list(&ListParams::default()).await {
                Ok(own) => (own.items, false),
                // Nor does a cluster tell who has no such right that it knows no claims.
                Err(kube::Error::Api(status)) if status.code == 403 => (Vec::new(), false),
                Err(error) => return Err(said(error)).context("the claims cannot be listed"),
            }
        }
        Err(error) => return Err(said(error)).context("the claims cannot be listed"),
    };
    let sees_gpus = slices.is_some();
    let mut picture = Picture { sees_all, sees_gpus, ..Picture::of(&slices.unwrap_or_default(), &claims) };
    let mut books = counted_gpus(&client, &options.agents_namespace).await?;
    if let Some(books) = &books {
        counted::add(books, &mut picture);
    }
    if !sees_all {
        eprintln!(
            "note: of claims at most those of your own namespace are counted: you may not list others'"
        );
    }
    if !sees_gpus {
        eprintln!("note: what is free for claims is not known: you may not list ResourceSlices");
    }
    let is_shown = |its: &str| options.all_namespaces || its == namespace;
    match &options.shown {
        Shown::Gpus if options.json => println!("{:#}", json!(picture.gpus)),
        Shown::Gpus => print!("{}", picture.gpus_table()),
        Shown::Shares if options.json => {
            let shares: Vec<_> = picture.shares.iter().filter(|share| is_shown(&share.namespace)).collect();
            println!("{:#}", json!(shares));
        }
        Shown::Shares => print!("{}", picture.shares_table(is_shown)),
        Shown::Why { pod } => {
            let found = Api::<Pod>::namespaced(client.clone(), &namespace).get(pod).await;
            let found = found.map_err(said).with_context(|| format!("pod {namespace}/{pod}"))?;
            let about = format!("involvedObject.uid={}", found.metadata.uid.clone().unwrap_or_default());
            // Who may not list events is told the rest.
            let events = Api::<Event>::namespaced(client, &namespace);
            let events = events.list(&ListParams::default().fields(&about)).await;
            let events = events.map(|events| events.items).unwrap_or_default();
            let by_resources = books.as_mut().map(|books| counted::lines(books, &found)).unwrap_or_default();
            let lines = why::lines(&found, &claims, &by_resources, &events, &picture);
            match options.json {
                true => println!("{:#}", json!(lines)),
                false => lines.iter().for_each(|line| println!("{line}")),
            }
        }
    }
    Ok(())
}

/// The books of GPUs that are counted by resources; `None` where there are none, or the user may not see
/// them.
async fn counted_gpus(client: &Client, namespace: &str) -> Result<Option<State>> {
    let labelled = ListParams::default().labels(LABEL);
    let maps = match Api::<ConfigMap>::namespaced(client.clone(), namespace).list(&labelled).await {
        Ok(maps) if maps.items.is_empty() => return Ok(None),
        Ok(maps) => maps.items,
        Err(kube::Error::Api(status)) if status.code == 403 => {
            eprintln!(
                "note: GPUs that are counted by resources are not shown: you may not list ConfigMaps in {namespace}"
            );
            return Ok(None);
        }
        Err(error) => return Err(said(error)).context("the agents' ConfigMaps cannot be listed"),
    };
    let mut pods = Vec::new();
    let mut page = ListParams::default().limit(500);
    loop {
        let listed = match Api::<Pod>::all(client.clone()).list(&page).await {
            Ok(listed) => listed,
            Err(kube::Error::Api(status)) if status.code == 403 => {
                eprintln!("note: shares by countable resources are not shown: you may not list all pods");
                return Ok(None);
            }
            Err(error) => return Err(said(error)).context("the pods cannot be listed"),
        };
        pods.extend(listed.items);
        match listed.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = page.continue_token(&token),
            None => return Ok(Some(counted::books(&maps, &pods))),
        }
    }
}

/// What the API server said, without the words around it.
fn said(error: kube::Error) -> anyhow::Error {
    match error {
        kube::Error::Api(status) => anyhow::anyhow!("{}", status.message),
        other => other.into(),
    }
}

/// The client, and the namespace of its context.
async fn client(options: &Options) -> Result<(Client, String)> {
    let chosen = KubeConfigOptions { context: options.context.clone(), ..KubeConfigOptions::default() };
    let config = match &options.kubeconfig {
        Some(file) => Config::from_custom_kubeconfig(Kubeconfig::read_from(file)?, &chosen).await?,
        None => Config::from_kubeconfig(&chosen).await?,
    };
    let namespace = config.default_namespace.clone();
    Ok((Client::try_from(config)?, namespace))
}
