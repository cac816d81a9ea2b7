//! Protection against DNS rebinding. Without API keys, a request for an unknown host is refused: otherwise a web page
//! could point its own host name at this machine and call the service from its visitor's browser.

use std::net::IpAddr;

use axum::extract::Request;
use axum::http::Version;
use axum::http::header::HOST;
use url::{Host, Url};

use super::{Code, Problem};
use crate::domain::request::problems::ProblemCode;

/// Hosts that a request may name, besides loopback addresses and `localhost`.
#[derive(Clone, Debug, Default)]
pub struct Hosts(Vec<Host>);

impl Hosts {
    pub fn new(bind: IpAddr, host_url: Option<&str>) -> Hosts {
        let bind = match bind {
            IpAddr::V4(ip) => Host::Ipv4(ip),
            IpAddr::V6(ip) => Host::Ipv6(ip),
        };
        let named = host_url.and_then(|url| Some(Url::parse(url).ok()?.host()?.to_owned()));
        Hosts(named.into_iter().chain([bind]).map(without_dot).collect())
    }

    /// Refuses a request whose `Host` header or URL names another host.
    pub fn check(&self, request: &Request) -> Result<(), Problem> {
        let headers = request.headers().get_all(HOST);
        let named: Option<Vec<&str>> = headers.iter().map(|value| value.to_str().ok()).collect();
        let mut named = named.ok_or_else(|| misdirected("(not ASCII)"))?;
        if named.is_empty() && request.version() != Version::HTTP_10 {
            return Err(Problem::field("Host", ProblemCode::Required, "is required"));
        }
        named.extend(request.uri().authority().map(axum::http::uri::Authority::as_str));
        named.into_iter().find(|name| !self.contains(name)).map_or(Ok(()), |name| Err(misdirected(name)))
    }

    fn contains(&self, authority: &str) -> bool {
        if authority.contains(['/', '\\', '@', '?', '#']) {
            return false;
        }
        let url = Url::parse(&format!("http://{authority}/")).ok();
        match url.as_ref().and_then(Url::host).map(|host| without_dot(host.to_owned())) {
            None => false,
            Some(Host::Ipv4(ip)) if ip.is_loopback() => true,
            Some(Host::Ipv6(ip)) if ip.is_loopback() => true,
            Some(Host::Domain(name)) if name == "localhost" => true,
            Some(host) => self.0.contains(&host),
        }
    }
}

fn without_dot(host: Host) -> Host {
    match host {
        Host::Domain(name) => Host::Domain(name.strip_suffix('.').unwrap_or(&name).to_owned()),
        host => host,
    }
}

fn misdirected(name: &str) -> Problem {
    let name: String = name.chars().take(100).collect();
    Problem::new(
        Code::WrongHost,
        format!(
            "Host: \"{name}\" is not this service; without API keys, it must be localhost, a loopback address, or the \
             host of BIND_ADDR or HOST_URL"
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_addresses_and_configured_hosts_are_allowed() {
        let hosts = Hosts::new("127.0.0.2".parse().unwrap(), Some("https://Tasks.example.org:8443/reprise"));
        let allowed = [
            "localhost",
            "LOCALHOST:8085",
            "localhost.",
            "127.0.0.1",
            "127.0.0.1:80",
            "127.255.255.254:1",
            "[::1]",
            "[::1]:8085",
            "tasks.example.org",
            "tasks.example.org:1",
        ];
        for host in allowed {
            assert!(hosts.contains(host), "{host}");
        }
        let foreign = [
            "",
            "x",
            "example.org",
            "localhost.example.org",
            "127.0.0.1.example.org",
            "128.0.0.1",
            "[::2]",
            "[::1",
            "evil@localhost",
            "evil/@localhost",
            "localhost:port",
            "0.0.0.0",
        ];
        for host in foreign {
            assert!(!hosts.contains(host), "{host}");
        }
        let elsewhere = Hosts::new("10.1.2.3".parse().unwrap(), None);
        assert!(elsewhere.contains("10.1.2.3:8085") && !elsewhere.contains("10.1.2.4"));
    }
}
