//! What the guard permits: all spellings of an address, host names that are allowed, and the syntax of `WEBHOOK_ALLOW`.
//! No test uses the network.

use std::net::SocketAddr;

use proptest::prelude::*;
use url::Url;

use super::{Allow, Guard, RefusedAddress};

fn guard(allow: &str) -> Guard {
    Guard::new(allow.parse().unwrap(), false)
}

fn check(guard: &Guard, url: &str) -> bool {
    guard.check(&Url::parse(url).unwrap()).is_ok()
}

#[test]
fn every_spelling_of_a_forbidden_address_is_refused() {
    let guard = guard("");
    let refused = [
        "http://127.0.0.1/",
        "http://127.1/",
        "http://127.0.1/",
        "http://2130706433/",
        "http://0x7f000001/",
        "http://0x7f.1/",
        "http://0177.0.0.1/",
        "http://017700000001/",
        "http://127.0.0.1./",
        "http://127.0.0.0x1/",
        "http://%31%32%37.0.0.1/",
        "http://１２７.０.０.１/",
        "http://127。0。0。1/",
        "http://user@127.0.0.1/",
        "http://8.8.8.8@127.0.0.1/",
        "http:\\\\127.0.0.1/",
        "http:127.0.0.1/",
        "http://0/",
        "http://0.0.0.0/",
        "http://10.1/",
        "http://169.254.169.254/latest/meta-data/",
        "http://0xa9fea9fe/",
        "http://[::1]/",
        "http://[::]/",
        "http://[0:0:0:0:0:0:0:1]/",
        "http://[::ffff:127.0.0.1]/",
        "http://[::ffff:7f00:1]/",
        "http://[0:0:0:0:0:ffff:7f00:1]/",
        "http://[::127.0.0.1]/",
        "http://[64:ff9b::7f00:1]/",
        "http://[64:ff9b:1::a00:1]/",
        "http://[2002:7f00:1::]/",
        "http://[fe80::1]/",
        "http://[fd00:ec2::254]/",
    ];
    for url in refused {
        assert!(!check(&guard, url), "{url}");
    }
    for url in ["http://8.8.8.8/", "http://[2606:4700::1111]/", "http://[::ffff:8.8.8.8]/", "http://134744072/"] {
        assert!(check(&guard, url), "{url}");
    }
    assert!(Url::parse("http://[fe80::1%25eth0]/").is_err(), "a URL has no zones");
    let error = guard.check(&Url::parse("http://0xa.1/").unwrap()).unwrap_err();
    assert_eq!(error.to_string(), "10.0.0.1 is not an allowed address (WEBHOOK_ALLOW)");
}

#[test]
fn listed_addresses_and_ranges_are_allowed() {
    let guard = guard(" 10.1.2.3 , 192.168.0.0/16,[::1], fd00::/8,");
    for url in
        ["http://10.1.2.3/", "http://192.168.9.9/", "http://[::1]/", "http://[fd12::1]/", "http://[::ffff:10.1.2.3]/"]
    {
        assert!(check(&guard, url), "{url}");
    }
    // 10.1.2.3 behind a NAT64 gateway is a different host.
    for url in ["http://10.1.2.4/", "http://127.0.0.1/", "http://[fe80::1]/", "http://[64:ff9b::10.1.2.3]/"] {
        assert!(!check(&guard, url), "{url}");
    }
}

#[test]
fn the_loopback_setting_allows_loopback_addresses_only() {
    let local = Guard::new(Allow::default(), true);
    for url in ["http://127.0.0.1/", "http://127.9.9.9/", "http://[::1]/", "http://[::ffff:127.0.0.1]/"] {
        assert!(check(&local, url), "{url}");
    }
    for url in ["http://0.0.0.0/", "http://10.0.0.1/", "http://[64:ff9b::7f00:1]/", "http://[::127.0.0.1]/"] {
        assert!(!check(&local, url), "{url}");
    }
}

#[test]
fn only_allowed_names_resolve_to_private_addresses() {
    let at = |text: &str| -> SocketAddr { text.parse().unwrap() };
    let (public, private, metadata) = (at("8.8.8.8:0"), at("10.0.0.1:0"), at("[::ffff:169.254.169.254]:0"));
    let all = vec![private, public, metadata];
    let guard = guard("db, .Corp.Example, BÜCHER.example");
    assert_eq!(guard.filter("www.example", all.clone()), Ok(vec![public]));
    assert_eq!(guard.filter("www.example", vec![private, metadata]), Err(RefusedAddress::Name("www.example".into())));
    assert_eq!(guard.filter("www.example", vec![]), Ok(vec![]), "the resolver reports a name without addresses");
    for name in ["db", "DB", "db.", "a.corp.example", "a.b.corp.example.", "xn--bcher-kva.example"] {
        assert_eq!(guard.filter(name, all.clone()), Ok(all.clone()), "{name}");
    }
    for name in ["corp.example", "evilcorp.example", "a.corp.example.evil", "db.example", "xdb"] {
        assert_eq!(guard.filter(name, all.clone()), Ok(vec![public]), "{name}");
    }
    let told = RefusedAddress::Name("internal".into()).to_string();
    assert_eq!(told, "internal has no allowed address (WEBHOOK_ALLOW)");
}

#[test]
fn malformed_entries_of_webhook_allow_are_refused() {
    for entry in [
        ".",
        "..",
        "a..b",
        "*.example",
        "*",
        "http://x",
        "host:80",
        "10.0.0.0/33",
        "1.2.3.4.5",
        "a b",
        "[::1",
        "::1%lo",
        "x/8",
        "0x7f.1",
        "127.1",
        ".127.0.0.1",
        ".10.0.0.0/8",
        "a@b",
        "a,*",
    ] {
        let said = entry.parse::<Allow>().unwrap_err();
        assert!(said.starts_with("must be host names, .suffixes, addresses and CIDRs"), "{entry}: {said}");
    }
    assert_eq!("".parse::<Allow>(), Ok(Allow::default()));
    assert_eq!(" , ".parse::<Allow>(), Ok(Allow::default()));
}

proptest! {
    #[test]
    fn errors_about_webhook_allow_are_one_line(text in "(\\PC|[.,:/%\\[\\]0-9a-f]){0,60}") {
        if let Err(said) = text.parse::<Allow>() {
            prop_assert!(!said.contains('\n'));
        }
    }

    /// Decimal, hexadecimal, octal and mapped hosts are all checked as the IPv4 address they denote.
    #[test]
    fn numeric_hosts_are_checked_as_addresses(bits in any::<u32>()) {
        let guard = guard("");
        let address = std::net::Ipv4Addr::from_bits(bits);
        let permitted = guard.permits(address.into());
        for host in [format!("{bits}"), format!("{bits:#x}"), format!("0{bits:o}"), format!("[::ffff:{address}]")] {
            prop_assert_eq!(check(&guard, &format!("http://{host}/")), permitted, "{}", host);
        }
    }
}
