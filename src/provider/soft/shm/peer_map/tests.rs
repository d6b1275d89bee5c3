use std::os::fd::{AsFd, BorrowedFd, FromRawFd};
use std::time::{Duration, Instant};

use super::*;
use crate::memory::{Mapping, Memory, Prefault};

const SIZE_SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
const PAGE: u64 = 4096;

/// A region's memory, as its owner has it.
fn owned(len: u64) -> Mapping {
    Memory::memfd(len).prefault(Prefault::No).map().unwrap()
}

/// The descriptor as a peer is sent it.
fn sent(mapping: &Mapping) -> OwnedFd {
    mapping.memfd_ref().unwrap().fd.try_clone_to_owned().unwrap()
}

/// A memfd that somebody else made.
fn made(len: i64, seals: libc::c_int, flags: libc::c_uint) -> Option<OwnedFd> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | flags;
    // SAFETY: plain system calls; the descriptor is nobody else's.
    unsafe {
        let fd = libc::memfd_create(c"made".as_ptr(), flags);
        if fd < 0 {
            return None;
        }
        let fd = OwnedFd::from_raw_fd(fd);
        assert_eq!(libc::ftruncate(fd.as_raw_fd(), len), 0);
        assert_eq!(libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals), 0);
        Some(fd)
    }
}

fn inode(fd: BorrowedFd<'_>) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::File::from(fd.try_clone_to_owned().unwrap()).metadata().unwrap().ino()
}

/// Mappings of that inode in this process that can only be read, and shared.
fn readers(inode: u64) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let of = |line: &str| {
        let mut words = line.split_ascii_whitespace().skip(1);
        let access = words.next();
        (access, words.nth(2).and_then(|w| w.parse::<u64>().ok())) == (Some("r--s"), Some(inode))
    };
    maps.lines().filter(|line| of(line)).count()
}

fn byte(map: &PeerMap, offset: u64) -> u8 {
    let at = map.at(offset, 1).unwrap();
    // SAFETY: inside of the mapping, which `map` keeps.
    unsafe { at.read_volatile() }
}

fn write(mapping: &Mapping, offset: usize, byte: u8) {
    let at = ptr::with_exposed_provenance_mut::<u8>(mapping.addr() as usize + offset);
    assert!((offset as u64) < mapping.len());
    // SAFETY: inside of a mapping of this test's own.
    unsafe { at.write_volatile(byte) };
}

#[test]
fn r1_a_region_of_ours_is_mapped_and_shows_what_its_owner_writes() {
    let owner = owned(3 * PAGE + 5);
    let map = PeerMap::map(sent(&owner), 3 * PAGE + 5).unwrap();
    // The memfd's length, in whole pages.
    assert_eq!(map.len(), owner.memfd_ref().unwrap().len);
    write(&owner, 8200, 7);
    assert_eq!((byte(&map, 8200), byte(&map, 8201)), (7, 0));
    let end = map.len();
    assert!(map.at(0, end).is_some() && map.at(end, 0).is_some());
    for (offset, len) in [(0, end + 1), (end, 1), (end + 1, 0), (1, u64::MAX), (u64::MAX, 1)] {
        assert!(map.at(offset, len).is_none(), "{offset} {len}");
    }
    // Its owner's end takes nothing away.
    drop(owner);
    assert_eq!(byte(&map, 8200), 7);
}

#[test]
fn r1_a_peers_memory_cannot_be_written_from_here() {
    let owner = owned(PAGE);
    let map = PeerMap::map(sent(&owner), PAGE).unwrap();
    let inode = inode(owner.memfd_ref().unwrap().fd);
    assert_eq!(readers(inode), 1, "shared, and read only");
    // SAFETY: a plain query.
    let seals = unsafe { libc::fcntl(sent(&owner).as_raw_fd(), libc::F_GET_SEALS) };
    let start = ptr::with_exposed_provenance_mut(map.pages.addr);
    // SAFETY: a page that only this test uses. It stays readable in any case.
    let writable = unsafe { libc::mprotect(start, PAGE as usize, libc::PROT_READ | libc::PROT_WRITE) } == 0;
    assert_eq!(writable, seals & libc::F_SEAL_FUTURE_WRITE == 0, "by the owner's seal");
}

#[test]
fn b1_a_memfd_that_could_change_its_size_is_refused() {
    for seals in [0, libc::F_SEAL_SEAL, libc::F_SEAL_SHRINK, libc::F_SEAL_GROW, libc::F_SEAL_WRITE] {
        let fd = made(8192, seals, 0).unwrap();
        let e = PeerMap::map(fd, 8192).unwrap_err();
        assert!(matches!(e, PeerMapError::NotSealed { seals: s } if s & SIZE_SEALS != SIZE_SEALS), "{e}");
    }
    assert!(PeerMap::map(made(8192, SIZE_SEALS, 0).unwrap(), 8192).is_ok());
    let read_only = made(8192, SIZE_SEALS | libc::F_SEAL_WRITE, 0).unwrap();
    assert!(PeerMap::map(read_only, 8192).is_ok());
}

#[test]
fn b1_a_memfd_shorter_than_announced_is_refused() {
    for (size, told) in [(0, 0), (0, 1), (4096, 4097), (8191, 8192), (4096, u64::MAX)] {
        let e = PeerMap::map(made(size, SIZE_SEALS, 0).unwrap(), told).unwrap_err();
        assert!(matches!(e, PeerMapError::TooShort { told: t, .. } if t == told), "{e}");
    }
    let e = PeerMap::map(made(1 << 41, SIZE_SEALS, 0).unwrap(), 4096).unwrap_err();
    assert!(matches!(e, PeerMapError::TooLarge { size, .. } if size == 1 << 41), "{e}");
    // A part of a page at the end is readable, and zero.
    let map = PeerMap::map(made(8191, SIZE_SEALS, 0).unwrap(), 100).unwrap();
    assert_eq!((map.len(), byte(&map, 8190)), (8191, 0));
    assert!(map.at(8190, 2).is_none());
}

#[test]
fn b1_descriptors_of_other_things_are_refused() {
    let (reader, _writer) = std::io::pipe().unwrap();
    let socket = std::os::unix::net::UnixStream::pair().unwrap().0;
    let zero = std::fs::File::open("/dev/zero").unwrap();
    let file = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
    let directory = std::fs::File::open("/").unwrap();
    let others: [OwnedFd; 5] = [reader.into(), socket.into(), zero.into(), file.into(), directory.into()];
    for fd in others {
        let e = PeerMap::map(fd, 1).unwrap_err();
        assert!(matches!(e, PeerMapError::NotMemfd), "{e}");
    }
    // Huge pages can run out under a reader. The system need not have any for the descriptor to exist.
    if let Some(fd) = made(2 << 20, SIZE_SEALS, libc::MFD_HUGETLB) {
        let e = PeerMap::map(fd, 4096).unwrap_err();
        assert!(matches!(e, PeerMapError::NotMemfd), "{e}");
    }
    // A descriptor that cannot be read.
    let fd = made(4096, SIZE_SEALS, 0).unwrap();
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let write_only: OwnedFd = std::fs::OpenOptions::new().write(true).open(path).unwrap().into();
    let e = PeerMap::map(write_only, 4096).unwrap_err();
    assert!(matches!(e, PeerMapError::Os { .. }), "{e}");
}

#[test]
fn r7_one_memfd_is_one_mapping_and_goes_with_its_last_user() {
    let owner = owned(4 * PAGE);
    let inode = inode(owner.memfd_ref().unwrap().fd);
    assert_eq!(readers(inode), 0);
    let first = PeerMap::map(sent(&owner), 4 * PAGE).unwrap();
    let second = PeerMap::map(sent(&owner), 1).unwrap();
    assert!(Arc::ptr_eq(&first, &second));
    assert_eq!(readers(inode), 1);
    drop(first);
    assert_eq!((readers(inode), byte(&second, 0)), (1, 0));
    drop(second);
    assert_eq!(readers(inode), 0);
    assert!(!lock(&MAPPED).keys().any(|file| file.1 == inode), "and is forgotten");
    // And comes again.
    let third = PeerMap::map(sent(&owner), 1).unwrap();
    assert_eq!((readers(inode), third.len()), (1, 4 * PAGE));
}

/// What is pinned on this side's account is of the connection that has lent it as its slots, whoever else lends the same memfd.
#[test]
fn b1_a_memfd_that_is_slots_of_one_connection_is_not_for_another() {
    let owner = owned(4 * PAGE);
    let inode = inode(owner.memfd_ref().unwrap().fd);
    let len = owner.memfd_ref().unwrap().len;
    let before = PeerMap::map(sent(&owner), len).unwrap();
    let slots = PeerMap::map_slots(sent(&owner), len).unwrap();
    let after = PeerMap::map(sent(&owner), len).unwrap();
    let others = PeerMap::map_slots(sent(&owner), len).unwrap();
    assert_eq!([&before, &slots, &after, &others].map(|map| map.is_of_slots()), [false, true, false, true]);
    assert!(Arc::ptr_eq(&before, &after) && !Arc::ptr_eq(&slots, &others));
    assert_eq!(readers(inode), 3);
    for told in [len - 1, len + 1] {
        let e = PeerMap::map_slots(sent(&owner), told).unwrap_err();
        assert!(matches!(e, PeerMapError::TooLarge { .. } | PeerMapError::TooShort { .. }), "{e}");
    }
    drop((slots, others));
    assert_eq!((readers(inode), lock(&MAPPED).keys().any(|file| file.1 == inode)), (1, true));
}

#[test]
fn r7_many_threads_that_map_and_unmap_leave_nothing() {
    let owner = owned(2 * PAGE);
    write(&owner, 4096, 9);
    let inode = inode(owner.memfd_ref().unwrap().fd);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..500 {
                    let map = PeerMap::map(sent(&owner), PAGE).unwrap();
                    assert_eq!(byte(&map, 4096), 9);
                }
            });
        }
    });
    assert_eq!(readers(inode), 0);
    assert!(!lock(&MAPPED).keys().any(|file| file.1 == inode));
}

/// Until `done`, with a deadline.
fn wait(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn r9_large_regions_are_populated_and_unmapped_elsewhere_and_sparse_ones_stay_sparse() {
    let len = 4 * LARGE;
    let full = Memory::memfd(len).prefault(Prefault::Yes).map().unwrap();
    let map = PeerMap::map(sent(&full), len).unwrap();
    // In the table of pages of this process: bit 63 of its words.
    let present = || {
        let pagemap = std::fs::File::open("/proc/self/pagemap").unwrap();
        let mut words = vec![0u8; (len / PAGE) as usize * 8];
        let at = map.pages.addr as u64 / PAGE * 8;
        std::os::unix::fs::FileExt::read_exact_at(&pagemap, &mut words, at).unwrap();
        words.as_chunks::<8>().0.iter().all(|word| u64::from_le_bytes(*word) >> 63 == 1)
    };
    wait("the pages are never there", present);
    let of = inode(full.memfd_ref().unwrap().fd);
    drop(map);
    wait("the mapping stays", || readers(of) == 0);

    let sparse = owned(len);
    let map = PeerMap::map(sent(&sparse), len).unwrap();
    // The jobs of the background run in order: when this one has run, a populating one before it has.
    let (tell, told) = std::sync::mpsc::channel();
    background::run(move || tell.send(()).unwrap());
    told.recv_timeout(Duration::from_secs(60)).unwrap();
    let blocks = {
        use std::os::unix::fs::MetadataExt;
        std::fs::File::from(sent(&sparse)).metadata().unwrap().blocks()
    };
    assert_eq!((blocks, map.len()), (0, len));
}

#[test]
fn r7_the_descriptor_is_closed_after_mapping() {
    let owner = owned(PAGE);
    let sent = sent(&owner);
    // Its number is looked at through a name, so that another test that opens a file meanwhile is not taken for it.
    let link = format!("/proc/self/fd/{}", sent.as_raw_fd());
    let of = inode(sent.as_fd());
    let _map = PeerMap::map(sent, PAGE).unwrap();
    use std::os::unix::fs::MetadataExt;
    assert!(std::fs::metadata(link).map_or(true, |other| other.ino() != of));
}
