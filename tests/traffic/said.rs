//! What the processes say of their transfers, and whether it fits together.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use super::life::tag;

/// What has a fate of its own: a write, or one layer of a write by layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Item {
    pub tag: u64,
    pub layer: Option<u32>,
}

impl Item {
    pub fn write(tag: u64) -> Self {
        Self { tag, layer: None }
    }

    pub fn layer(tag: u64, layer: u32) -> Self {
        Self { tag, layer: Some(layer) }
    }
}

impl fmt::Display for Item {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.layer {
            None => write!(f, "{}", self.tag),
            Some(layer) => write!(f, "{}/{layer}", self.tag),
        }
    }
}

impl FromStr for Item {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once('/') {
            None => text.parse().map(Self::write),
            Some((tag, layer)) => Ok(Self::layer(tag.parse()?, layer.parse()?)),
        }
    }
}

/// What processes have said.
#[derive(Default)]
pub struct Said {
    /// Whose sender told: true is landed.
    ended: BTreeMap<Item, bool>,
    doubts: BTreeSet<Item>,
    arrived: BTreeSet<Item>,
    /// By tag, of writes by layer: `layered` by the sender, all layers have landed; by the receiver `whole`, all have arrived,
    /// `aborted`, or `dropped`, given up by itself.
    layered: BTreeSet<u64>,
    whole: BTreeSet<u64>,
    aborted: BTreeSet<u64>,
    dropped: BTreeSet<u64>,
    /// Of reads: what the reader told, true is read; what the owner told.
    read: BTreeMap<u64, bool>,
    served: BTreeMap<u64, Service>,
    /// Rails that have failed, and that came back, as those tell who dialled.
    pub rails_lost: u64,
    pub rails_back: u64,
    moved: u64,
    pub bad: Vec<String>,
    /// What was not given back.
    pub leaks: Vec<String>,
}

/// How the owner of a grant to read has seen its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Service {
    Served,
    /// The reader gave it up, or it was refused.
    Unserved,
    /// Revoked, or the connection was lost.
    Withdrawn,
}

/// How many transfers ended in which way.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub writes: u64,
    pub layered: u64,
    pub reads: u64,
    pub lost: u64,
    pub unread: u64,
    pub doubts: u64,
    pub arrivals: u64,
    /// Of what has landed or was read.
    pub bytes: u64,
    pub rails_lost: u64,
    pub rails_back: u64,
}

impl Said {
    /// A line of a worker about a transfer, or a contract that does not hold.
    pub fn hear(&mut self, what: &str, rest: &str) -> Result<(), String> {
        match what {
            "bad" => self.bad.push(rest.to_owned()),
            "leak" => self.leaks.push(rest.to_owned()),
            "levels" => {}
            "moved" => {
                let bytes: u64 = rest.parse().map_err(|_| format!("a worker said {what} {rest}"))?;
                self.moved += bytes;
            }
            "rails" => {
                let numbers =
                    rest.split_once(' ').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
                let (lost, back): (u64, u64) = numbers.ok_or(format!("a worker said {what} {rest}"))?;
                self.rails_lost += lost;
                self.rails_back += back;
            }
            _ => return self.transfer(what, rest),
        }
        Ok(())
    }

    fn transfer(&mut self, what: &str, rest: &str) -> Result<(), String> {
        let item: Item = rest.parse().map_err(|_| format!("a worker said {what} {rest}"))?;
        let tag = item.tag;
        let news = match what {
            // An answer to a doubt comes later, and once.
            "landed" => self.ended.insert(item, true).is_none(),
            "lost" => self.ended.insert(item, false).is_none(),
            "doubt" => self.doubts.insert(item),
            "arrived" => self.arrived.insert(item),
            "layered" => self.layered.insert(tag),
            "whole" => self.whole.insert(tag),
            "aborted" => self.aborted.insert(tag),
            "dropped" => self.dropped.insert(tag),
            "read" => self.read.insert(tag, true).is_none(),
            "unread" => self.read.insert(tag, false).is_none(),
            "served" => self.served.insert(tag, Service::Served).is_none(),
            "unserved" => self.served.insert(tag, Service::Unserved).is_none(),
            "withdrawn" => self.served.insert(tag, Service::Withdrawn).is_none(),
            _ => return Err(format!("a worker said {what} {rest}")),
        };
        if !news {
            self.bad.push(format!("{item} {what} twice (K2)"));
        }
        Ok(())
    }

    /// Whether it all fits together. Of a process that has lived to the end, what it has said is all.
    pub fn verdict(&mut self, lives: impl Fn(u64) -> bool) {
        let mut bad = Vec::new();
        let lives = |tag: u64| lives(tag::asked(tag));
        for (item, landed) in &self.ended {
            let Item { tag, layer } = *item;
            // Of a write by layer that was given up, the layers are told only as far as that was.
            let untold = layer.is_some() && (self.aborted.contains(&tag) || self.dropped.contains(&tag));
            match (landed, self.arrived.contains(item)) {
                (true, false) if lives(tag) && !untold => {
                    bad.push(format!("{item} landed and did not arrive (K1)"));
                }
                (false, true) => bad.push(format!("{item} was not delivered, and arrived (K2)")),
                _ => {}
            }
        }
        for tag in &self.layered {
            if !self.whole.contains(tag) && !self.dropped.contains(tag) && lives(*tag) {
                bad.push(format!("every layer of {tag} landed, and it did not arrive (K1)"));
            }
        }
        for (tag, read) in &self.read {
            match (read, self.served.get(tag)) {
                (true, None) if lives(*tag) => {
                    bad.push(format!("{tag} was read, and its owner was not told (R2)"));
                }
                (true, Some(Service::Unserved)) => {
                    bad.push(format!("{tag} was read, and its owner was told that it was not"));
                }
                (false, Some(Service::Served)) => {
                    bad.push(format!("{tag} was not read, and its owner was told that it was (K1)"));
                }
                _ => {}
            }
        }
        self.bad.append(&mut bad);
    }

    pub fn counts(&self) -> Counts {
        let of = |wanted: bool, layers: bool| {
            let ended = self.ended.iter().filter(move |(_, landed)| **landed == wanted);
            ended
                .map(|(item, _)| item)
                .filter(move |item| item.layer.is_some() == layers)
                .map(|item| item.tag)
        };
        let read = self.read.values().filter(|read| **read).count() as u64;
        Counts {
            writes: of(true, false).count() as u64,
            layered: self.layered.len() as u64,
            reads: read,
            lost: of(false, false).count() as u64,
            unread: self.read.len() as u64 - read,
            doubts: self.doubts.len() as u64,
            arrivals: (self.arrived.iter().filter(|item| item.layer.is_none()).count() + self.whole.len())
                as u64,
            bytes: self.moved,
            rails_lost: self.rails_lost,
            rails_back: self.rails_back,
        }
    }
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, more: Self) {
        self.writes += more.writes;
        self.layered += more.layered;
        self.reads += more.reads;
        self.lost += more.lost;
        self.unread += more.unread;
        self.doubts += more.doubts;
        self.arrivals += more.arrivals;
        self.bytes += more.bytes;
        self.rails_lost += more.rails_lost;
        self.rails_back += more.rails_back;
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { writes, layered, reads, lost, unread, doubts, arrivals, rails_lost, rails_back, .. } =
            self;
        write!(
            f,
            "{writes} writes and {layered} by layer landed, {lost} not delivered, {doubts} in doubt; {arrivals} arrivals; \
             {reads} read, {unread} not read; {rails_lost} rails lost, {rails_back} back"
        )
    }
}
