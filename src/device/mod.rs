//! Devices: listing, opening, capabilities.

mod caps;

pub use caps::Capabilities;
mod gid;
