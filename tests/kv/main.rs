//! The contracts of `KvChannel`, each over every profile of the soft provider, within one process.
//!
//! A test is written once and runs under each profile: see `on_every_profile`.

mod arguments;
mod bootstrap;
mod common;
mod failure;
mod identity;
mod landing;
mod manager;
