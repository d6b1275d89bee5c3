//! The protocol of a KV channel: sans-io and deterministic. No sockets, no clock, no tasks, no provider.
