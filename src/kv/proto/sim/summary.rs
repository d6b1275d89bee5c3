//! What a run, or many, have come to.

macro_rules! counts {
    ($($name:ident),* $(,)?) => {
        #[derive(Debug, Default, Clone, PartialEq, Eq)]
        pub(super) struct Summary {
            $(pub(super) $name: u64,)*
        }

        impl Summary {
            pub(super) fn add(&mut self, o: &Self) {
                $(self.$name += o.$name;)*
            }

            fn each(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name)),*].into_iter()
            }
        }
    };
}

counts!(
    landed,
    not_delivered,
    in_doubt,
    resolved_landed,
    resolved_not,
    resolved_unknown,
    revoked,
    refused,
    lost,
    reconnects,
    restarts,
    freezes,
    messages,
    read_by_reads,
    read_by_write,
    reads_failed,
    served,
    not_served,
    closed,
    closed_by_users,
    three_endpoints,
    in_shared_memory,
    with_rails,
    rails_left_out,
    rail_faults,
    rails_down,
    rails_up,
    again,
    copies,
    taken_late,
    unsound_copies,
    work_requests,
    steps,
    micros,
);

impl Summary {
    /// The simulation has been where it is meant to go.
    pub(super) fn assert_everything_was_seen(&self) {
        for (what, n) in self.each() {
            assert!(n > 0, "no seed has come to: {what}");
        }
    }
}

impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (i, (what, n)) in self.each().enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            write!(f, "{comma}{n} {}", what.replace('_', " "))?;
        }
        Ok(())
    }
}
