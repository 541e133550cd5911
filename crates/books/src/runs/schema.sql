CREATE TABLE runs (
    run TEXT NOT NULL PRIMARY KEY,
    head TEXT NOT NULL,
    writer TEXT NOT NULL,
    heard_at_ms INTEGER NOT NULL,
    ended_at_ms INTEGER,
    last INTEGER NOT NULL,
    bytes INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX runs_by_end ON runs (ended_at_ms);
CREATE TABLE entries (
    run TEXT NOT NULL,
    id INTEGER NOT NULL,
    kind TEXT NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (run, id)
) STRICT;
