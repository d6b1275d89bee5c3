//! Row 35: a fork after a registration, and registrations that come and go. On devices, and on the soft provider.

use landfall::device::Device;
use landfall::memory::{Access, Memory};

use crate::harness::*;

/// Pages of which a part is registered, and the rest is the program's.
struct Pages {
    base: *mut u8,
    len: usize,
}

// SAFETY: plain memory, reached by raw pointers.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    fn map(len: usize) -> Self {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        assert_ne!(base, libc::MAP_FAILED);
        Self { base: base.cast(), len }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`; the region over it is gone, since it holds this.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

/// The child reads and writes what is beside the registered bytes, on the same pages, and ends well.
fn fork_beside_a_region(device: Device) {
    const LEN: usize = 3 * 4096;
    // Unaligned at both ends.
    const START: usize = 1001;
    const REGISTERED: usize = 2 * 4096 + 11;
    run(false, async {
        let pages = Pages::map(LEN);
        let base = pages.base;
        // SAFETY: fresh memory of that length, which nobody else knows.
        unsafe { base.write_bytes(7, LEN) };
        // SAFETY: inside of the pages, which their owner keeps, and reached through the region only.
        let memory = unsafe { Memory::from_raw(base.add(START), REGISTERED as u64, Box::new(pages)) };
        let pd = device.alloc_pd().unwrap();
        let region = pd.register_exposed(memory, Access::READ_WRITE).await.unwrap();
        // SAFETY: between fork and _exit the child touches plain memory and does nothing else.
        let child = unsafe {
            let child = libc::fork();
            if child == 0 {
                let ours = |at: usize| {
                    let byte = base.add(at);
                    let seen = byte.read_volatile();
                    byte.write_volatile(9);
                    seen == 7 && byte.read_volatile() == 9
                };
                let good = ours(0) && ours(START - 1) && ours(START + REGISTERED) && ours(LEN - 1);
                libc::_exit(i32::from(!good));
            }
            child
        };
        assert!(child > 0, "{}", std::io::Error::last_os_error());
        let mut status = 0;
        // SAFETY: a child of ours; the status is written.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert!(
            libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0,
            "the child's status is {status:#x}"
        );
        // What the child wrote is the child's; the parent's region is as before.
        // SAFETY: a byte beside the registered ones.
        assert_eq!(unsafe { base.read_volatile() }, 7);
        let slice = region.slice(..).unwrap();
        let mut bytes = vec![0; REGISTERED];
        slice.copy_out(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|&b| b == 7));
    });
}

/// Lines of /proc/self/maps, and the bytes that they map for writing.
fn maps() -> (usize, u64) {
    let text = std::fs::read_to_string("/proc/self/maps").unwrap();
    let bytes = text.lines().filter_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (from, to) = range.split_once('-')?;
        let (from, to) = (u64::from_str_radix(from, 16).ok()?, u64::from_str_radix(to, 16).ok()?);
        rest.starts_with("rw").then_some(to - from)
    });
    (text.lines().count(), bytes.sum())
}

/// 2,000 registrations, unaligned and dropped at once, leave no mapping behind.
fn register_and_drop(device: Device) {
    const BYTES: u64 = 50_001;
    run(false, async {
        let pd = device.alloc_pd().unwrap();
        let mut before = (0, 0);
        for cycle in 0..2_200 {
            // What the runtime, the allocator and the driver keep, they have by now.
            if cycle == 200 {
                before = maps();
            }
            let access = if cycle % 2 == 0 { Access::READ } else { Access::READ_WRITE };
            drop(pd.register_exposed(Memory::anonymous(BYTES), access).await.unwrap());
        }
        let after = maps();
        // A leak would be 2,000 ranges, or 100 MB. What the other tests of this process map meanwhile, a
        // thread's stack, guard and arena each, is also counted: a few dozen ranges, and the arenas' bytes.
        assert!(after.0 <= before.0 + 200 && after.1 <= before.1 + (32 << 20), "{before:?}, then {after:?}");
    });
}

#[test]
#[ignore = "needs RDMA devices"]
fn r7_a_child_uses_the_neighbours_of_a_registered_buffer() {
    fork_beside_a_region(device(0));
}

#[test]
#[ignore = "needs RDMA devices"]
fn r7_registrations_that_come_and_go_leave_no_mapping() {
    register_and_drop(device(0));
}

#[test]
fn r7_a_child_uses_the_neighbours_of_a_registered_buffer_on_the_soft_provider() {
    fork_beside_a_region(Device::open("soft-default").unwrap());
}

#[test]
fn r7_registrations_that_come_and_go_leave_no_mapping_on_the_soft_provider() {
    register_and_drop(Device::open("soft-default").unwrap());
}
