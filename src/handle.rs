//! Handles: the URLs that workers report to, with tokens that replace an API key. A token is valid for one run of one
//! task. The signing key must never be shown; where it is stored is not known here.

use std::fmt;
use std::fmt::Write;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use subtle::ConstantTimeEq;
use uuid::Uuid;

/// The key that all instances sign tokens with. It allows reports for every task.
#[derive(Clone)]
pub struct SigningKey([u8; SigningKey::LENGTH]);

impl SigningKey {
    pub const LENGTH: usize = 32;

    pub fn new(bytes: [u8; SigningKey::LENGTH]) -> SigningKey {
        SigningKey(bytes)
    }

    /// The token of a run: 64 hexadecimal digits, which need no escaping in a URL.
    pub fn token(&self, task: Uuid, run: i32) -> String {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes a key of any length");
        // All parts have a fixed length, so no two runs are signed as the same bytes. The prefix leaves room for other
        // uses.
        mac.update(b"handle");
        mac.update(task.as_bytes());
        mac.update(&run.to_be_bytes());
        let mut token = String::with_capacity(64);
        for byte in mac.finalize().into_bytes() {
            let _ = write!(token, "{byte:02x}");
        }
        token
    }

    /// Whether `token` is the token of this run. Compares in constant time.
    pub fn accepts(&self, task: Uuid, run: i32, token: &str) -> bool {
        self.token(task, run).as_bytes().ct_eq(token.as_bytes()).into()
    }
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SigningKey(…)")
    }
}

/// Makes the handles that Reprise sends to workers.
#[derive(Clone, Debug)]
pub struct Handles {
    host_url: String,
    secret: SigningKey,
}

impl Handles {
    pub fn new(host_url: String, secret: SigningKey) -> Handles {
        Handles { host_url, secret }
    }

    /// The handle of a run.
    pub fn of(&self, task: Uuid, run: i32) -> String {
        format!("{}/task/{task}?run={run}&token={}", self.host_url, self.secret.token(task, run))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TASK: Uuid = Uuid::from_u128(1);

    #[test]
    fn a_token_is_valid_for_its_task_and_run_only() {
        let secret = SigningKey::new([7; 32]);
        let token = secret.token(TASK, 3);
        assert!(secret.accepts(TASK, 3, &token));
        assert!(!secret.accepts(TASK, 4, &token), "another run");
        assert!(!secret.accepts(Uuid::from_u128(2), 3, &token), "another task");
        assert!(!SigningKey::new([8; 32]).accepts(TASK, 3, &token), "another secret");
        for wrong in ["", "0", &token[1..], &format!("{token}0"), &token.to_uppercase()] {
            assert!(!secret.accepts(TASK, 3, wrong), "{wrong}");
        }
    }

    /// The expected value was computed independently. Instances of several versions share a database, so it must not
    /// change.
    #[test]
    fn a_token_is_an_hmac_of_task_and_run() {
        let token = SigningKey::new([7; 32]).token(TASK, 3);
        assert_eq!(token, "3ca7734758db72a08b860ec6f4e1bf374ce438556635d7e7267be74ac29bb69e");
    }

    #[test]
    fn a_handle_is_a_url_and_the_secret_is_not_shown() {
        let secret = SigningKey::new([7; 32]);
        let handles = Handles::new("http://h".into(), secret.clone());
        assert_eq!(handles.of(TASK, 2), format!("http://h/task/{TASK}?run=2&token={}", secret.token(TASK, 2)));
        assert!(!format!("{handles:?}").contains('7'));
    }
}
