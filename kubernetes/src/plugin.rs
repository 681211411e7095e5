//! `kubectl gpushare`: what the cluster's GPUs hold, whose shares they are, and why a pod waits. It reads the
//! API server alone, with the user's own rights.

mod picture;
mod why;

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Subcommand;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::ListParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use serde_json::json;
use tokio::runtime;

use picture::Picture;

/// How the plugin finds the cluster, and what it shows.
#[derive(clap::Args, Clone, Debug)]
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
    let slices = Api::<ResourceSlice>::all(client.clone()).list(&of_driver).await;
    let slices = slices.context("the ResourceSlices cannot be listed")?;
    // Shares of other namespaces take room, too, but not everybody may see them.
    let all = Api::<ResourceClaim>::all(client.clone()).list(&ListParams::default()).await;
    let (claims, sees_all) = match all {
        Ok(claims) => (claims.items, true),
        Err(kube::Error::Api(status)) if status.code == 403 => {
            let own = Api::<ResourceClaim>::namespaced(client.clone(), &namespace);
            let own = own.list(&ListParams::default()).await.context("the claims cannot be listed")?;
            (own.items, false)
        }
        Err(error) => return Err(error).context("the claims cannot be listed"),
    };
    let picture = Picture::of(&slices.items, &claims);
    let partly = "only the shares of your own namespace are counted: you may not list others' claims";
    if !sees_all {
        eprintln!("note: {partly}");
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
            let found = Api::<Pod>::namespaced(client, &namespace).get(pod).await;
            let found = found.with_context(|| format!("no pod {namespace}/{pod}"))?;
            let lines = why::lines(&found, &claims, &picture);
            match options.json {
                true => println!("{:#}", json!(lines)),
                false => lines.iter().for_each(|line| println!("{line}")),
            }
        }
    }
    Ok(())
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
