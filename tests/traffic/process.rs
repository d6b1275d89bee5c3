//! What each worker process is: one that lives as long as nothing kills it, and has a part in round after round, so that what one
//! round leaves behind shows in the next. Commands come in, one a line; lines go out: those of the part, `bad WHAT` for a contract
//! that does not hold, `leak WHAT` for what was not given back (`levels` when it was), and `done` at the end of the part.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use tokio::sync::mpsc;

use super::levels::Levels;

/// What a worker process is started with.
pub const ARGUMENT: &str = "--worker";

/// Lines of the coordinator, read by a thread: a worker that is stopped and woken finds them all.
pub type Commands = mpsc::UnboundedReceiver<String>;

/// Says a line to the coordinator. One that is gone hears nothing, and ends this process by closing its input.
pub fn say(line: impl std::fmt::Display) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

pub fn bad(what: impl std::fmt::Display) {
    say(format_args!("bad {what}"));
}

/// Does each part as it is told, until the coordinator is gone.
pub fn run(part: impl AsyncFn(String, &mut Commands) -> Result<(), String>) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        // What blocks (registration) runs on one thread that stays: it must not show in the levels.
        .max_blocking_threads(1)
        .thread_keep_alive(Duration::from_secs(1 << 20))
        .build();
    let Ok(runtime) = runtime else { return ExitCode::FAILURE };
    let (sender, commands) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    runtime.block_on(parts(part, commands));
    ExitCode::SUCCESS
}

async fn parts(part: impl AsyncFn(String, &mut Commands) -> Result<(), String>, mut commands: Commands) {
    let mut before = None;
    while let Some(line) = commands.recv().await {
        // Of a round whose sender was quicker.
        if line == "stop" {
            continue;
        }
        if let Err(what) = part(line, &mut commands).await {
            bad(what);
        }
        match before {
            // The first part has made what a process makes once: the reaper and the blocking thread.
            None => {
                tokio::time::sleep(Duration::from_millis(50)).await;
                before = Levels::now().ok();
            }
            Some(ref before) => match Levels::settle(before).await {
                Ok(()) => say("levels"),
                Err(what) => say(format_args!("leak {what}")),
            },
        }
        say("done");
    }
}
