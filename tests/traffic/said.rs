//! What the processes say of their transfers, and whether it fits together.

use std::collections::{BTreeMap, BTreeSet};

/// What processes have said.
#[derive(Default)]
pub struct Said {
    /// By tag, of writes whose sender told: true is landed.
    pub ended: BTreeMap<u64, bool>,
    pub doubts: BTreeSet<u64>,
    pub arrived: BTreeSet<u64>,
    pub bad: Vec<String>,
    /// What was not given back.
    pub leaks: Vec<String>,
}

impl Said {
    /// A line of a worker about a transfer, or a contract that does not hold.
    pub fn hear(&mut self, what: &str, rest: &str) -> Result<(), String> {
        match what {
            "bad" => self.bad.push(rest.to_owned()),
            "leak" => self.leaks.push(rest.to_owned()),
            "levels" => {}
            _ => return self.transfer(what, rest),
        }
        Ok(())
    }

    fn transfer(&mut self, what: &str, rest: &str) -> Result<(), String> {
        let tag: u64 = rest.parse().map_err(|_| format!("a worker said {what} {rest}"))?;
        let news = match what {
            // An answer to a doubt comes later, and once.
            "landed" => self.ended.insert(tag, true).is_none(),
            "lost" => self.ended.insert(tag, false).is_none(),
            "doubt" => self.doubts.insert(tag),
            "arrived" => self.arrived.insert(tag),
            _ => return Err(format!("a worker said {what} {rest}")),
        };
        if !news {
            self.bad.push(format!("{tag:#x} {what} twice (K2)"));
        }
        Ok(())
    }

    /// Whether it all fits together. Of a receiver that has lived to the end, what it has said is all.
    pub fn verdict(&mut self, receiver_lives: impl Fn(u64) -> bool) {
        for (tag, landed) in &self.ended {
            match (landed, self.arrived.contains(tag)) {
                (true, false) if receiver_lives(*tag) => {
                    self.bad.push(format!("{tag:#x} landed and did not arrive (K1)"));
                }
                (false, true) => self.bad.push(format!("{tag:#x} was not delivered, and arrived (K2)")),
                _ => {}
            }
        }
    }
}
