//! `gpushare-kube node` between a simulated kubelet and a simulated API server, on a simulated node with real
//! low-level runtimes.

mod agent;
mod api;
mod kubelet;

mod claims;
mod lives;
mod slices;
