//! The cluster's API server, and the signals by which a cluster ends programs.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use kube::Client;
use tokio::signal::unix::{SignalKind, signal};

/// The client of the cluster's API server: as the service account in a folder, or as KUBECONFIG or the usual
/// place of a pod's service account say.
///
/// # Errors
/// When nothing names an API server, or what does cannot be read.
pub async fn client(service_account: Option<&Path>) -> Result<Client> {
    let mut connection = match service_account {
        None => kube::Config::infer().await?,
        Some(folder) => {
            let variable = |name: &str| std::env::var(name).with_context(|| format!("{name} is not set"));
            connection(folder, &variable("KUBERNETES_SERVICE_HOST")?, &variable("KUBERNETES_SERVICE_PORT")?)?
        }
    };
    connection.read_timeout = Some(ANSWER);
    Ok(Client::try_from(connection)?)
}

/// How long the API server may take for an answer. kubelet waits longer, and then calls again.
const ANSWER: Duration = Duration::from_secs(20);

/// How to reach the API server as the service account in `folder`. The client reads its files again when they
/// change.
fn connection(folder: &Path, host: &str, port: &str) -> Result<kube::Config> {
    let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
    let mut config = kube::Config::new(format!("https://{host}:{port}").parse()?);
    config.root_cert_file = Some(folder.join("ca.crt"));
    config.auth_info.token_file = Some(folder.join("token").to_string_lossy().into_owned());
    Ok(config)
}

/// Waits for SIGTERM or SIGINT.
///
/// # Errors
/// When signals cannot be waited for.
pub async fn until_signalled() -> Result<()> {
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_account_is_where_the_pod_has_it_on_the_node() {
        for (host, want) in [("10.0.0.1", "https://10.0.0.1:443/"), ("fd00::1", "https://[fd00::1]:443/")] {
            let config = connection(Path::new("/a"), host, "443").unwrap();
            assert_eq!(config.cluster_url.to_string(), want);
            assert_eq!(config.root_cert_file.as_deref(), Some(Path::new("/a/ca.crt")));
            assert_eq!(config.auth_info.token_file.as_deref(), Some("/a/token"));
        }
    }
}
