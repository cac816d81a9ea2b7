//! Which hosts are ours. As long as there are no API keys, a request for any other host is refused: a web page can let its
//! own name point to this machine and would then speak to the service from the browser of whoever reads it.

use std::net::IpAddr;

use axum::extract::Request;
use axum::http::header::HOST;
use axum::http::{StatusCode, Version};
use url::{Host, Url};

use super::Problem;

/// The hosts that are ours beside those of every loopback.
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

    /// Refuses a request that is meant for somebody else.
    pub fn check(&self, request: &Request) -> Result<(), Problem> {
        let headers = request.headers().get_all(HOST);
        let named: Option<Vec<&str>> = headers.iter().map(|value| value.to_str().ok()).collect();
        let mut named = named.ok_or_else(|| foreign("that"))?;
        if named.is_empty() && request.version() != Version::HTTP_10 {
            return Err(Problem::invalid(vec!["Host: is required".into()]));
        }
        named.extend(request.uri().authority().map(axum::http::uri::Authority::as_str));
        named.into_iter().find(|name| !self.are_ours(name)).map_or(Ok(()), |name| Err(foreign(name)))
    }

    fn are_ours(&self, authority: &str) -> bool {
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

fn foreign(name: &str) -> Problem {
    let name: String = name.chars().take(100).collect();
    Problem::new(
        StatusCode::MISDIRECTED_REQUEST,
        format!(
            "Host: \"{name}\" is not this service; without API keys it answers to localhost, BIND_ADDR and HOST_URL"
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ours_are_loopbacks_and_what_was_configured() {
        let hosts = Hosts::new("127.0.0.2".parse().unwrap(), Some("https://Tasks.example.org:8443/reprise"));
        let ours = [
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
        for host in ours {
            assert!(hosts.are_ours(host), "{host}");
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
            assert!(!hosts.are_ours(host), "{host}");
        }
        let elsewhere = Hosts::new("10.1.2.3".parse().unwrap(), None);
        assert!(elsewhere.are_ours("10.1.2.3:8085") && !elsewhere.are_ours("10.1.2.4"));
    }
}
