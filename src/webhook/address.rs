//! Tells public internet addresses from all others, independently of any setting. An address that is not known to be
//! public must never count as public.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// A range of addresses in CIDR notation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    base: IpAddr,
    prefix: u8,
}

impl Network {
    /// Parses `address/prefix`, or an address alone as a range of one. Bits after the prefix are ignored.
    pub fn parse(text: &str) -> Option<Network> {
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let base: IpAddr = address.parse().ok()?;
        let bits = if base.is_ipv4() { 32 } else { 128 };
        let prefix = match prefix {
            None => bits,
            // Digits only: other parsers disagree about signs and blanks.
            Some(digits) if digits.bytes().all(|b| b.is_ascii_digit()) => {
                digits.parse().ok().filter(|prefix| *prefix <= bits)?
            }
            Some(_) => return None,
        };
        // `is_public` and the guard compare unmapped addresses, so a range of mapped addresses becomes the range of
        // the IPv4 addresses they carry.
        match base {
            IpAddr::V6(v6) if prefix >= 96 && v6.to_ipv4_mapped().is_some() => {
                Some(Network { base: base.to_canonical(), prefix: prefix - 96 })
            }
            _ => Some(Network { base, prefix }),
        }
    }

    const fn v4(a: u8, b: u8, c: u8, d: u8, prefix: u8) -> Network {
        Network { base: IpAddr::V4(Ipv4Addr::new(a, b, c, d)), prefix }
    }

    const fn v6(a: u16, b: u16, c: u16, prefix: u8) -> Network {
        Network { base: IpAddr::V6(Ipv6Addr::new(a, b, c, 0, 0, 0, 0, 0)), prefix }
    }

    pub fn contains(self, address: IpAddr) -> bool {
        match (self.base, address) {
            (IpAddr::V4(base), IpAddr::V4(address)) => {
                let shift = 32 - u32::from(self.prefix);
                (base.to_bits() ^ address.to_bits()).checked_shr(shift).unwrap_or(0) == 0
            }
            (IpAddr::V6(base), IpAddr::V6(address)) => {
                let shift = 128 - u32::from(self.prefix);
                (base.to_bits() ^ address.to_bits()).checked_shr(shift).unwrap_or(0) == 0
            }
            _ => false,
        }
    }
}

/// The special-purpose ranges of the registries, and ranges that only look public.
const NOT_PUBLIC_V4: [Network; 16] = [
    Network::v4(0, 0, 0, 0, 8),        // "this network"; 0.0.0.0 reaches the machine itself
    Network::v4(10, 0, 0, 0, 8),       // private
    Network::v4(100, 64, 0, 0, 10),    // carrier-grade NAT; some clouds' metadata
    Network::v4(127, 0, 0, 0, 8),      // loopback
    Network::v4(168, 63, 129, 16, 32), // Azure's platform service, reachable from its virtual machines
    Network::v4(169, 254, 0, 0, 16),   // link-local; most clouds' metadata
    Network::v4(172, 16, 0, 0, 12),    // private
    Network::v4(192, 0, 0, 0, 24),     // protocol assignments; Oracle's metadata
    Network::v4(192, 0, 2, 0, 24),     // documentation
    Network::v4(192, 88, 99, 0, 24),   // 6to4 relays, withdrawn
    Network::v4(192, 168, 0, 0, 16),   // private
    Network::v4(198, 18, 0, 0, 15),    // benchmarks
    Network::v4(198, 51, 100, 0, 24),  // documentation
    Network::v4(203, 0, 113, 0, 24),   // documentation
    Network::v4(224, 0, 0, 0, 4),      // multicast
    Network::v4(240, 0, 0, 0, 4),      // reserved, broadcast
];

/// The only IPv6 range that registries assign. Loopback, unique local, link-local, site-local, multicast,
/// IPv4-compatible and local NAT64 addresses are all outside of it.
const GLOBAL_V6: Network = Network::v6(0x2000, 0, 0, 3);

const NOT_PUBLIC_V6: [Network; 3] = [
    Network::v6(0x2001, 0, 0, 23),     // protocol assignments: Teredo, benchmarks, ORCHID
    Network::v6(0x2001, 0xdb8, 0, 32), // documentation
    Network::v6(0x3fff, 0, 0, 20),     // documentation
];

const NAT64: Network = Network::v6(0x64, 0xff9b, 0, 96);
const SIX_TO_FOUR: Network = Network::v6(0x2002, 0, 0, 16);

/// Whether an address belongs to the public internet. An IPv4-mapped address counts as its IPv4 address.
pub fn is_public(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(v4) => is_public_v4(v4),
        IpAddr::V6(v6) => is_public_v6(v6),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    !NOT_PUBLIC_V4.iter().any(|network| network.contains(address.into()))
}

/// An address that carries an IPv4 address is as public as that IPv4 address, because a gateway or a tunnel forwards
/// the call to it.
fn is_public_v6(address: Ipv6Addr) -> bool {
    let ip = IpAddr::V6(address);
    let s = address.segments();
    if NAT64.contains(ip) {
        return is_public_v4(joined(s[6], s[7]));
    }
    if !GLOBAL_V6.contains(ip) || NOT_PUBLIC_V6.iter().any(|network| network.contains(ip)) {
        return false;
    }
    if SIX_TO_FOUR.contains(ip) && !is_public_v4(joined(s[1], s[2])) {
        return false;
    }
    // ISATAP, under any prefix. The bit 0x0200 marks a globally unique IPv4 address.
    let isatap = s[4] & !0x0200 == 0 && s[5] == 0x5efe;
    !isatap || is_public_v4(joined(s[6], s[7]))
}

fn joined(high: u16, low: u16) -> Ipv4Addr {
    Ipv4Addr::from_bits((u32::from(high) << 16) | u32::from(low))
}

#[cfg(test)]
#[path = "tests/address.rs"]
mod tests;
