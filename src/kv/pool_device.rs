//! A device of a pool, and the registration of the pool on it: made with the pool, or, where the device refused then, when somebody
//! asks again. Made once, it lasts as long as the pool.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use tokio::sync::OnceCell;

use super::lock;
use super::pool::words;
use super::proto::{Part, Seams};
use crate::device::ProtectionDomain;
use crate::error::MemoryError;
use crate::memory::{Exposed, Region};
use crate::provider::AccessFlags;

/// How soon a device that has refused is asked again, at the earliest: to pin memory takes its time, and every channel that waits for
/// the device asks for it.
const AGAIN: Duration = Duration::from_secs(1);

/// A device that a pool is registered on, or was to be.
pub(crate) struct PoolDevice {
    pub(crate) pd: ProtectionDomain,
    registered: OnceCell<Registered>,
    refused: Mutex<Refused>,
}

/// The whole pool as one device has it.
pub(crate) struct Registered {
    /// In order of address. More than one where the device's `max_mr_size` asks for it.
    pub(crate) regions: Vec<Region<Exposed>>,
    pub(crate) seams: Seams,
}

/// Why a device has not registered the pool, and when it was last asked.
struct Refused {
    why: String,
    at: Instant,
}

impl Registered {
    fn new(regions: Vec<Region<Exposed>>) -> Self {
        let parts = regions.iter().map(|r| Part { addr: r.addr(), len: r.len(), key: r.lkey() }).collect();
        let seams = Seams::new(parts).expect("a mapping has bytes and does not wrap around");
        Self { regions, seams }
    }
}

impl Refused {
    fn now(error: &MemoryError) -> Self {
        Self { why: format!("the pool cannot be registered: {}", words(error)), at: Instant::now() }
    }
}

impl PoolDevice {
    /// As it came out when the pool was made.
    pub(super) fn new(pd: ProtectionDomain, made: Result<Vec<Region<Exposed>>, &MemoryError>) -> Self {
        let (registered, refused) = match made {
            Ok(regions) => {
                let never = Refused { why: String::new(), at: Instant::now() };
                (OnceCell::new_with(Some(Registered::new(regions))), never)
            }
            Err(error) => (OnceCell::new(), Refused::now(error)),
        };
        if registered.get().is_none() {
            let (device, why) = (pd.device().name(), &refused.why);
            tracing::warn!(device, why, "a pool is without one of its devices");
        }
        Self { pd, registered, refused: Mutex::new(refused) }
    }

    pub(crate) fn registered(&self) -> Option<&Registered> {
        self.registered.get()
    }

    /// Why it cannot be used for now.
    pub(crate) fn refusal(&self) -> Option<String> {
        self.registered().is_none().then(|| lock(&self.refused).why.clone())
    }

    /// Registers the memory of `region`, which another device has, off the workers, unless it is registered by now. Others that ask
    /// meanwhile wait; who asks within [`AGAIN`] of a refusal hears that.
    pub(super) async fn register(
        &self,
        region: &Region<Exposed>,
        access: AccessFlags,
    ) -> Result<&Registered, String> {
        let ask = async || {
            {
                let refused = lock(&self.refused);
                if refused.at.elapsed() < AGAIN {
                    return Err(refused.why.clone());
                }
            }
            let device = self.pd.device().name();
            let regions = self.pd.register_again(region, access).await.map_err(|error| {
                let refused = Refused::now(&error);
                let why = refused.why.clone();
                *lock(&self.refused) = refused;
                why
            })?;
            tracing::info!(device, "a pool is registered on a device that had refused it");
            Ok(Registered::new(regions))
        };
        self.registered.get_or_try_init(ask).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Device, Profile, SoftConfig};
    use crate::kv::{KvPool, Layout, PoolAccess};
    use crate::memory::Memory;

    /// In pieces, as at the start, and no more often than it should.
    #[tokio::test]
    async fn k10_a_device_that_has_refused_a_pool_is_asked_again_but_not_at_once() {
        let layout = Layout::contiguous(1, 5, 1 << 19).unwrap();
        let soft = SoftConfig::new().profile(Profile::Tiny);
        let devices = [soft.clone(), soft.fail_mr(2)].map(|soft| Device::soft(soft).unwrap());
        let pds = devices.each_ref().map(|device| device.alloc_pd().unwrap());
        let memory = Memory::anonymous(layout.required_bytes());
        let pool = KvPool::on_rails(&[&pds[0], &pds[1]], layout, memory, PoolAccess::Both).await.unwrap();
        let own = &pool.devices()[1];
        let asked_ago = |ago| lock(&own.refused).at = Instant::now() - ago;

        lock(&own.refused).at = Instant::now() + Duration::from_secs(36_000);
        let refused = pool.register(1).await.err().unwrap();
        assert!(refused.contains("the pool cannot be registered") && refused.contains("registering memory"));
        assert_eq!(own.refusal(), Some(refused));
        asked_ago(AGAIN);
        let late = pool.register(1).await.ok().unwrap();
        let first = pool.devices()[0].registered().unwrap();
        let places = |of: &Registered| of.regions.iter().map(|r| (r.addr(), r.len())).collect::<Vec<_>>();
        assert_eq!((places(late), late.regions.len()), (places(first), 3));
        assert_eq!(own.refusal(), None);
        let again = pool.register(1).await.ok().unwrap();
        assert!(std::ptr::eq(late, again), "it is made once");
    }
}
