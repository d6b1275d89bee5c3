//! The OpenAI-style API: requests, responses, errors, and the extension of `usage`. Values only.

mod error;
mod request;
mod response;

pub use error::ApiError;
pub use request::{ChatMessage, Style, Wanted};
pub use response::{Head, Underneath, Usage};
