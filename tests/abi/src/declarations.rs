//! Ours, as they are in the crate.

#[path = "../../../src/provider/verbs/sys.rs"]
pub(crate) mod sys;
#[path = "../../../src/provider/verbs/sys_cm.rs"]
pub(crate) mod sys_cm;
