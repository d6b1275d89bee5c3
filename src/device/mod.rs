//! Devices: listing, opening, capabilities.

mod gid;

mod caps;

pub use caps::Capabilities;
