//! What an operation can own: a slice of either kind, or nothing.

use crate::memory::{AnySlice, Exposed, Local, Slice};

mod sealed {
    use crate::memory::AnySlice;

    pub trait Sealed: Sized + Send + 'static {
        fn erase(self) -> Option<AnySlice>;
        /// The inverse of `erase`: called with what that gave.
        fn restore(erased: Option<AnySlice>) -> Self;
    }
}

/// A buffer that moves into an operation and comes back with its result: `Slice<Local>`, `Slice<Exposed>`, or `()`
/// for an operation without payload. `Option<AnySlice>` is the form that has forgotten its kind.
pub trait Buffer: sealed::Sealed {}

impl<T: sealed::Sealed> Buffer for T {}

pub(crate) use sealed::Sealed as Erase;

impl Erase for Slice<Local> {
    fn erase(self) -> Option<AnySlice> {
        Some(self.into())
    }

    fn restore(erased: Option<AnySlice>) -> Self {
        erased.and_then(AnySlice::into_local).expect("an operation gives back what it was given")
    }
}

impl Erase for Slice<Exposed> {
    fn erase(self) -> Option<AnySlice> {
        Some(self.into())
    }

    fn restore(erased: Option<AnySlice>) -> Self {
        erased.and_then(AnySlice::into_exposed).expect("an operation gives back what it was given")
    }
}

impl Erase for AnySlice {
    fn erase(self) -> Option<AnySlice> {
        Some(self)
    }

    fn restore(erased: Option<AnySlice>) -> Self {
        erased.expect("an operation gives back what it was given")
    }
}

impl Erase for Option<AnySlice> {
    fn erase(self) -> Option<AnySlice> {
        self
    }

    fn restore(erased: Option<AnySlice>) -> Self {
        erased
    }
}

impl Erase for () {
    fn erase(self) -> Option<AnySlice> {
        None
    }

    fn restore(_: Option<AnySlice>) -> Self {}
}
