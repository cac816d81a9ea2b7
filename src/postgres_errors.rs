//! Names the settings of the service in errors of the private PostgreSQL, which knows none of them.

use private_postgres::Error;

/// Describes an error in one line that names the setting to change.
pub fn explain(error: &Error) -> String {
    match error {
        Error::BinDir { path, reason } => format!("POSTGRES_BIN_DIR={}: {reason}", path.display()),
        Error::DataDir { .. } | Error::Initdb { .. } | Error::Start { .. } => format!("{error} (REPRISE_DATA_DIR)"),
        Error::Unreachable { .. } | Error::NotACluster { .. } | Error::Locked { .. } => {
            format!("{error}, or set another REPRISE_DATA_DIR")
        }
        Error::Version { .. } => format!("{error}, set POSTGRES_BIN_DIR to it, or set another REPRISE_DATA_DIR"),
        Error::User { .. } | Error::SocketDir => format!("{error}, or set DATABASE_URL"),
        Error::NoBinaries { .. } => format!("{error}, set DATABASE_URL, or run `docker compose up`"),
        Error::Orphan { .. } | Error::Gone { .. } => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_setting_to_change() {
        let cases = [
            (
                Error::BinDir { path: "/nowhere".into(), reason: "`postgres` is missing".into() },
                "POSTGRES_BIN_DIR=/nowhere: `postgres` is missing",
            ),
            (
                Error::NotACluster { path: "/srv/pgdata".into() },
                "/srv/pgdata is not empty and not a PostgreSQL cluster: move it away, or set another REPRISE_DATA_DIR",
            ),
            (
                Error::Version { path: "/srv".into(), cluster: 15, found: "18.4".into() },
                "the data directory /srv needs PostgreSQL 15 (found: 18.4): install PostgreSQL 15, set POSTGRES_BIN_DIR to \
                 it, or set another REPRISE_DATA_DIR",
            ),
        ];
        for (error, line) in cases {
            assert_eq!(explain(&error), line);
        }
    }
}
