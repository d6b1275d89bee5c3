//! `landfall bench serve` as a process of its own, which is killed with its handle.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command};
use std::sync::mpsc;
use std::time::Duration;

use crate::program::landfall;

/// Long, on a machine that does other things too.
pub(crate) const LONG: Duration = Duration::from_secs(60);

pub(crate) struct Server {
    child: Child,
    pub(crate) address: String,
    lines: mpsc::Receiver<String>,
}

impl Server {
    /// On a free port of loopback.
    pub(crate) fn start(options: &[&str]) -> Self {
        Self::at("127.0.0.1:0", options)
    }

    pub(crate) fn at(address: &str, options: &[&str]) -> Self {
        let mut words = vec!["bench", "serve", address];
        words.extend(options);
        Self::of(landfall(&words))
    }

    pub(crate) fn of(mut command: Command) -> Self {
        let mut child = command.spawn().expect("the server starts");
        let stdout = BufReader::new(child.stdout.take().expect("it has an output"));
        let (said, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if said.send(line).is_err() {
                    break;
                }
            }
        });
        let mut server = Self { child, address: String::new(), lines };
        let first = server.until("listening on ");
        let words = first.trim_start_matches("listening on ");
        server.address = words.split(',').next().expect("an address").to_owned();
        server
    }

    /// The next line that has `text` in it.
    pub(crate) fn until(&self, text: &str) -> String {
        loop {
            let line =
                self.lines.recv_timeout(LONG).unwrap_or_else(|why| panic!("no line with {text:?}: {why}"));
            if line.contains(text) {
                return line;
            }
        }
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("it can be killed");
        self.child.wait().expect("it ends");
    }

    /// Its exit status.
    pub(crate) fn signal(&mut self, signal: i32) -> Option<i32> {
        // SAFETY: no memory is touched; the child has not been waited for, so that its id is its own.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
        self.child.wait().expect("it ends").code()
    }

    pub(crate) fn is_alive(&mut self) -> bool {
        self.child.try_wait().expect("it can be asked").is_none()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
