//! The program `landfall` as its users run it: what it prints, how it ends, and what it says about mistakes.

mod examined;
mod program;
mod roots;
mod usage;
