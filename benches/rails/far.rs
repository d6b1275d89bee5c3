//! The process that is written to: grants as many blocks as it is asked for, until the channel ends.

use std::io::Write;

use crate::common::Error;
use crate::{Args, device, endpoint};

pub async fn serve(args: &Args, rails: usize) -> Result<(), Error> {
    let devices: Result<Vec<_>, _> = (0..rails).map(|_| device(None)).collect();
    let mut listener = endpoint(args, &devices?).await?.listen(([127, 0, 0, 1], 0).into()).await?;
    println!("{}", listener.local_addr());
    std::io::stdout().flush()?;
    let channel = listener.accept().await?;
    loop {
        let asked = match channel.recv_message().await {
            Ok(asked) => asked,
            Err(end) if end.is_graceful() => return Ok(()),
            Err(end) => return Err(end.into()),
        };
        let blocks = channel.pool().alloc(String::from_utf8(asked)?.parse()?).await?;
        channel.send_message(channel.grant(blocks)?.to_bytes()).await?;
        drop(channel.next_arrival().await?);
    }
}
