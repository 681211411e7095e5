//! The messages of kubelet's calls, after pkg/apis/dra/v1/api.proto. Names of fields are the file's.

use std::collections::HashMap;

/// The claims of a call.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Claims {
    #[prost(message, repeated, tag = "1")]
    pub claims: Vec<Claim>,
}

/// A claim by its name and UID.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Claim {
    #[prost(string, tag = "1")]
    pub namespace: String,
    #[prost(string, tag = "2")]
    pub uid: String,
    #[prost(string, tag = "3")]
    pub name: String,
}

/// An answer for each claim, by UID.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PreparedClaims {
    #[prost(map = "string, message", tag = "1")]
    pub claims: HashMap<String, Prepared>,
}

/// What came of preparing a claim: its devices, or an error.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Prepared {
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<Device>,
    #[prost(string, tag = "2")]
    pub error: String,
}

/// A share that a container may name.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Device {
    /// The claim's requests that it is for.
    #[prost(string, repeated, tag = "1")]
    pub request_names: Vec<String>,
    /// The pool of the device, as in the claim's allocation.
    #[prost(string, tag = "2")]
    pub pool_name: String,
    /// The device's name in the pool.
    #[prost(string, tag = "3")]
    pub device_name: String,
    /// Qualified names of the CDI devices that a container of these requests gets.
    #[prost(string, repeated, tag = "4")]
    pub cdi_device_ids: Vec<String>,
    /// Tells several shares of one device apart (Kubernetes 1.34).
    #[prost(string, optional, tag = "5")]
    pub share_id: Option<String>,
}

/// An answer for each claim, by UID.
#[derive(Clone, PartialEq, prost::Message)]
pub struct UnpreparedClaims {
    #[prost(map = "string, message", tag = "1")]
    pub claims: HashMap<String, Unprepared>,
}

/// What came of unpreparing a claim.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Unprepared {
    #[prost(string, tag = "1")]
    pub error: String,
}
