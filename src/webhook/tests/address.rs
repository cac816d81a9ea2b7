//! Tables and properties of public addresses: every range at its edges, and every way to embed an IPv4 address in an
//! IPv6 address. No test uses the network.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use proptest::prelude::*;

use super::{Network, is_public};

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

#[test]
fn special_purpose_addresses_are_not_public() {
    let refused = [
        "0.0.0.0",
        "0.255.255.255",
        "10.0.0.0",
        "10.255.255.255",
        "100.64.0.0",
        "100.100.100.200",
        "100.127.255.255",
        "127.0.0.1",
        "127.255.255.255",
        "168.63.129.16",
        "169.254.0.0",
        "169.254.169.254",
        "172.16.0.0",
        "172.31.255.255",
        "192.0.0.192",
        "192.0.2.1",
        "192.88.99.1",
        "192.168.0.0",
        "192.168.255.255",
        "198.18.0.0",
        "198.19.255.255",
        "198.51.100.7",
        "203.0.113.7",
        "224.0.0.1",
        "239.255.255.255",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::2",
        "::127.0.0.1",
        "::8.8.8.8",
        "::ffff:127.0.0.1",
        "::ffff:a00:1",
        "::ffff:0:127.0.0.1",
        "::ffff:0:8.8.8.8",
        "64:ff9b::127.0.0.1",
        "64:ff9b::10.0.0.1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::1",
        "64:ff9b:1::8.8.8.8",
        "64:ff9b:1:ffff::",
        "100::1",
        "2001::1",
        "2001:0:7f00:1::",
        "2001:0:4136:e378:8000:63bf:80ff:fffe",
        "2001:2::1",
        "2001:10::1",
        "2001:20::1",
        "2001:1ff:ffff::",
        "2001:db8::1",
        "2002:7f00:1::",
        "2002:a00:1::1",
        "2002:a9fe:a9fe::1",
        "2002:c0a8:101::",
        "3fff::1",
        "3fff:fff:ffff::",
        "2606:4700::5efe:a00:1",
        "2606:4700::200:5efe:7f00:1",
        "4000::1",
        "5f00::1",
        "fc00::1",
        "fd00:ec2::254",
        "fd20:ce::254",
        "fdff:ffff::1",
        "fe80::1",
        "febf::1",
        "fec0::1",
        "feff::1",
        "ff02::1",
        "ff0e::1",
    ];
    for text in refused {
        assert!(!is_public(ip(text)), "{text}");
    }
}

#[test]
fn assigned_addresses_next_to_special_ranges_are_public() {
    let public = [
        "1.1.1.1",
        "8.8.8.8",
        "9.255.255.255",
        "11.0.0.0",
        "100.63.255.255",
        "100.128.0.0",
        "126.255.255.255",
        "128.0.0.0",
        "168.63.129.15",
        "169.253.255.255",
        "169.255.0.0",
        "172.15.255.255",
        "172.32.0.0",
        "192.0.1.0",
        "192.167.255.255",
        "192.169.0.0",
        "198.17.255.255",
        "198.20.0.0",
        "223.255.255.255",
        "::ffff:8.8.8.8",
        "64:ff9b::8.8.8.8",
        "2001:200::1",
        "2001:4860:4860::8888",
        "2002:808:808::1",
        "2606:4700::1111",
        "2606:4700::5efe:808:808",
        "2a00:1450::1",
    ];
    for text in public {
        assert!(is_public(ip(text)), "{text}");
    }
}

#[test]
fn networks_contain_the_addresses_of_their_prefix() {
    let cases = [
        ("10.0.0.0/8", "10.255.255.255", true),
        ("10.0.0.0/8", "11.0.0.0", false),
        ("10.1.2.3/8", "10.0.0.1", true),
        ("10.1.2.3", "10.1.2.3", true),
        ("10.1.2.3", "10.1.2.4", false),
        ("0.0.0.0/0", "255.255.255.255", true),
        ("0.0.0.0/0", "::1", false),
        ("::/0", "ff02::1", true),
        ("fd00::/8", "fdff::1", true),
        ("fd00::/8", "fe00::1", false),
        ("::1", "::1", true),
        ("::ffff:10.0.0.0/104", "10.9.9.9", true),
        ("::ffff:10.0.0.1", "10.0.0.1", true),
    ];
    for (network, address, inside) in cases {
        assert_eq!(Network::parse(network).unwrap().contains(ip(address)), inside, "{network} {address}");
    }
    for text in
        ["", "/", "10.0.0.0/", "10.0.0.0/33", "::/129", "10.0.0.0/+8", "10.0.0/8", "10.0.0.0/8/8", "x/8", "::1%1"]
    {
        assert_eq!(Network::parse(text), None, "{text}");
    }
}

/// IPv4 addresses that are not public.
fn forbidden() -> impl Strategy<Value = Ipv4Addr> {
    let in_range = |base: [u8; 4], prefix: u32| {
        let base = u32::from_be_bytes(base);
        any::<u32>().prop_map(move |bits| Ipv4Addr::from_bits(base | bits.checked_shr(prefix).unwrap_or(0)))
    };
    prop_oneof![
        in_range([0, 0, 0, 0], 8),
        in_range([10, 0, 0, 0], 8),
        in_range([100, 64, 0, 0], 10),
        in_range([127, 0, 0, 0], 8),
        in_range([169, 254, 0, 0], 16),
        in_range([172, 16, 0, 0], 12),
        in_range([192, 168, 0, 0], 16),
        in_range([198, 18, 0, 0], 15),
        in_range([224, 0, 0, 0], 4),
        in_range([240, 0, 0, 0], 4),
    ]
}

proptest! {
    #[test]
    fn no_embedding_makes_a_forbidden_address_public(v4 in forbidden(), rest in any::<u64>(), other in any::<u32>()) {
        let bits = u128::from(v4.to_bits());
        let rest = u128::from(rest);
        let teredo = 0x2001_0000u128 << 96;
        let embedded = [
            bits,
            (0xffffu128 << 32) | bits,
            (0xffffu128 << 48) | bits,
            (0x0064_ff9bu128 << 96) | bits,
            (0x0064_ff9b_0001u128 << 80) | bits,
            (0x0064_ff9b_0001u128 << 80) | (bits << 48),
            (0x2002u128 << 112) | (bits << 80) | rest,
            teredo | (bits << 64) | u128::from(!other),
            teredo | (u128::from(other) << 64) | u128::from(!v4.to_bits()),
            (0x2606_4700u128 << 96) | (0x5efeu128 << 32) | bits,
            (0x2606_4700u128 << 96) | (0x0200_5efeu128 << 32) | bits,
        ];
        prop_assert!(!is_public(v4.into()));
        for address in embedded.map(Ipv6Addr::from_bits) {
            prop_assert!(!is_public(address.into()), "{address}");
        }
    }

    #[test]
    fn parsing_a_network_never_panics(text in "\\PC{0,40}") {
        let _ = Network::parse(&text);
    }
}
