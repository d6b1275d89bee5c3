//! What the examples share: how they print, complain and end, their device, where data connections are made, and the peer
//! process.

pub(crate) mod device;
pub(crate) mod peer;

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::ExitCode;

pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;

/// The example's name.
const PROGRAM: &str = env!("CARGO_CRATE_NAME");

/// The whole of a program: its arguments as they were parsed (`None` asks for help), and what it does with them.
pub(crate) fn program<A>(
    parsed: Result<Option<A>, String>,
    usage: &str,
    run: impl AsyncFnOnce(&A) -> Result<(), Error>,
) -> ExitCode {
    let args = match parsed {
        Ok(Some(args)) => args,
        Ok(None) => return ended(print(usage)),
        Err(why) => {
            complain(&why);
            return ExitCode::from(2);
        }
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(why) => return ended(Err(format!("starting a tokio runtime: {why}").into())),
    };
    ended(runtime.block_on(run(&args)))
}

/// The exit status, and the complaint.
pub(crate) fn ended(result: Result<(), Error>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            complain(&landfall::error::chain(why.as_ref()));
            ExitCode::FAILURE
        }
    }
}

/// One line on standard error. That nobody may be there to read it is no reason to panic, as `eprintln!` does.
pub(crate) fn complain(what: &str) {
    let _ = writeln!(std::io::stderr(), "{PROGRAM}: {}", what.replace('\n', " "));
}

/// Text on standard output. `println!` would panic when the reader has gone.
pub(crate) fn print(text: &str) -> Result<(), Error> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .map_err(|e| format!("writing to standard output: {e}").into())
}

/// The address on which this side's data connections are made: the one that it listens on, or that its route to the
/// peer starts from. Listening on every address, it is that of the route to anywhere.
pub(crate) fn data_address(address: SocketAddr, listening: bool) -> Option<IpAddr> {
    let towards = match (listening, address.ip()) {
        (false, _) => address,
        (true, ip) if !ip.is_unspecified() => return Some(ip),
        // Addresses for documentation (RFC 5737, RFC 3849).
        (true, IpAddr::V4(_)) => (Ipv4Addr::new(192, 0, 2, 1), 9).into(),
        (true, IpAddr::V6(_)) => (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1), 9).into(),
    };
    // Connecting a datagram socket sends nothing; it only chooses a route.
    let any: SocketAddr = if towards.is_ipv4() { ([0; 4], 0).into() } else { ([0u16; 8], 0).into() };
    let socket = std::net::UdpSocket::bind(any).ok()?;
    socket.connect(towards).ok()?;
    Some(socket.local_addr().ok()?.ip())
}
