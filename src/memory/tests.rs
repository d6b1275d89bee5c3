use std::any::Any;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::device::{Device, Profile, ProtectionDomain, SoftConfig, SoftTransport};

fn pd() -> ProtectionDomain {
    Device::soft(SoftConfig::new()).unwrap().alloc_pd().unwrap()
}

#[tokio::test]
async fn r10_lengths_that_cannot_be_are_typed_errors() {
    let pd = pd();
    for memory in [Memory::anonymous(0), Memory::memfd(0)] {
        assert!(matches!(pd.register_local(memory).await, Err(MemoryError::Length { asked: 0, .. })));
    }
    for asked in [u64::MAX, u64::MAX - 4095, 1 << 63, 1 << 50] {
        let e = pd.register_local(Memory::anonymous(asked)).await.unwrap_err();
        assert!(
            matches!(e, MemoryError::TooLarge { asked: a, limit } if a == asked && limit == 1 << 40),
            "{e}"
        );
        // And past the device's own check.
        assert!(Memory::anonymous(asked).prefault(Prefault::No).map().is_err());
        assert!(Memory::memfd(asked).prefault(Prefault::No).map().is_err());
    }
    let tiny = Device::soft(SoftConfig::new().profile(Profile::Tiny)).unwrap().alloc_pd().unwrap();
    let e = tiny.register_local(Memory::anonymous((1 << 20) + 1)).await.unwrap_err();
    assert!(matches!(e, MemoryError::TooLarge { asked: 1_048_577, limit: 1_048_576 }), "{e}");
    assert!(tiny.register_local(Memory::anonymous(1 << 20)).await.is_ok());
    // SAFETY: refused before anything is accessed.
    let null = unsafe { Memory::from_raw(std::ptr::null_mut(), 8, Box::new(())) };
    assert!(matches!(pd.register_local(null).await, Err(MemoryError::Length { .. })));
}

#[tokio::test]
async fn r1_local_slices_split_and_join_like_bytes_mut() {
    let pd = pd();
    let mut all = pd.register_local(Memory::anonymous(100)).await.unwrap().into_slice();
    assert!(all.iter().all(|&b| b == 0) && all.len() == 100);
    all.iter_mut().enumerate().for_each(|(i, b)| *b = i as u8);
    let mut head = all.split_to(30).unwrap();
    let tail = all.split_off(20).unwrap();
    assert_eq!((head.len(), all.len(), tail.len()), (30, 20, 50));
    assert_eq!((head[29], all[0], all[19], tail[0], tail[49]), (29, 30, 49, 50, 99));
    head[0] = 200;
    assert!(matches!(head.split_to(31), Err(MemoryError::OutOfRange { offset: 31, size: 30, .. })));
    assert!(matches!(head.split_off(u64::MAX), Err(MemoryError::OutOfRange { .. })));
    // Not neighbours, and not in this order: both come back.
    let (head, tail) = head.unsplit(tail).unwrap_err();
    let (all, head) = all.unsplit(head).unwrap_err();
    let whole = head.unsplit(all).unwrap().unsplit(tail).unwrap();
    assert_eq!((whole.len(), whole[0], whole[99]), (100, 200, 99));
    let other = pd.register_local(Memory::anonymous(100)).await.unwrap().into_slice();
    assert!(whole.unsplit(other).is_err());
}

#[tokio::test]
async fn r1_exposed_slices_copy_within_their_bounds_only() {
    let region = pd().register_exposed(Memory::memfd(100_000), Access::READ_WRITE).await.unwrap();
    let s = region.slice(1000..90_000).unwrap();
    let data: Vec<u8> = (0..89_000u32).map(|i| ((i * 7) >> 3) as u8).collect();
    s.copy_in(0, &data).unwrap();
    let mut out = vec![0; 89_000];
    s.copy_out(0, &mut out).unwrap();
    assert_eq!(out, data);
    assert!(matches!(
        s.copy_in(1, &data),
        Err(MemoryError::OutOfRange { offset: 1, len: 89_000, size: 89_000 })
    ));
    assert!(s.copy_out(u64::MAX, &mut out[..1]).is_err());
    // One byte before and one after are untouched.
    let mut edge = [9];
    region.slice(999..1000).unwrap().copy_out(0, &mut edge).unwrap();
    assert_eq!(edge, [0]);
    assert!(region.slice(5..100_001).is_err());
    assert!(region.slice(..=u64::MAX).is_err());
    #[allow(clippy::reversed_empty_ranges)]
    let reversed = region.slice(7..5);
    assert!(reversed.is_err());
    assert!(region.slice(100_000..).unwrap().is_empty());
    // SAFETY: no peer, no operation.
    assert_eq!(unsafe { s.as_slice() }, data);
}

#[tokio::test]
async fn r1_checksums_depend_on_every_byte_and_not_on_the_address() {
    let region = pd().register_exposed(Memory::anonymous(200_000), Access::WRITE).await.unwrap();
    for len in [0usize, 1, 7, 8, 31, 32, 33, 16_384, 16_385, 70_001] {
        let data: Vec<u8> = (0..len).map(|i| (i * 31 % 251) as u8).collect();
        let sum = checksum(&data);
        for at in [0, 1, 4097] {
            region.slice(..).unwrap().copy_in(at, &data).unwrap();
            assert_eq!(region.slice(at..at + len as u64).unwrap().checksum().unwrap(), sum, "{len} at {at}");
        }
        for i in (0..len).step_by(997) {
            let mut changed = data.clone();
            changed[i] ^= 0x80;
            assert_ne!(checksum(&changed), sum, "byte {i} of {len}");
        }
        let mut longer = data.clone();
        longer.push(0);
        assert_ne!(checksum(&longer), sum, "{len} and a zero");
    }
    // Words that change places, within a lane and across lanes.
    let mut words: Vec<u8> = (0..128).collect();
    let sum = checksum(&words);
    for (a, b) in [(0, 8), (0, 32), (32, 64)] {
        for i in 0..8 {
            words.swap(a + i, b + i);
        }
        assert_ne!(checksum(&words), sum);
        for i in 0..8 {
            words.swap(a + i, b + i);
        }
    }
}

#[tokio::test]
async fn r1_write_to_fd_writes_all_of_it() {
    let region = pd().register_exposed(Memory::anonymous(300_000), Access::WRITE).await.unwrap();
    let data: Vec<u8> = (0..300_000u32).map(|i| (i >> 2) as u8).collect();
    region.slice(..).unwrap().copy_in(0, &data).unwrap();
    // More than a pipe holds.
    let (mut reader, writer) = std::io::pipe().unwrap();
    let slice = region.slice(1..).unwrap();
    let thread = std::thread::spawn(move || slice.write_to_fd(writer.as_fd()).unwrap());
    let mut out = Vec::new();
    reader.read_to_end(&mut out).unwrap();
    thread.join().unwrap();
    assert!(out == data[1..]);
    let closed = std::io::pipe().unwrap().1;
    assert!(region.slice(..).unwrap().write_to_fd(closed.as_fd()).is_err());
}

#[test]
fn r1_a_memfd_can_be_lent_and_only_its_owner_writes_it() {
    let mapping = Memory::memfd(5000).map().unwrap();
    let memfd = mapping.memfd_ref().unwrap();
    let page = mapping::page_size();
    assert_eq!((mapping.len(), mapping.addr() % page as u64), (5000, 0));
    assert_eq!(memfd.len, 5000_usize.next_multiple_of(page) as u64);
    let fd = memfd.fd.as_raw_fd();
    let map = |protection| {
        // SAFETY: a new mapping at an address of the kernel's choice; it is left to the end of the process.
        unsafe { libc::mmap(std::ptr::null_mut(), page, protection, libc::MAP_SHARED, fd, 0) }
    };
    // SAFETY: plain system calls on an open descriptor, and on a mapping that nothing else uses.
    unsafe {
        let seals = libc::fcntl(fd, libc::F_GET_SEALS);
        let size = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        assert_eq!(seals & size, size);
        for len in [0, 1, 4096, 1 << 20] {
            assert!(libc::ftruncate(fd, len) == -1 || len == memfd.len as i64);
        }
        // Whoever gets the descriptor reads, and cannot become a writer.
        let reader = map(libc::PROT_READ);
        assert_ne!(reader, libc::MAP_FAILED);
        if seals & libc::F_SEAL_FUTURE_WRITE == 0 {
            eprintln!("this kernel has no F_SEAL_FUTURE_WRITE: a peer could write");
            return;
        }
        assert_eq!(map(libc::PROT_READ | libc::PROT_WRITE), libc::MAP_FAILED);
        assert_eq!(libc::mprotect(reader, page, libc::PROT_READ | libc::PROT_WRITE), -1);
        assert_eq!(libc::pwrite(fd, [1u8].as_ptr().cast(), 1, 0), -1);
        let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        assert_eq!(libc::fallocate(fd, punch, 0, page as i64), -1);
        // The owner does, and the reader sees it.
        std::ptr::with_exposed_provenance_mut::<u8>(mapping.addr() as usize).add(17).write_volatile(5);
        assert_eq!(reader.cast::<u8>().add(17).read_volatile(), 5);
    }
}

#[test]
fn r1_every_memfd_has_a_name_of_its_own() {
    let id = |mapping: &Mapping| mapping.memfd_ref().map(|memfd| memfd.id);
    let (a, b) = (Memory::memfd(1).map().unwrap(), Memory::memfd(1).map().unwrap());
    assert_ne!(id(&a), id(&b));
    assert!(id(&a) != Some(0) && id(&a).is_some() && id(&b) != Some(0));
    assert_eq!(id(&Memory::anonymous(1).map().unwrap()), None);
    assert_eq!(id(&users(1).0.map().unwrap()), None);
}

#[tokio::test]
async fn r1_our_memory_is_a_memfd_where_a_peer_may_copy_from_it() {
    for (transport, lent) in
        [(SoftTransport::Tcp, false), (SoftTransport::Auto, true), (SoftTransport::Shm, true)]
    {
        let pd = Device::soft(SoftConfig::new().transport(transport)).unwrap().alloc_pd().unwrap();
        let map = |memory: Memory| memory.map_for(pd.provider()).unwrap().memfd_ref().is_some();
        assert_eq!(map(Memory::anonymous(9000)), lent, "{transport}");
        assert!(map(Memory::memfd(9000)), "{transport}");
        assert!(!map(users(9000).0), "{transport}");
        // By the public way, as ever.
        let region = pd.register_exposed(Memory::anonymous(9000), Access::READ_WRITE).await.unwrap();
        assert_eq!(region.inner.mapping.memfd_ref().is_some(), lent, "{transport}");
        region.slice(8990..).unwrap().copy_in(0, &[1; 10]).unwrap();
        let memory = Memory::anonymous(9000);
        let (pds, access) = ([&pd], AccessFlags::LOCAL_WRITE);
        let mut all = ProtectionDomain::register_on_all(&pds, memory, access).await.unwrap();
        let pieces = all.remove(0).unwrap();
        assert_eq!(pieces[0].inner.mapping.memfd_ref().is_some(), lent, "{transport}");
    }
}

/// Says when it is dropped.
struct Owner(#[allow(dead_code)] Box<[u8]>, Arc<AtomicBool>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.1.store(true, Ordering::SeqCst);
    }
}

fn users(len: usize) -> (Memory, Arc<AtomicBool>) {
    let gone = Arc::new(AtomicBool::new(false));
    let mut bytes = vec![3u8; len].into_boxed_slice();
    let ptr = bytes.as_mut_ptr();
    let owner: Box<dyn Any + Send + Sync> = Box::new(Owner(bytes, gone.clone()));
    // SAFETY: the owner keeps the allocation, and nobody else has a pointer to it.
    (unsafe { Memory::from_raw(ptr, len as u64, owner) }, gone)
}

#[tokio::test]
async fn r1_the_users_owner_is_dropped_after_the_last_use() {
    let (memory, gone) = users(10_001);
    let mut slice = pd().register_local(memory).await.unwrap().into_slice();
    assert!(slice.iter().all(|&b| b == 3), "prefault changes nothing");
    let tail = slice.split_off(10_000).unwrap();
    drop(slice);
    assert!(!gone.load(Ordering::SeqCst));
    drop(tail);
    assert!(gone.load(Ordering::SeqCst));
    // Never registered, refused, or its future dropped: the owner goes too.
    let (memory, gone) = users(8);
    drop(memory);
    assert!(gone.load(Ordering::SeqCst));
}

#[test]
fn r9_a_registration_that_is_dropped_leaks_nothing() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let (memory, gone) = users(1 << 20);
    let pd = pd();
    runtime.block_on(async {
        let mut registration = Box::pin(pd.register_exposed(memory, Access::WRITE));
        // Started, then given up.
        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
        let _ = registration.as_mut().poll(&mut cx);
        drop(registration);
    });
    // The blocking pool finishes what it has begun.
    drop(runtime);
    assert!(gone.load(Ordering::SeqCst));
}

#[test]
fn r9_without_a_runtime_registration_is_an_error() {
    let pd = pd();
    let mut future = std::pin::pin!(pd.register_local(Memory::anonymous(1)));
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    let std::task::Poll::Ready(result) = future.as_mut().poll(&mut cx) else { panic!("pending") };
    assert!(matches!(result, Err(MemoryError::RuntimeGone)));
}

#[test]
fn r10_remote_ranges_are_checked_also_against_nonsense() {
    let region = RemoteRegion { addr: 1000, len: 100, rkey: 5 };
    assert_eq!(region.slice(10, 90).unwrap(), RemoteSlice { addr: 1010, len: 90, rkey: 5 });
    assert!(matches!(region.slice(10, 91), Err(MemoryError::OutOfRange { offset: 10, len: 91, size: 100 })));
    assert!(region.slice(u64::MAX, 2).is_err());
    let nonsense = RemoteRegion { addr: u64::MAX - 5, len: u64::MAX, rkey: 0 };
    assert!(nonsense.slice(3, 10).is_err() && nonsense.slice(10, 0).is_err());
    let json = serde_json::to_string(&region).unwrap();
    assert_eq!(serde_json::from_str::<RemoteRegion>(&json).unwrap(), region);
}

#[tokio::test]
async fn r10_a_sparse_region_of_six_gib_has_the_right_bytes_at_the_right_place() {
    const GIB: u64 = 1 << 30;
    let pd = pd();
    let memory = Memory::anonymous(6 * GIB).prefault(Prefault::No);
    let region = pd.register_exposed(memory, Access::WRITE).await.unwrap();
    let at = 4 * GIB + 8192;
    region.slice(at..at + 4096).unwrap().copy_in(0, &[7; 4096]).unwrap();
    let mut byte = [1; 4096];
    region.slice(..).unwrap().copy_out(8192, &mut byte).unwrap();
    assert_eq!(byte, [0; 4096], "the same place, 4 GiB before");
    region.slice(..).unwrap().copy_out(at, &mut byte).unwrap();
    assert_eq!(byte, [7; 4096]);
    for len in [(1 << 32) - 1, 1 << 32, (1 << 32) + 1] {
        let slice = region.slice(..len).unwrap();
        assert_eq!((slice.len(), slice.sge().len), (len, len));
        assert_eq!(region.remote().slice(GIB, len).unwrap().len, len);
    }
    assert_eq!(region.remote().len, 6 * GIB);
}
