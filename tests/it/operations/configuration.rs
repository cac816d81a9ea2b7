//! Compares docs/configuration.md with the command line: the tables hold the same settings under the same headings and in
//! the same order, with the same defaults and ranges, and every command is listed.

use clap::{Arg, Command, CommandFactory};
use reprise::config::Cli;

const MANUAL: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/configuration.md"));

/// A line of the tables, without backticks.
struct Row {
    setting: Setting,
    range: String,
}

/// A setting as both sides know it.
#[derive(Debug, PartialEq)]
struct Setting {
    heading: String,
    variable: String,
    default: String,
}

#[test]
fn the_manual_lists_every_setting_with_its_default_and_range() {
    let command = Cli::command();
    let args: Vec<&Arg> = command.get_arguments().filter(|arg| arg.get_env().is_some()).collect();
    let rows = rows();
    let documented: Vec<&str> = rows.iter().map(|row| row.setting.variable.as_str()).collect();
    let known: Vec<&str> = args.iter().map(|arg| variable(arg)).collect();
    assert_eq!(documented, known, "docs/configuration.md against --help");
    for (row, arg) in rows.iter().zip(args) {
        assert_eq!(row.setting, setting(arg), "docs/configuration.md against --help");
        let refusal = refusal(&command, arg);
        assert!(is_range_of(&row.range, refusal.as_deref()), "{}: {}: {refusal:?}", variable(arg), row.range);
    }
}

#[test]
fn the_manual_lists_every_command() {
    for command in Cli::command().get_subcommands() {
        let name = command.get_name();
        assert!(MANUAL.contains(&format!("`reprise {name}`")), "{name} is not in docs/configuration.md");
    }
}

/// Reads the tables below "Settings".
fn rows() -> Vec<Row> {
    let (_, rest) = MANUAL.split_once("\n## Settings\n").unwrap();
    let (settings, _) = rest.split_once("\n## ").unwrap();
    let mut heading = "";
    let mut rows = Vec::new();
    for line in settings.lines() {
        heading = line.strip_prefix("### ").unwrap_or(heading);
        if !line.starts_with("| `") {
            continue;
        }
        let cells: Vec<String> = line.split('|').map(|cell| cell.trim().replace('`', "")).collect();
        let [_, variable, default, range, meaning, _] = &cells[..] else { panic!("not four columns: {line}") };
        assert!(!range.is_empty() && !meaning.is_empty(), "{variable} has an empty column");
        let setting = Setting { heading: heading.into(), variable: variable.clone(), default: default.clone() };
        rows.push(Row { setting, range: range.clone() });
    }
    rows
}

fn variable(arg: &Arg) -> &str {
    arg.get_env().and_then(|name| name.to_str()).unwrap()
}

fn setting(arg: &Arg) -> Setting {
    let default: String = arg.get_default_values().iter().filter_map(|value| value.to_str()).collect();
    let default = Some(default).filter(|text| !text.is_empty()).or_else(|| described_default(arg));
    Setting {
        heading: arg.get_help_heading().unwrap_or_default().into(),
        variable: variable(arg).into(),
        default: default.unwrap_or_else(|| "none".into()),
    }
}

/// The `[default: …]` in the help text of a setting whose default is not a constant.
fn described_default(arg: &Arg) -> Option<String> {
    let help = arg.get_help()?.to_string();
    let (_, default) = help.split_once("[default: ")?;
    Some(default.split_once(']')?.0.replace('`', ""))
}

/// The message that refuses a bad value, `None` for settings that take any text.
fn refusal(command: &Command, arg: &Arg) -> Option<String> {
    let flag = format!("--{}", arg.get_long().unwrap());
    let error = command.clone().try_get_matches_from(["reprise", &flag, "?="]).err()?;
    Some(std::error::Error::source(&error).unwrap().to_string())
}

/// Whether the table and the message allow the same. The table adds the unit to the range of a number; a message may add
/// an example to any other rule.
fn is_range_of(range: &str, refusal: Option<&str>) -> bool {
    let Some(refusal) = refusal else { return !range.contains('–') };
    match refusal.strip_prefix("must be a whole number from ") {
        Some(numbers) => range.split_once(", ").is_some_and(|(_, range)| range == numbers.replace(" to ", "–")),
        None => refusal.contains(range),
    }
}
