//! `landfall devices`: every device that can be opened here, and what it can do.

use landfall::device::{Capabilities, Device, DeviceInfo};
use serde::Serialize;

use crate::output::{Align, Error, Outcome, Output, Table};

/// List the devices of this host, and what each can do
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

#[derive(Serialize)]
struct Listed {
    name: String,
    transport: &'static str,
    profile: Option<&'static str>,
}

pub(crate) fn run(_args: &Args, output: &Output) -> Result<Outcome, Error> {
    let devices = Device::list();
    if output.is_json() {
        let listed: Vec<_> = devices
            .iter()
            .map(|d| Listed {
                name: d.name.clone(),
                transport: d.transport,
                profile: d.profile.map(|p| p.name()),
            })
            .collect();
        output.document(&listed)?;
        return Ok(Outcome::Well);
    }
    let mut table =
        Table::new([("device", Align::Left), ("transport", Align::Left), ("limits", Align::Left)]);
    for DeviceInfo { name, transport, capabilities, .. } in &devices {
        table.row([name.clone(), (*transport).to_owned(), limits(capabilities)]);
    }
    output.print(&table.text(0))?;
    Ok(Outcome::Well)
}

fn limits(c: &Capabilities) -> String {
    format!("{} WRs a queue, {} elements", c.max_qp_wr, c.max_send_sge)
}
