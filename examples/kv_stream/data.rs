//! What is streamed: the content of each block, its checksum, and where the pages of a request lie.

/// SplitMix64 (Steele, Lea, Flood 2014): a small generator that can start anywhere.
#[derive(Clone)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// The bytes of page `page` of a request in `layer`. They depend on each of the arguments, so that a page that
/// landed in another one's place, or from another request, does not compare equal.
pub(crate) fn fill(seed: u64, request: u32, layer: u32, page: u32, out: &mut [u8]) {
    let place = (u64::from(request) << 40) ^ (u64::from(layer) << 28) ^ u64::from(page);
    let mut random = Random::new(seed ^ Random::new(place).next());
    let mut words = out.chunks_exact_mut(8);
    for word in &mut words {
        word.copy_from_slice(&random.next().to_le_bytes());
    }
    let rest = words.into_remainder();
    let tail = random.next().to_le_bytes();
    rest.copy_from_slice(&tail[..rest.len()]);
}

/// The block ids of a request's pages on the two sides: `pages` pages fall into runs of about `mean` that are
/// contiguous on both sides, and each side has the runs in an order of its own, as after some hours of traffic.
pub(crate) fn placement(seed: u64, request: u32, pages: u32, mean: u32) -> (Vec<u32>, Vec<u32>) {
    let mut random = Random::new(seed ^ (u64::from(request) << 32) ^ 0x70_6c61_6365);
    let mut runs = Vec::new();
    let mut first = 0;
    while first < pages {
        // Uniform on 1..2 × mean, whose mean is `mean`.
        let len = (1 + random.below(2 * u64::from(mean) - 1)).min(u64::from(pages - first)) as u32;
        runs.push((first, len));
        first += len;
    }
    let mut side = || {
        let mut order: Vec<usize> = (0..runs.len()).collect();
        for i in (1..order.len()).rev() {
            order.swap(i, random.below(i as u64 + 1) as usize);
        }
        let mut ids = vec![0; pages as usize];
        let mut block = 0;
        for run in order {
            let (first, len) = runs[run];
            for page in first..first + len {
                ids[page as usize] = block;
                block += 1;
            }
        }
        ids
    };
    (side(), side())
}

/// A seed that nobody chose.
pub(crate) fn random_seed() -> std::io::Result<u64> {
    let mut bytes = [0; 8];
    std::io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}
