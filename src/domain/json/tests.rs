use serde_json::json;

use super::*;

#[test]
fn stored_length_counts_numbers_as_postgresql_writes_them() {
    let cases = [
        ("{}", 2),
        ("[1, 2.5, -3]", 10),
        ("1e308", 309),
        ("-1e308", 310),
        ("1e-5", 7),
        ("123456789012345.0", 17),
        ("1e15", 18),
        ("1e16", 17),
        ("18446744073709551615", 20),
        ("\"a\\u00e9\\n\"", 7),
        ("{\"a\": [1e20, \"1e20\"], \"b\": null}", 45),
    ];
    for (text, size) in cases {
        assert_eq!(stored_len(&serde_json::from_str(text).unwrap()), size, "{text}");
    }
    assert_eq!(stored_len(&json!(1.5e-300)), 303);
}

#[test]
fn compact_text_has_no_whitespace_between_tokens() {
    let cases = [
        ("1", "1"),
        (" [ 1 ,\t2 ]\r\n", "[1,2]"),
        ("{ \"a b\" : \" \\\" x \\\\\" , \"c\" : \"\" }", "{\"a b\":\" \\\" x \\\\\",\"c\":\"\"}"),
        ("\"\u{e9} \u{2003}\"", "\"\u{e9} \u{2003}\""),
    ];
    for (text, expected) in cases {
        assert_eq!((compact(text).as_str(), compact_len(text)), (expected, expected.len()));
    }
}

#[test]
fn canonical_text_equals_the_text_of_the_tree() {
    let texts = [
        "[]",
        "[ {\"b\": 1.0, \"a\": [1e5, {\"d\": 1, \"c\": 2}]}, 7 ]",
        "{\"tasks\": [{\"b\": 1, \"a\": \"\\u00e9\"}], \"scope\": \"x\", \"a\\nb\": null, \"scope\": \"y\"}",
        "{ }",
        "\"text\"",
    ];
    for text in texts {
        let mut written = Vec::new();
        write_canonical(text, &mut written).unwrap();
        let tree: Value = serde_json::from_str(text).unwrap();
        assert_eq!(String::from_utf8(written).unwrap(), tree.to_string());
    }
}

#[test]
fn items_beyond_the_limit_are_counted_but_not_kept() {
    let (kept, count) = items("[1, [2], {\"a\": 3}, 4]", 2).unwrap();
    assert_eq!((kept.iter().map(|item| item.get()).collect::<Vec<_>>(), count), (vec!["1", "[2]"], 4));
    assert_eq!(items("[1]", 2).unwrap().1, 1);
    assert!(items("{}", 2).is_err());
}

#[test]
fn selected_fields_of_an_object_stay_text() {
    let object = Object::read("{\"a\": [1, 2], \"b\": [ 1 ], \"b\": [ 2 ]}", |name| name == "b").unwrap();
    assert_eq!((object.trees["a"].clone(), object.texts["b"].get()), (json!([1, 2]), "[ 2 ]"));
    assert!(Object::read("[]", |_| true).is_err());
}
