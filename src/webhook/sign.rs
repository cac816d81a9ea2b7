//! Signs outgoing calls as Standard Webhooks specifies: an HMAC over the id, the time and the exact bytes of the body.
//! Errors and debug output must never contain a secret.

use std::fmt;
use std::sync::Arc;

use base64::Engine as _;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig, general_purpose::STANDARD};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// Accepts secrets with and without padding, because both are in use.
const LENIENT: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// The minimum length of a secret in bytes, by Standard Webhooks.
pub const SHORTEST: usize = 24;

/// The signing secrets. Every secret signs each call, so that receivers can switch from one secret to the next at any
/// time.
#[derive(Clone, Default)]
pub struct Signer {
    keys: Arc<[Hmac<Sha256>]>,
    shortest: Option<usize>,
}

impl fmt::Debug for Signer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Signer({} secrets)", self.keys.len())
    }
}

impl Signer {
    /// Parses secrets of the form `whsec_<base64>`, separated by commas. An error names a bad secret by its number.
    pub fn parse(text: &str) -> Result<Signer, String> {
        let mut keys = Vec::new();
        let mut shortest = None;
        let secrets = text.split(',').map(str::trim).filter(|secret| !secret.is_empty());
        for (i, secret) in secrets.enumerate() {
            let key = secret.strip_prefix("whsec_").and_then(|base64| LENIENT.decode(base64).ok());
            let key = key.filter(|key| !key.is_empty()).ok_or_else(|| {
                format!("must be secrets of the form whsec_<base64>, separated by commas; number {} is not", i + 1)
            })?;
            shortest = Some(shortest.map_or(key.len(), |other: usize| other.min(key.len())));
            keys.push(Hmac::new_from_slice(&key).map_err(|_| format!("number {} is not a valid HMAC key", i + 1))?);
        }
        Ok(Signer { keys: keys.into(), shortest })
    }

    /// Returns the length of the shortest secret in bytes, or `None` without secrets.
    pub fn shortest(&self) -> Option<usize> {
        self.shortest
    }

    /// Whether any secret is configured.
    pub fn signs(&self) -> bool {
        !self.keys.is_empty()
    }

    /// Returns the value of the header `webhook-signature`, or `None` without secrets.
    pub fn sign(&self, id: &str, timestamp: u64, body: &[u8]) -> Option<String> {
        let signatures: Vec<String> = self
            .keys
            .iter()
            .map(|key| {
                let mac = key.clone().chain_update(format!("{id}.{timestamp}.")).chain_update(body);
                format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes()))
            })
            .collect();
        (!signatures.is_empty()).then(|| signatures.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reqwest::header::{HeaderMap, HeaderValue};
    use standardwebhooks::Webhook;

    const FIRST: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    const SECOND: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";

    #[test]
    fn the_signature_matches_the_example_of_standard_webhooks() {
        let signer = Signer::parse(FIRST).unwrap();
        let signature = signer.sign("msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, br#"{"test": 2432232314}"#);
        assert_eq!(signature.unwrap(), "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
    }

    #[test]
    fn receivers_with_either_secret_accept_the_signature() {
        let signer = Signer::parse(&format!("{FIRST}, {SECOND}")).unwrap();
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
        for body in [&b""[..], b"{}", "{\"a\":\"\u{e9}\"}".as_bytes()] {
            let mut headers = HeaderMap::new();
            let signature = signer.sign("id:start:success:0", now, body).unwrap();
            assert_eq!(signature.split(' ').count(), 2);
            headers.insert("webhook-id", HeaderValue::from_static("id:start:success:0"));
            headers.insert("webhook-timestamp", HeaderValue::from(now));
            headers.insert("webhook-signature", signature.parse().unwrap());
            for secret in [FIRST, SECOND] {
                let receiver = Webhook::new(secret).unwrap();
                receiver.verify(body, &headers).unwrap();
                assert!(receiver.verify(b"another", &headers).is_err());
            }
            assert!(Webhook::new("whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA").unwrap().verify(body, &headers).is_err());
        }
    }

    #[test]
    fn calls_are_not_signed_without_secrets() {
        for text in ["", " , "] {
            let signer = Signer::parse(text).unwrap();
            assert_eq!((signer.sign("id", 1, b""), signer.shortest()), (None, None));
        }
    }

    #[test]
    fn errors_and_debug_output_contain_no_secret() {
        for text in
            ["hunter22", "whsec_", "whsec_hunter22!", "whsec_MfKQ9r8G,hunter22", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"]
        {
            let said = Signer::parse(text).unwrap_err();
            assert!(said.starts_with("must be secrets of the form whsec_<base64>"), "{said}");
            assert!(!said.contains("hunter") && !said.contains("MfKQ"), "{said}");
        }
        let signer = Signer::parse("whsec_MfKQ9r8G,whsec_YQ").unwrap();
        assert_eq!((format!("{signer:?}").as_str(), signer.shortest()), ("Signer(2 secrets)", Some(1)));
    }
}
