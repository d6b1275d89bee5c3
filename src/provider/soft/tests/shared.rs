//! Completion queues that share a channel, and what is dropped while an event of theirs is still unread (R7).

use std::os::fd::AsRawFd;

use super::*;
use crate::provider::Armed;

over_both_transports! {
    r7_case_22_a_queue_goes_with_its_event_unread_and_the_other_of_its_channel_goes_on,
}

/// Row 22: two queues on one channel, dropped with an unread event and after a refused connect.
fn r7_case_22_a_queue_goes_with_its_event_unread_and_the_other_of_its_channel_goes_on(on: SoftTransport) {
    for profile in Profile::ALL {
        let side = Side::new(on, profile);
        let (one, two) = (side.channel.create_cq(16).unwrap(), side.channel.create_cq(16).unwrap());
        let init = QpInit { max_send_wr: 8, max_recv_wr: 8, max_send_sge: 1, max_recv_sge: 1, max_inline: 0 };
        let qp = |cq: &Cq| side.pd.create_qp(cq, cq, init).unwrap();
        let (first, second) = (qp(&one), qp(&two));
        recv(&first, 1, None);
        recv(&second, 2, None);
        let mut out = [Cqe::default(); 4];
        let arm = |cq: &Cq| while cq.arm().unwrap() != Armed::Armed {};
        let readable = || {
            let fd = side.channel.fd().as_raw_fd();
            let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            // SAFETY: one initialised element, which lives for the call.
            unsafe { libc::poll(&mut poll, 1, DEADLINE.as_millis() as i32) == 1 }
        };
        arm(&one);
        arm(&two);
        first.set_error().unwrap();
        second.set_error().unwrap();
        assert!(readable(), "two armed queues got completions");
        // With its event and its completion unread.
        drop((first, one));
        side.channel.drain_events().unwrap();
        let n = two.poll(&mut out).unwrap();
        assert_eq!(ids(&out[..n]), [(2, WcStatus::Flushed)], "its own, and no other's");
        // It is woken as before.
        arm(&two);
        recv(&second, 3, None);
        assert!(readable(), "an armed queue got a completion");
        side.channel.drain_events().unwrap();
        let n = two.poll(&mut out).unwrap();
        assert_eq!(ids(&out[..n]), [(3, WcStatus::Flushed)]);
        // After a refused connect, and in the other order.
        let third = qp(&two);
        recv(&third, 4, None);
        third.set_error().unwrap();
        assert!(third.connect(&attributes(&second, true)).is_err());
        drop(two);
        drop((second, third));
        side.channel.drain_events().unwrap();
    }
}
