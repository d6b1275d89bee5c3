//! What a process waits for in the kernel: of one that does not do what it should.

use std::fs::{DirEntry, read_dir, read_to_string};

/// Of each thread its name, its system call with arguments, and the kernel's stack where this process may see it.
pub fn waits(pid: u32) -> String {
    let threads = read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let wait = |thread: DirEntry| {
        let [name, syscall, stack] = ["comm", "syscall", "stack"]
            .map(|file| read_to_string(thread.path().join(file)).unwrap_or_default());
        format!("{}: system call {}\n{stack}", name.trim(), syscall.trim())
    };
    threads.map(wait).collect()
}
