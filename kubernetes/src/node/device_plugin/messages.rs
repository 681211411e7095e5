//! Messages of kubelet's device plugin API (v1beta1/api.proto), those that are used. Names of fields are the
//! file's.

use std::collections::HashMap;

use prost::Message;

#[derive(Clone, PartialEq, Message)]
pub struct Empty {}

#[derive(Clone, PartialEq, Message)]
pub struct Options {
    #[prost(bool, tag = "1")]
    pub pre_start_required: bool,
    #[prost(bool, tag = "2")]
    pub get_preferred_allocation_available: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct Register {
    #[prost(string, tag = "1")]
    pub version: String,
    #[prost(string, tag = "2")]
    pub endpoint: String,
    #[prost(string, tag = "3")]
    pub resource_name: String,
    #[prost(message, optional, tag = "4")]
    pub options: Option<Options>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Listed {
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<Device>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Device {
    #[prost(string, tag = "1")]
    pub id: String,
    #[prost(string, tag = "2")]
    pub health: String,
    #[prost(message, optional, tag = "3")]
    pub topology: Option<Topology>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Topology {
    #[prost(message, repeated, tag = "1")]
    pub nodes: Vec<NumaNode>,
}

#[derive(Clone, PartialEq, Message)]
pub struct NumaNode {
    #[prost(int64, tag = "1")]
    pub id: i64,
}

#[derive(Clone, PartialEq, Message)]
pub struct Preferred {
    #[prost(message, repeated, tag = "1")]
    pub container_requests: Vec<ContainerPreferred>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ContainerPreferred {
    #[prost(string, repeated, tag = "1")]
    pub available_device_ids: Vec<String>,
    #[prost(string, repeated, tag = "2")]
    pub must_include_device_ids: Vec<String>,
    #[prost(int32, tag = "3")]
    pub allocation_size: i32,
}

#[derive(Clone, PartialEq, Message)]
pub struct PreferredAnswer {
    #[prost(message, repeated, tag = "1")]
    pub container_responses: Vec<ContainerIds>,
}

/// Ids of one container.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerIds {
    #[prost(string, repeated, tag = "1")]
    pub device_ids: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Allocate {
    #[prost(message, repeated, tag = "1")]
    pub container_requests: Vec<ContainerIds>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Allocated {
    #[prost(message, repeated, tag = "1")]
    pub container_responses: Vec<ContainerAllocated>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ContainerAllocated {
    #[prost(map = "string, string", tag = "4")]
    pub annotations: HashMap<String, String>,
}
