//! How an RDMA device is opened: which port and GID, and how its packets are marked.

use crate::error::DeviceError;

/// Configuration of an RDMA device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerbsConfig {
    pub(crate) port: u8,
    pub(crate) gid_index: Option<u32>,
    pub(crate) traffic_class: u8,
    pub(crate) service_level: u8,
    pub(crate) flow_label: u32,
}

impl Default for VerbsConfig {
    fn default() -> Self {
        Self { port: 1, gid_index: None, traffic_class: 0, service_level: 0, flow_label: 0 }
    }
}

impl VerbsConfig {
    /// Port 1, the GID by rule, no marks.
    pub fn new() -> Self {
        Self::default()
    }

    /// The port, from 1. Default 1.
    pub fn port(mut self, port: u8) -> Self {
        self.port = port;
        self
    }

    /// The index in the port's GID table. By default a rule chooses: RoCE v2 before v1, a routable address before a
    /// link-local one, IPv4 before IPv6, then the lowest index.
    pub fn gid_index(mut self, index: u32) -> Self {
        self.gid_index = Some(index);
        self
    }

    /// The traffic class of RoCE packets, where DSCP is (its upper six bits). Default 0.
    pub fn traffic_class(mut self, class: u8) -> Self {
        self.traffic_class = class;
        self
    }

    /// The InfiniBand service level, 0 to 15. Default 0.
    pub fn service_level(mut self, level: u8) -> Self {
        self.service_level = level;
        self
    }

    /// The flow label of RoCE packets, 20 bits. Default 0: the device's own choice.
    pub fn flow_label(mut self, label: u32) -> Self {
        self.flow_label = label;
        self
    }

    #[cfg_attr(not(feature = "verbs"), allow(dead_code))]
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        let bad = |what, got: u32, expected: &str| {
            Err(DeviceError::Config { what, got: got.to_string(), expected: expected.to_owned() })
        };
        if self.service_level > 15 {
            return bad("VerbsConfig::service_level", self.service_level.into(), "0 to 15");
        }
        if self.flow_label > 0xf_ffff {
            return bad("VerbsConfig::flow_label", self.flow_label, "0 to 1048575 (20 bits)");
        }
        Ok(())
    }
}
