//! What the test compares: each struct, union, constant and function of our declarations beside that of rdma-sys. The
//! lists are made by `build.rs`.

use std::os::raw::{c_int, c_uint};

#[allow(dead_code, non_camel_case_types, unsafe_op_in_unsafe_fn, unused_imports)]
#[allow(clippy::all, clippy::undocumented_unsafe_blocks)]
mod declarations;

/// Both modules' names, as the lists have them.
mod ours {
    pub(crate) use crate::declarations::sys::*;
    pub(crate) use crate::declarations::sys_cm::*;
}

/// A struct or a union.
#[derive(Debug)]
pub struct Layout {
    pub name: &'static str,
    /// Size and alignment.
    pub ours: (usize, usize),
    pub theirs: (usize, usize),
    pub fields: Vec<Field>,
}

/// Offset and size of a field.
#[derive(Debug)]
pub struct Field {
    pub name: &'static str,
    pub ours: (usize, usize),
    pub theirs: (usize, usize),
}

#[derive(Debug)]
pub struct Constant {
    pub name: &'static str,
    pub ours: i64,
    pub theirs: i64,
}

/// A function: the sizes of its result and of its arguments.
#[derive(Debug)]
pub struct Function {
    pub name: &'static str,
    pub ours: Vec<usize>,
    pub theirs: Vec<usize>,
}

impl Layout {
    /// What is not the same, in words.
    pub fn differences(&self) -> Vec<String> {
        let mut all = Vec::new();
        if self.ours != self.theirs {
            all.push(format!(
                "{}: (size, alignment) is {:?}, theirs {:?}",
                self.name, self.ours, self.theirs
            ));
        }
        for Field { name, ours, theirs } in &self.fields {
            // rdma-sys has members of unions without a size, where bindgen has made them.
            let theirs = (theirs.0, if theirs.1 == 0 { ours.1 } else { theirs.1 });
            if *ours != theirs {
                all.push(format!("{}.{name}: (offset, size) is {ours:?}, theirs {theirs:?}", self.name));
            }
        }
        all
    }
}

/// The size of what a pointer to a field points to. Nothing is called.
fn size_of_target<T, F>(_: fn(*const T) -> *const F) -> usize {
    size_of::<F>()
}

/// An enumeration's value, however rdma-sys has it.
trait Value {
    fn value(self) -> i64;
}

impl Value for c_int {
    fn value(self) -> i64 {
        self.into()
    }
}

impl Value for c_uint {
    fn value(self) -> i64 {
        self.into()
    }
}

macro_rules! flags {
    ($($name:ident)*) => { $(impl Value for rdma_sys::$name {
        fn value(self) -> i64 {
            self.0.into()
        }
    })* };
}

flags!(ibv_access_flags ibv_qp_attr_mask ibv_send_flags ibv_wc_flags);

impl Value for rdma_sys::ibv_event_type {
    fn value(self) -> i64 {
        self as i64
    }
}

trait Signature {
    fn sizes() -> Vec<usize>;
}

macro_rules! signature {
    ($($argument:ident)*) => {
        impl<R, $($argument),*> Signature for unsafe extern "C" fn($($argument),*) -> R {
            fn sizes() -> Vec<usize> {
                vec![size_of::<R>(), $(size_of::<$argument>()),*]
            }
        }
    };
}

signature!();
signature!(A);
signature!(A B);
signature!(A B C);
signature!(A B C D);
signature!(A B C D E);
signature!(A B C D E F);
signature!(A B C D E F G);

fn sizes_of_member<T, F: Signature>(_: fn(*const T) -> *const F) -> Vec<usize> {
    F::sizes()
}

fn sizes_of<F: Signature>(_: F) -> Vec<usize> {
    F::sizes()
}

/// A function that gives the address of a field, from the address of its struct.
macro_rules! to_field {
    ($ty:ty, $field:ident) => {
        |at: *const $ty| {
            // SAFETY: never called; its type alone is asked for.
            unsafe { &raw const (*at).$field }
        }
    };
}

macro_rules! layout {
    ($ours:ident, $theirs:ident, [$(($field:ident, $their_field:ident),)*]) => {
        Layout {
            name: stringify!($ours),
            ours: (size_of::<ours::$ours>(), align_of::<ours::$ours>()),
            theirs: (size_of::<rdma_sys::$theirs>(), align_of::<rdma_sys::$theirs>()),
            fields: vec![$(Field {
                name: stringify!($field),
                ours: (
                    std::mem::offset_of!(ours::$ours, $field),
                    size_of_target(to_field!(ours::$ours, $field)),
                ),
                theirs: (
                    std::mem::offset_of!(rdma_sys::$theirs, $their_field),
                    size_of_target(to_field!(rdma_sys::$theirs, $their_field)),
                ),
            }),*],
        }
    };
}

macro_rules! constant {
    ($kind:ident, $name:ident) => {
        Constant { name: stringify!($name), ours: ours::$name.into(), theirs: rdma_sys::$kind::$name.value() }
    };
}

macro_rules! unnamed {
    ($name:ident) => {
        (stringify!($name), i64::from(ours::$name))
    };
}

macro_rules! function {
    ($table:ident, $name:ident, [$($blank:tt,)*]) => {
        Function {
            name: stringify!($name),
            ours: sizes_of_member(to_field!(ours::$table, $name)),
            theirs: sizes_of(rdma_sys::$name as unsafe extern "C" fn($($blank),*) -> _),
        }
    };
}

/// Every struct and union that we declare.
pub fn layouts() -> Vec<Layout> {
    include!(concat!(env!("OUT_DIR"), "/layouts.rs")).into()
}

/// Every constant of an enumeration with a name.
pub fn constants() -> Vec<Constant> {
    include!(concat!(env!("OUT_DIR"), "/named.rs")).into()
}

/// The constants of enumerations without a name, which rdma-sys does not have, and our value.
pub fn unnamed_constants() -> Vec<(&'static str, i64)> {
    include!(concat!(env!("OUT_DIR"), "/unnamed.rs")).into()
}

/// Every function that we load.
pub fn functions() -> Vec<Function> {
    include!(concat!(env!("OUT_DIR"), "/functions.rs")).into()
}
