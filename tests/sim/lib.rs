//! Empty: a package needs a target that is no test.
