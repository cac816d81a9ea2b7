use super::*;

fn parse_args(args: &[&str]) -> Result<Cli, String> {
    let all = std::iter::once(&"reprise").chain(args);
    Cli::try_parse_from(all).map_err(|e| one_line(&e)).and_then(|cli| cli.config.validate().map(|()| cli))
}

#[test]
fn an_error_about_an_argument_is_one_line() {
    let cases = [
        (&["bench", "--sink", "here"][..], "--sink here: must be an IP address with a port, such as 127.0.0.1:0"),
        (&["bench", "--filled", "many"], "--filled many: must be a whole number from 0 to 1000000000"),
        (&["bench", "--key", "x"], "the following required arguments were not provided: --url <URL>"),
        (&["bench", "--fast"], "unexpected argument '--fast' found"),
    ];
    for (args, line) in cases {
        assert_eq!(parse_args(args).unwrap_err(), line);
    }
}

#[test]
fn an_error_about_a_setting_is_one_line_that_says_what_is_allowed() {
    let cases = [
        (["--port", "http"], "PORT=http: must be a whole number from 0 to 65535"),
        (["--worker-loop-interval-ms", "1"], "WORKER_LOOP_INTERVAL_MS=1: must be a whole number from 10 to 3600000"),
        (["--auto-migrate", "yes"], "AUTO_MIGRATE=yes: must be 0, 1, true or false"),
        (["--dead-end-cancel", "on"], "DEAD_END_CANCEL=on: must be 0, 1, true or false"),
        (["--host-url", "ftp://x"], "HOST_URL=ftp://x: must be an http or https URL without a query"),
        (["--bind-addr", "localhost"], "BIND_ADDR=localhost: must be an IP address"),
        (["--log-format", "xml"], "LOG_FORMAT=xml: must be text or json"),
        (
            ["--webhook-allow", "worker,10.0.0.0/33"],
            "WEBHOOK_ALLOW=worker,10.0.0.0/33: must be host names, .suffixes, addresses and CIDRs, separated by \
             commas, such as worker,.internal.example,10.1.2.3,fd00::/8; `10.0.0.0/33` is none of these",
        ),
        (
            ["--webhook-signing-secrets", "hunter22"],
            "WEBHOOK_SIGNING_SECRETS: must be secrets of the form whsec_<base64>, separated by commas; number 1 is \
             not",
        ),
        (
            ["--webhook-signing-secrets-file", "/nowhere/at/all"],
            "WEBHOOK_SIGNING_SECRETS_FILE=/nowhere/at/all: must be a readable file: No such file or directory (os \
             error 2)",
        ),
        (
            ["--public-paths", "/task"],
            "PUBLIC_PATHS=/task: must be some of /, /docs, /metrics, /openapi.json, separated by commas",
        ),
        (
            ["--webhook-retry-base-ms", "400000"],
            "WEBHOOK_RETRY_BASE_MS=400000: must not exceed WEBHOOK_RETRY_MAX_MS (300000)",
        ),
    ];
    for (args, line) in cases {
        assert_eq!(parse_args(&args).unwrap_err(), line);
    }
}

#[test]
fn a_database_url_or_another_address_is_not_local() {
    assert!(parse_args(&[]).unwrap().config.is_local());
    assert!(!parse_args(&["--database-url", "postgres://x/y"]).unwrap().config.is_local());
    assert!(!parse_args(&["--bind-addr", "0.0.0.0"]).unwrap().config.is_local());
}

#[test]
fn secrets_come_from_a_variable_or_a_file() {
    let file = std::env::temp_dir().join(format!("reprise-secrets-{}", std::process::id()));
    let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    let path = file.to_str().unwrap();
    let from_file = ["--webhook-signing-secrets-file", path];
    std::fs::write(&file, format!("\n{secret}\n")).unwrap();
    let config = parse_args(&from_file).unwrap().config;
    assert_eq!(config.signer().unwrap().shortest(), Some(24));
    let both = [from_file[0], path, "--webhook-signing-secrets", secret];
    let error = parse_args(&both).unwrap_err();
    assert_eq!(
        error,
        format!("WEBHOOK_SIGNING_SECRETS_FILE={path}: must not be set together with WEBHOOK_SIGNING_SECRETS")
    );
    std::fs::write(&file, "\n").unwrap();
    assert!(parse_args(&from_file).unwrap_err().ends_with("must not be empty"));
    std::fs::remove_file(&file).unwrap();
    let config = parse_args(&both[2..]).unwrap().config;
    assert!(!format!("{config:?}").contains("MfKQ"), "not in a log either");
}

#[test]
fn without_keys_the_address_must_be_loopback() {
    let keys = |args: &[&str]| parse_args(args).unwrap().config.keys();
    for address in ["127.0.0.1", "127.3.2.1", "::1"] {
        assert!(keys(&["--bind-addr", address]).unwrap().is_empty());
    }
    for address in ["0.0.0.0", "::", "10.0.0.1"] {
        let refused = keys(&["--bind-addr", address]).unwrap_err();
        assert!(refused.starts_with(&format!("BIND_ADDR={address}: must be a loopback address")), "{refused}");
        assert!(keys(&["--bind-addr", address, "--api-keys", "ann:secret"]).is_ok());
    }
}

#[test]
fn settings_have_the_documented_defaults() {
    let config = parse_args(&[]).unwrap().config;
    assert_eq!(config.http.port, 8085);
    assert_eq!(config.loops.worker_claim_timeout_secs, 30);
    assert_eq!(config.webhook.webhook_max_attempts, 12);
    assert_eq!(config.limits().retry.max_retries, 10);
    assert!(config.database.auto_migrate);
}
