//! Made-up hosts: directories with what the kernel and the distribution show of one, so that each host's difference
//! is seen.

mod broken;
mod right;

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A host below a directory of its own, removed in the end.
pub(crate) struct Root {
    dir: PathBuf,
}

/// A device as it is built. Text is as the kernel prints it.
pub(crate) struct Device {
    pub(crate) name: &'static str,
    /// Where it is in the tree of devices: below a PCI function, or virtual.
    pub(crate) pci: Option<Pci>,
    pub(crate) provider: &'static str,
    pub(crate) node_type: &'static str,
    pub(crate) node_desc: &'static str,
    pub(crate) link_layer: &'static str,
    pub(crate) rate: &'static str,
    /// Index, GID, type.
    pub(crate) gids: &'static [(u32, &'static str, &'static str)],
    /// Below the port's directory.
    pub(crate) counters: &'static [(&'static str, &'static str)],
}

/// A PCI function.
pub(crate) struct Pci {
    pub(crate) path: &'static str,
    pub(crate) vendor: &'static str,
    pub(crate) device: &'static str,
    pub(crate) driver: &'static str,
}

impl Root {
    /// A host that is set up for RDMA, and has no device: Debian 12 on x86-64.
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("landfall-root-{}-{number}", std::process::id()));
        let this = Self { dir };
        this.write("proc/self/limits", &limits("unlimited"));
        this.write("proc/self/status", "Name:\tlandfall\nCapEff:\t0000000000000000\n");
        this.write("proc/self/uid_map", "         0          0 4294967295\n");
        this.write("proc/net/tcp", TCP_HEADING);
        this.write("proc/net/tcp6", TCP_HEADING);
        this.write("proc/sys/kernel/osrelease", "6.1.0-49-amd64\n");
        this.write("proc/sys/net/ipv4/ip_local_port_range", "32768\t60999\n");
        this.write("proc/sys/net/ipv4/ip_local_reserved_ports", "\n");
        this.write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
        this.write("sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc\n");
        this.write("sys/devices/system/node/online", "0\n");
        this.write("sys/devices/system/node/node0/distance", "10\n");
        for library in ["libibverbs.so.1", "librdmacm.so.1"] {
            this.write(&format!("usr/lib/x86_64-linux-gnu/{library}"), "");
        }
        this
    }

    pub(crate) fn path(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn write(&self, at: &str, text: &str) {
        let path = self.dir.join(at);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    /// A relative link, as the kernel's are.
    pub(crate) fn link(&self, at: &str, to: &str) {
        let path = self.dir.join(at);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(format!("{}{to}", "../".repeat(Path::new(at).components().count() - 1)), path).unwrap();
    }

    /// A file or a directory that is not there.
    pub(crate) fn without(self, at: &str) -> Self {
        let path = self.dir.join(at);
        if path.is_dir() {
            std::fs::remove_dir_all(path).unwrap();
        } else {
            std::fs::remove_file(path).unwrap();
        }
        self
    }

    /// A file that says something else.
    pub(crate) fn with(self, at: &str, text: &str) -> Self {
        self.write(at, text);
        self
    }

    /// Adds a device: its classes, its device file, and the provider that libibverbs drives it by.
    pub(crate) fn device(self, device: &Device) -> Self {
        let Device { name, provider, .. } = device;
        let parent = match &device.pci {
            Some(pci) => {
                let at = format!("sys/devices/{}", pci.path);
                self.write(&format!("{at}/vendor"), &format!("{}\n", pci.vendor));
                self.write(&format!("{at}/device"), &format!("{}\n", pci.device));
                self.write(&format!("{at}/numa_node"), "0\n");
                self.write(&format!("sys/bus/pci/drivers/{}/module", pci.driver), "");
                self.link(&format!("{at}/driver"), &format!("sys/bus/pci/drivers/{}", pci.driver));
                let address = pci.path.rsplit('/').next().unwrap();
                self.link(&format!("sys/bus/pci/devices/{address}"), &at);
                at
            }
            None => "sys/devices/virtual".to_owned(),
        };
        let at = format!("{parent}/infiniband/{name}");
        self.write(&format!("{at}/node_type"), device.node_type);
        self.write(&format!("{at}/node_desc"), device.node_desc);
        if device.pci.is_some() {
            self.link(&format!("{at}/device"), &parent);
        }
        let port = format!("{at}/ports/1");
        self.write(&format!("{port}/state"), "4: ACTIVE\n");
        self.write(&format!("{port}/phys_state"), "5: LinkUp\n");
        self.write(&format!("{port}/link_layer"), &format!("{}\n", device.link_layer));
        self.write(&format!("{port}/rate"), &format!("{}\n", device.rate));
        for (index, gid, kind) in device.gids {
            self.write(&format!("{port}/gids/{index}"), &format!("{gid}\n"));
            self.write(&format!("{port}/gid_attrs/types/{index}"), &format!("{kind}\n"));
        }
        for (file, value) in device.counters {
            self.write(&format!("{port}/{file}"), &format!("{value}\n"));
        }
        self.link(&format!("sys/class/infiniband/{name}"), &at);
        let number = std::fs::read_dir(self.dir.join("sys/class/infiniband")).unwrap().count() - 1;
        self.write(&format!("sys/class/infiniband_verbs/uverbs{number}/ibdev"), &format!("{name}\n"));
        self.write("sys/class/misc/rdma_cm/dev", "10:120\n");
        self.write(&format!("dev/infiniband/uverbs{number}"), "");
        self.write("dev/infiniband/rdma_cm", "");
        self.write(&format!("etc/libibverbs.d/{provider}.driver"), &format!("driver {provider}\n"));
        self.write(&format!("usr/lib/x86_64-linux-gnu/libibverbs/lib{provider}-rdmav34.so"), "");
        self
    }

    /// A GPU of NVIDIA, with one of its kinds of modules.
    pub(crate) fn nvidia(self, open: bool) -> Self {
        let kind = if open { "NVIDIA UNIX Open Kernel Module" } else { "NVIDIA UNIX x86_64 Kernel Module" };
        self.write("proc/driver/nvidia/version", &format!("NVRM version: {kind}  550.90.07\n"));
        self.write("sys/module/nvidia/version", "550.90.07\n");
        self
    }

    /// Somebody listens on a TCP port: a process, or the kernel.
    pub(crate) fn listens(self, port: u16, process: Option<(u32, &str)>) -> Self {
        let inode = 4000 + u32::from(port);
        let table = std::fs::read_to_string(self.dir.join("proc/net/tcp")).unwrap();
        let line = format!(
            "   0: 00000000:{port:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 \
            {inode} 1 \
             0000000000000000 100 0 0 10 0\n"
        );
        self.write("proc/net/tcp", &(table + &line));
        if let Some((pid, name)) = process {
            self.write(&format!("proc/{pid}/comm"), &format!("{name}\n"));
            let fds = self.dir.join(format!("proc/{pid}/fd"));
            std::fs::create_dir_all(&fds).unwrap();
            symlink(format!("socket:[{inode}]"), fds.join("5")).unwrap();
        }
        self
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

const TCP_HEADING: &str =
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n";

/// `/proc/self/limits`, with the limit of locked memory.
pub(crate) fn limits(memlock: &str) -> String {
    format!(
        "Limit                     Soft Limit           Hard Limit           Units     \n\
         Max open files            1048576              1048576              files     \n\
         Max locked memory         {memlock:<20} {memlock:<20} bytes     \n"
    )
}

/// An eRDMA adapter, with the vendor's module in a mode.
pub(crate) fn erdma(mode: &str) -> Root {
    Root::new()
        .device(&Device {
            name: "erdma_0",
            pci: Some(Pci {
                path: "pci0000:00/0000:00:06.0",
                vendor: "0x1ded",
                device: "0x107f",
                driver: "erdma",
            }),
            provider: "erdma",
            node_type: "4: RNIC\n",
            node_desc: "Elastic RDMA(iWARP) stack\n",
            link_layer: "Ethernet",
            rate: "100 Gb/sec (4X EDR)",
            gids: &[(0, "0216:3e12:3456:0000:0000:0000:0000:0000", "IB/RoCE v1")],
            counters: &[("hw_counters/hw_tx_bytes_cnt", "0"), ("hw_counters/hw_rx_bytes_cnt", "0")],
        })
        .with("sys/module/erdma/parameters/compat_mode", mode)
}

/// In compat mode the driver itself listens on its ports.
pub(crate) fn erdma_compat() -> Root {
    (30608..=30623).fold(erdma("Y\n"), |root, port| root.listens(port, None))
}

/// A ConnectX card on RoCE, with two addresses in two types.
pub(crate) fn mlx5() -> Root {
    driven_by("mlx5_core")
}

/// The same device, of another driver of the kernel.
pub(crate) fn driven_by(driver: &'static str) -> Root {
    Root::new().device(&Device {
        name: "mlx5_0",
        pci: Some(Pci {
            path: "pci0000:16/0000:16:02.0/0000:17:00.0",
            vendor: "0x15b3",
            device: "0x1021",
            driver,
        }),
        provider: "mlx5",
        node_type: "1: CA\n",
        node_desc: "host-1 mlx5_0\n",
        link_layer: "Ethernet",
        rate: "400 Gb/sec (4X NDR)",
        gids: &[
            (0, "fe80:0000:0000:0000:b83f:d2ff:fe12:3456", "IB/RoCE v1"),
            (1, "fe80:0000:0000:0000:b83f:d2ff:fe12:3456", "RoCE v2"),
            (2, "0000:0000:0000:0000:0000:ffff:0a00:0001", "IB/RoCE v1"),
            (3, "0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2"),
        ],
        counters: &[
            ("counters/port_xmit_data", "1000"),
            ("counters/port_rcv_data", "2000"),
            ("counters/symbol_error", "0"),
            ("hw_counters/out_of_sequence", "3"),
            ("hw_counters/lifespan", "10"),
        ],
    })
}

pub(crate) fn efa() -> Root {
    Root::new().device(&Device {
        name: "efa_0",
        pci: Some(Pci { path: "pci0000:00/0000:00:1d.0", vendor: "0x1d0f", device: "0xefa2", driver: "efa" }),
        provider: "efa",
        node_type: "7: unspecified\n",
        node_desc: "\n",
        link_layer: "Unspecified",
        rate: "100 Gb/sec (4X EDR)",
        gids: &[(0, "fe80:0000:0000:0000:0c66:7fff:fe12:3456", "IB/RoCE v1")],
        counters: &[
            ("hw_counters/send_bytes", "0"),
            ("hw_counters/rdma_write_bytes", "0"),
            ("hw_counters/rdma_read_resp_bytes", "0"),
            ("hw_counters/recv_bytes", "0"),
            ("hw_counters/rdma_write_recv_bytes", "0"),
            ("hw_counters/rdma_read_bytes", "0"),
        ],
    })
}

pub(crate) fn rxe() -> Root {
    Root::new().device(&Device {
        name: "rxe0",
        pci: None,
        provider: "rxe",
        node_type: "1: CA\n",
        node_desc: "rxe\n",
        link_layer: "Ethernet",
        rate: "2.5 Gb/sec (1X SDR)",
        gids: &[
            (0, "fe80:0000:0000:0000:0000:0aff:fe4d:0101", "RoCE v2"),
            (1, "0000:0000:0000:0000:0000:ffff:0a4d:0101", "RoCE v2"),
        ],
        counters: &[("hw_counters/sent_pkts", "0"), ("hw_counters/rcvd_pkts", "0")],
    })
}

pub(crate) fn siw() -> Root {
    Root::new().device(&Device {
        name: "siw0",
        pci: None,
        provider: "siw",
        node_type: "4: RNIC\n",
        node_desc: "Software iWARP stack\n",
        link_layer: "Ethernet",
        rate: "2.5 Gb/sec (1X SDR)",
        gids: &[(0, "020a:4d01:0100:0000:0000:0000:0000:0000", "IB/RoCE v1")],
        counters: &[],
    })
}
