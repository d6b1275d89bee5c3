//! The receiving process: answers each notification with one of its own. Its memory is written meanwhile.

use std::alloc::Layout;
use std::net::SocketAddr;

use crate::{Args, Error, builder};

/// The notification that ends the program.
pub(crate) const END: u32 = u32::MAX;

pub(crate) async fn serve(args: &Args, address: SocketAddr) -> Result<(), Error> {
    let rdma = builder(&args.device, args).listen(address).await?;
    let answer = rdma.alloc_local_mr(Layout::new::<[u8; 8]>())?;
    let mut target = rdma.request_remote_mr(Layout::new::<[u8; 8]>()).await?;
    loop {
        let number = rdma.receive_write_imm().await?;
        rdma.write_with_imm(&answer, &mut target, number).await?;
        if number == END {
            return Ok(());
        }
    }
}
