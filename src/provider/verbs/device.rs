//! Devices: finding and opening one, its port, and what it says of itself.

use std::ffi::c_void;
use std::io;
use std::sync::Arc;

use super::caps;
use super::context::{Context, DeviceList, RawPd};
use super::cq::VerbsChannel;
use super::events::Reader;
use super::gids;
use super::map;
use super::mr::VerbsMr;
use super::sys::*;
use crate::device::{Capabilities, VerbsConfig};
use crate::error::{DeviceError, MemoryError};
use crate::memory::Mapping;
use crate::provider::AccessFlags;
use crate::provider::events::Events;
use crate::reactor::events::{EventSource, Watch, watch};

/// Where the kernel lists the RDMA devices that it has, whether libibverbs can drive them or not.
const KERNEL_DEVICES: &str = "/sys/class/infiniband";

/// What is under the verbs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fabric {
    InfiniBand,
    Roce,
    Iwarp,
}

/// The port of an opened device, and how its packets are marked.
#[derive(Clone, Debug)]
pub(crate) struct Port {
    pub(crate) number: u8,
    pub(crate) fabric: Fabric,
    pub(super) lid: u16,
    pub(crate) gid: [u8; 16],
    pub(super) gid_index: u8,
    pub(super) traffic_class: u8,
    pub(super) service_level: u8,
    pub(super) flow_label: u32,
}

/// An opened device and its port.
pub(crate) struct VerbsDevice {
    context: Arc<Context>,
    pub(super) name: String,
    caps: Capabilities,
    port: Port,
    vendor_id: u32,
    node_guid: [u8; 8],
    events: Arc<Events>,
    /// Of a device that was opened for use.
    reader: Option<Arc<Reader>>,
}

impl std::fmt::Debug for VerbsDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VerbsDevice")
            .field("name", &self.name)
            .field("port", &self.port)
            .finish_non_exhaustive()
    }
}

/// A protection domain.
pub(crate) struct VerbsPd {
    pub(super) device: Arc<VerbsDevice>,
    pub(super) raw: Arc<RawPd>,
}

impl std::fmt::Debug for VerbsPd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VerbsPd").field("device", &self.device.name).finish_non_exhaustive()
    }
}

/// The names of the RDMA devices here.
pub(crate) fn names() -> Result<Vec<String>, DeviceError> {
    Ok(DeviceList::get()?.names())
}

/// Whether the kernel has a device of that name.
pub(crate) fn kernel_has(name: &str) -> bool {
    // A name, not a path.
    !name.is_empty()
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-'))
        && std::path::Path::new(KERNEL_DEVICES).join(name).exists()
}

/// Opens the device `name` and asks the port for what it can do, whether it is up or not. `None` when there is none of
/// that name.
fn open(name: &str, config: &VerbsConfig) -> Result<Option<VerbsDevice>, DeviceError> {
    let context = match DeviceList::get()?.open(name) {
        Some(Ok(context)) => Arc::new(context),
        Some(Err(source)) => return Err(DeviceError::Open { device: name.to_owned(), source }),
        None if kernel_has(name) => return Err(DeviceError::NoProvider { device: name.to_owned() }),
        None => return Ok(None),
    };
    let os = |what| move |source: io::Error| DeviceError::Os { what, source };
    let device = caps::query_device(&context).map_err(os("asking an RDMA device for its limits"))?;
    let ports = u64::from(device.phys_port_cnt);
    if config.port == 0 || u64::from(config.port) > ports {
        return Err(DeviceError::Limit {
            what: "the port of an RDMA device",
            asked: config.port.into(),
            limit: ports,
            fix: "ports count from 1",
        });
    }
    let attr = caps::query_port(&context, config.port).map_err(os("asking a port for its state"))?;
    let fabric = caps::fabric(&context, &attr).ok_or_else(|| DeviceError::Unsupported {
        what: "a reliable connected queue pair",
        device: name.to_owned(),
        fix: "open an InfiniBand, RoCE or iWARP device",
    })?;
    let caps = caps::ask(&context, config.port, fabric, &device, &attr)
        .map_err(os("asking an RDMA device for its features"))?;
    let port = Port {
        number: config.port,
        fabric,
        lid: attr.lid,
        gid: [0; 16],
        gid_index: 0,
        traffic_class: config.traffic_class,
        service_level: config.service_level,
        flow_label: config.flow_label,
    };
    let (name, vendor_id, events) = (name.to_owned(), device.vendor_id, Events::new(name));
    // In network byte order.
    let node_guid = device.node_guid.to_ne_bytes();
    Ok(Some(VerbsDevice { context, name, caps, port, vendor_id, node_guid, events, reader: None }))
}

impl VerbsDevice {
    /// Opens `name` for use: its port must be up and have a usable GID. `None` when there is no device of that name.
    pub(crate) fn open(name: &str, config: &VerbsConfig) -> Result<Option<Arc<Self>>, DeviceError> {
        let Some(mut this) = open(name, config)? else { return Ok(None) };
        let port = &mut this.port;
        let attr = caps::query_port(&this.context, port.number)
            .map_err(|source| DeviceError::Os { what: "asking a port for its state", source })?;
        if !matches!(attr.state, IBV_PORT_ACTIVE | IBV_PORT_ACTIVE_DEFER) {
            let state = map::port_state(attr.state);
            return Err(DeviceError::PortDown { device: name.to_owned(), port: port.number, state });
        }
        let entry = gids::choose(&this.context, name, port, &attr, this.node_guid, config.gid_index)?;
        (port.gid, port.gid_index) = (entry.gid, u8::try_from(entry.index).unwrap_or(0));
        let reader = Reader::new(&this.context, &this.events)
            .map_err(|source| DeviceError::Os { what: "asking an RDMA device for its events", source })?;
        // What was announced before the reader listened.
        if this.context.is_removed() {
            return Err(DeviceError::DeviceGone { device: this.events.device() });
        }
        this.reader = Some(Arc::new(reader));
        Ok(Some(Arc::new(this)))
    }

    /// What a listing says of `name`. An error when it cannot be opened.
    pub(crate) fn look_at(name: &str) -> Result<Option<(Fabric, Capabilities)>, DeviceError> {
        Ok(open(name, &VerbsConfig::default())?.map(|d| (d.port.fabric, d.caps)))
    }

    pub(crate) fn capabilities(&self) -> &Capabilities {
        &self.caps
    }

    /// Its `ibv_context`.
    pub(crate) fn as_raw(&self) -> *mut c_void {
        self.context.raw().cast()
    }

    pub(crate) fn events(&self) -> &Arc<Events> {
        &self.events
    }

    /// Starts the thread that waits for its events. The device's handle keeps the result.
    pub(crate) fn watch(&self) -> Result<Option<Watch>, DeviceError> {
        let Some(reader) = &self.reader else { return Ok(None) };
        let source: Arc<dyn EventSource> = reader.clone();
        let watched = reader.descriptors().and_then(|fds| watch(Arc::downgrade(&source), fds));
        watched.map(Some).map_err(|source| DeviceError::Os { what: "waiting for a device's events", source })
    }

    pub(crate) fn port(&self) -> &Port {
        &self.port
    }

    /// Why queue pairs cannot be connected by hand here, and what to do. `None` where they can.
    pub(crate) fn no_manual_connect(&self) -> Option<(String, String)> {
        (!self.caps.oob).then(|| caps::no_manual_connect(self.vendor_id))
    }

    pub(crate) fn alloc_pd(self: &Arc<Self>) -> Result<Arc<VerbsPd>, DeviceError> {
        let raw = RawPd::alloc(&self.context)
            .map_err(|source| DeviceError::Os { what: "allocating a protection domain", source })?;
        Ok(Arc::new(VerbsPd { device: self.clone(), raw: Arc::new(raw) }))
    }

    pub(crate) fn create_channel(&self) -> Result<Arc<VerbsChannel>, DeviceError> {
        VerbsChannel::create(&self.context)
            .map(Arc::new)
            .map_err(|source| DeviceError::Os { what: "creating a completion channel", source })
    }
}

impl VerbsPd {
    /// Its `ibv_pd`.
    pub(crate) fn as_raw(&self) -> *mut c_void {
        self.raw.raw().cast()
    }

    pub(crate) fn reg_mr(
        &self,
        mapping: Arc<Mapping>,
        offset: u64,
        len: u64,
        access: AccessFlags,
    ) -> Result<VerbsMr, MemoryError> {
        let limit = self.device.caps.max_mr_size;
        if len > limit {
            return Err(MemoryError::TooLarge { asked: len, limit });
        }
        VerbsMr::register(&self.raw, mapping, offset, len, access)
    }
}
