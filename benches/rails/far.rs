//! The process that is written to: grants as many blocks as it is asked for, until the channel ends.

use crate::common::{self, Error};
use crate::{Args, device, endpoint};

pub async fn serve(args: &Args, rails: usize) -> Result<(), Error> {
    let devices: Result<Vec<_>, _> = (0..rails).map(|_| device(None)).collect();
    let channel = common::listen(&endpoint(args, &devices?).await?).await?.accept().await?;
    while let Some(asked) = common::asked(&channel).await? {
        let blocks = channel.pool().alloc(String::from_utf8(asked)?.parse()?).await?;
        channel.send_message(channel.grant(blocks)?.to_bytes()).await?;
        drop(channel.next_arrival().await?);
    }
    Ok(())
}
