use super::*;

#[test]
fn k9_every_listed_device_opens_and_says_what_it_is() {
    let list = Device::list();
    for profile in Profile::ALL {
        let info = list.iter().find(|d| d.name == format!("soft-{profile}")).unwrap();
        assert_eq!((info.transport, info.profile), ("soft-auto", Some(profile)));
        let device = Device::open(&info.name).unwrap();
        assert_eq!((device.name(), device.transport()), (info.name.as_str(), info.transport));
        assert_eq!(device.capabilities(), &info.capabilities);
        assert_eq!(profile.to_string().parse::<Profile>().unwrap(), profile);
    }
    for transport in SoftTransport::ALL {
        let device = Device::soft(SoftConfig::new().transport(transport)).unwrap();
        assert_eq!(device.transport(), format!("soft-{transport}"));
    }
    let e = Device::open("mlx5_0").unwrap_err().to_string();
    assert!(e.contains("mlx5_0") && e.contains("soft-erdma-compat"), "{e}");
    assert!(Device::open("soft-fast").is_err() && "fast".parse::<Profile>().is_err());
}

#[test]
fn k8_profiles_have_the_limits_that_their_users_report() {
    let erdma = Profile::ErdmaCompat.capabilities();
    assert_eq!((erdma.max_qp_wr, erdma.max_send_sge, erdma.max_recv_sge, erdma.max_inline), (8192, 1, 1, 0));
    assert_eq!((erdma.max_cqe, erdma.max_rd_atomic, erdma.max_srq), (1_048_576, 128, 0));
    assert_eq!((erdma.max_msg_size, erdma.max_mr_size), (0xffff_ffff, 64 << 30));
    let standard = Profile::ErdmaStandard.capabilities();
    assert!(erdma.oob && !standard.oob);
    assert_eq!(standard, Capabilities { oob: false, ..erdma });
    let siw = Profile::Siw.capabilities();
    assert!(!siw.oob && !siw.immediate && siw.ordered && !siw.all_signaled);
    assert_eq!((siw.max_qp_wr, siw.max_send_sge, siw.max_recv_sge), (32_768, 6, 1));
    let tiny = Profile::Tiny.capabilities();
    assert_eq!(
        (tiny.max_qp_wr, tiny.max_cqe, tiny.max_msg_size, tiny.max_mr_size),
        (16, 64, 65_536, 1 << 20)
    );
    let srd = Profile::Srd.capabilities();
    assert!(!srd.ordered && srd.all_signaled);
}

#[test]
fn b2_addresses_that_cannot_be_used_are_refused() {
    for address in ["0.0.0.0", "::", "224.0.0.1"] {
        let e = Device::soft(SoftConfig::new().address(address.parse().unwrap())).unwrap_err();
        assert!(matches!(&e, DeviceError::Config { got, .. } if got == address), "{e}");
    }
    // Of documentation networks: not of this host.
    let e = Device::soft(SoftConfig::new().address("192.0.2.1".parse().unwrap())).unwrap_err();
    assert!(matches!(e, DeviceError::Bind { address, .. } if address.to_string() == "192.0.2.1"), "{e}");
    let v4 = Device::soft(SoftConfig::new()).unwrap();
    assert_eq!(v4.gid(), "::ffff:127.0.0.1".parse::<Ipv6Addr>().unwrap());
}

#[test]
fn b2_a_device_that_rdma_cm_connects_refuses_the_out_of_band_bootstrap_with_the_fix() {
    for profile in Profile::ALL {
        let device = Device::soft(SoftConfig::new().profile(profile)).unwrap();
        let checked = device.check_oob();
        assert_eq!(checked.is_ok(), device.capabilities().oob, "{profile}");
        let Err(error) = checked else { continue };
        let text = error.to_string();
        assert!(matches!(error, DeviceError::NoManualConnect { .. }), "{text}");
        assert!([device.name(), "RTS", "RDMA_CM"].iter().all(|named| text.contains(named)), "{text}");
        let erdma = ["/sys/module/erdma/parameters/compat_mode", "compat_mode=Y"];
        assert_eq!(
            erdma.iter().all(|named| text.contains(named)),
            profile == Profile::ErdmaStandard,
            "{text}"
        );
    }
}
