use super::*;

fn access(keys: Option<&str>, file: Option<&str>) -> Access {
    Access {
        api_keys: keys.map(|text| Secret::from(text.to_owned())),
        api_keys_file: file.map(PathBuf::from),
        public_paths: Paths::default(),
    }
}

fn keys(text: &str) -> Keys {
    Keys::parse(text).unwrap()
}

fn found(keys: &Keys, key: &str) -> Option<(String, Scope)> {
    keys.find(key.as_bytes()).map(|key| (key.name.clone(), key.scope))
}

#[test]
fn a_key_has_a_name_and_a_scope() {
    let keys = keys("ann:aaa, bob:bbb:read\n\ncid:c=c/c+:admin,ann:second:write");
    assert_eq!(found(&keys, "aaa"), Some(("ann".into(), Scope::Write)), "write is the default");
    assert_eq!(found(&keys, "bbb"), Some(("bob".into(), Scope::Read)));
    assert_eq!(found(&keys, "c=c/c+"), Some(("cid".into(), Scope::Admin)));
    assert_eq!(found(&keys, "second"), Some(("ann".into(), Scope::Write)), "a name may have several keys");
    for unknown in ["", "aa", "aaaa", "AAA", "ann", "ann:aaa", "bbb:read"] {
        assert_eq!(found(&keys, unknown), None, "{unknown}");
    }
    assert_eq!(found(&Keys::default(), ""), None);
}

#[test]
fn scopes_include_the_scopes_before_them() {
    assert!(Scope::Admin > Scope::Write && Scope::Write > Scope::Read);
}

#[test]
fn a_bad_entry_is_named_by_its_number_and_never_shown() {
    let secret = "S3CRET";
    let bad = [
        "S3CRET",
        "ann:",
        ":S3CRET",
        "ann:S3CRET:",
        "ann:S3CRET:root",
        "ann:S3CRET:read:S3CRET",
        "an n:S3CRET",
        "ann:S3 CRET",
        "ann:S3CRETé",
        "ann:admin",
    ];
    for entry in bad {
        let why = access(Some(&format!("ok:fine,{entry}")), None).keys().unwrap_err();
        assert!(why.starts_with("API_KEYS: entry 2 must be name:key or name:key:scope"), "{entry}: {why}");
        assert!(!why.contains(secret) && !why.contains("ann") && why.lines().count() == 1, "{why}");
    }
    let why = access(Some("ann:S3CRET,bob:S3CRET"), None).keys().unwrap_err();
    assert_eq!(why, "API_KEYS: entries 1 and 2 must not have the same key");
}

#[test]
fn nothing_shows_a_key() {
    let all = access(Some("ann:S3CRET"), None);
    let shown = format!("{all:?} {:?}", all.keys().unwrap());
    assert!(!shown.contains("S3CRET"), "{shown}");
    assert!(shown.contains("ann"), "{shown}");
}

#[test]
fn keys_come_from_a_variable_or_a_file() {
    assert!(access(None, None).keys().unwrap().is_empty());
    assert!(access(Some(" "), Some("")).keys().unwrap().is_empty(), "empty is absent");
    let both = access(Some("ann:S3CRET"), Some("/f")).keys().unwrap_err();
    assert_eq!(both, "API_KEYS_FILE=/f: must not be set together with API_KEYS");
    let missing = access(None, Some("/nowhere/keys")).keys().unwrap_err();
    assert!(missing.starts_with("API_KEYS_FILE=/nowhere/keys: must be a readable file"), "{missing}");
    let empty = access(None, Some("/dev/null")).keys().unwrap_err();
    assert_eq!(empty, "API_KEYS_FILE=/dev/null: must not be empty");
}

#[test]
fn short_keys_are_reported_by_name() {
    let keys = keys("ann:0123456789abcde,bob:0123456789abcdef");
    assert_eq!(keys.short().collect::<Vec<_>>(), ["ann"]);
}

#[test]
fn only_named_paths_are_public() {
    let open = paths("/docs, /metrics").unwrap();
    for path in ["/docs", "/docs/", "/docs/index.css", "/metrics"] {
        assert!(open.contain(path), "{path}");
    }
    for path in ["/", "/task", "/docsx", "/openapi.json", "/metricsx", "//docs", ""] {
        assert!(!open.contain(path), "{path}");
    }
    assert!(paths("/").unwrap().contain("/"));
    assert!(!paths("/").unwrap().contain("/task"), "the root is not everything");
    assert_eq!(paths("").unwrap(), Paths::default());
    let refused = "must be some of /, /docs, /metrics, /openapi.json, separated by commas";
    for bad in ["/task", "docs", "/docs,/task", "*"] {
        assert_eq!(paths(bad).unwrap_err(), refused);
    }
}
