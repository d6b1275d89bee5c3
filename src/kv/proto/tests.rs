//! Tests by contract, on two connections and a wire that the test holds in its hands.

use super::*;
use std::time::Duration;

pub(super) fn config() -> Config {
    Config {
        qps: 2,
        notify: Notify::Imm,
        ordered: true,
        local_epoch: 1,
        peer_epoch: 2,
        tx_credits: Credits { data: 8, control: 8 },
        rx_credits: Credits { data: 8, control: 8 },
        max_control: 512,
        max_write: 4096,
        max_transfers: 16,
        heartbeat: Duration::from_millis(100),
        peer_timeout: Duration::from_millis(500),
        abort_grace: Duration::from_millis(200),
    }
}
