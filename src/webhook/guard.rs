//! Decides which servers outgoing calls may reach: public addresses, and those that `WEBHOOK_ALLOW` lists. The guard
//! checks the address of the connection, however the URL spells it. It must never permit a call by its host name alone
//! unless that name is allowed.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;

use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use url::{Host, Url};

use super::address::{Network, is_public};

/// The hosts and networks of `WEBHOOK_ALLOW`, which calls may reach in addition to the public internet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allow {
    names: Vec<String>,
    /// Each with its leading dot.
    suffixes: Vec<String>,
    networks: Vec<Network>,
}

impl FromStr for Allow {
    type Err = String;

    fn from_str(text: &str) -> Result<Allow, String> {
        let mut allow = Allow::default();
        for entry in text.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
            allow.add(entry).ok_or_else(|| {
                format!(
                    "must be host names, .suffixes, addresses and CIDRs, separated by commas, \
                     such as worker,.internal.example,10.1.2.3,fd00::/8; `{entry}` is none of these"
                )
            })?;
        }
        Ok(allow)
    }
}

impl Allow {
    fn add(&mut self, entry: &str) -> Option<()> {
        if let Some(suffix) = entry.strip_prefix('.') {
            self.suffixes.push(format!(".{}", name(suffix)?));
            return Some(());
        }
        let address = entry.strip_prefix('[').and_then(|inner| inner.strip_suffix(']')).unwrap_or(entry);
        match Network::parse(address) {
            Some(network) => self.networks.push(network),
            None => self.names.push(name(entry)?),
        }
        Some(())
    }

    fn has_name(&self, name: &str) -> bool {
        let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
        self.names.contains(&name) || self.suffixes.iter().any(|suffix| name.ends_with(suffix.as_str()))
    }

    fn has_address(&self, address: IpAddr) -> bool {
        self.networks.iter().any(|network| network.contains(address))
    }
}

/// Normalizes a host name as URL parsing does: lower case, in ASCII. Text that a URL would read as an address is not a
/// host name.
fn name(text: &str) -> Option<String> {
    let Ok(Host::Domain(name)) = Host::parse(text) else { return None };
    let name = name.strip_suffix('.').unwrap_or(&name);
    let label =
        |label: &str| !label.is_empty() && label.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'));
    name.split('.').all(label).then(|| name.to_owned())
}

/// The check of every outgoing call. It is cheap to clone, because the resolver and the client share it.
#[derive(Clone, Debug)]
pub struct Guard(Arc<GuardInner>);

#[derive(Debug)]
struct GuardInner {
    allow: Allow,
    loopback: bool,
}

/// The address or host name that the guard refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RefusedAddress {
    Address(IpAddr),
    /// The error omits the addresses of the name, because the creator of a task must not learn about internal networks.
    Name(String),
}

impl fmt::Display for RefusedAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RefusedAddress::Address(address) => write!(f, "{address} is not an allowed address (WEBHOOK_ALLOW)"),
            RefusedAddress::Name(name) => write!(f, "{name} has no allowed address (WEBHOOK_ALLOW)"),
        }
    }
}

impl std::error::Error for RefusedAddress {}

impl Guard {
    /// `loopback` permits loopback addresses, for a service that only this machine can reach: refusing them would
    /// protect nothing.
    pub fn new(allow: Allow, loopback: bool) -> Guard {
        Guard(Arc::new(GuardInner { allow, loopback }))
    }

    pub fn permits(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        is_public(address) || self.0.loopback && address.is_loopback() || self.0.allow.has_address(address)
    }

    /// Checks an address in the URL itself, which the client connects to without the resolver. The parsed URL holds the
    /// address in one form, however it was written.
    pub fn check(&self, url: &Url) -> Result<(), RefusedAddress> {
        let address = match url.host() {
            Some(Host::Ipv4(address)) => IpAddr::V4(address),
            Some(Host::Ipv6(address)) => IpAddr::V6(address),
            Some(Host::Domain(_)) | None => return Ok(()),
        };
        if self.permits(address) { Ok(()) } else { Err(RefusedAddress::Address(address)) }
    }

    /// Returns the addresses of a name that calls may connect to.
    fn filter(&self, name: &str, addresses: Vec<SocketAddr>) -> Result<Vec<SocketAddr>, RefusedAddress> {
        if self.0.allow.has_name(name) {
            return Ok(addresses);
        }
        let (permitted, refused): (Vec<_>, Vec<_>) =
            addresses.into_iter().partition(|address| self.permits(address.ip()));
        if permitted.is_empty() && !refused.is_empty() {
            tracing::info!(name, ?refused, "webhook host has no allowed address");
            return Err(RefusedAddress::Name(name.to_owned()));
        }
        Ok(permitted)
    }
}

/// The client connects to the addresses returned here. It does not resolve the name a second time, so the answer cannot
/// change between check and connection.
impl Resolve for Guard {
    fn resolve(&self, name: Name) -> Resolving {
        let guard = self.clone();
        Box::pin(async move {
            // reqwest sets the port.
            let addresses: Vec<SocketAddr> = tokio::net::lookup_host((name.as_str(), 0)).await?.collect();
            let permitted: Addrs = Box::new(guard.filter(name.as_str(), addresses)?.into_iter());
            Ok(permitted)
        })
    }
}

#[cfg(test)]
#[path = "tests/guard.rs"]
mod tests;
