//! The process that is started as the other side: it says where it listens, and is asked until the channel ends.

use std::fmt::Display;
use std::io::Write;

use landfall::kv::{KvChannel, KvEndpoint, KvListener};

use super::Error;

/// The first line of this process, which the one that has started it waits for.
pub fn hello(line: impl Display) -> Result<(), Error> {
    println!("{line}");
    Ok(std::io::stdout().flush()?)
}

/// Listens on loopback, and says where.
pub async fn listen(endpoint: &KvEndpoint) -> Result<KvListener, Error> {
    let listener = endpoint.listen(([127, 0, 0, 1], 0).into()).await?;
    hello(listener.local_addr())?;
    Ok(listener)
}

/// What the near process asks next. `None` when it has closed the channel.
pub async fn asked(channel: &KvChannel) -> Result<Option<Vec<u8>>, Error> {
    match channel.recv_message().await {
        Ok(message) => Ok(Some(message)),
        Err(end) if end.is_graceful() => Ok(None),
        Err(end) => Err(end.into()),
    }
}
