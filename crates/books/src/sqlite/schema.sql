-- One row for each thing, as a line of text that whoever looks can read (see text.rs).
CREATE TABLE common (name TEXT NOT NULL PRIMARY KEY, value INTEGER) STRICT, WITHOUT ROWID;
CREATE TABLE buckets (bucket TEXT NOT NULL PRIMARY KEY, policy TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE records (slot TEXT NOT NULL PRIMARY KEY, record TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE lines (
    bucket TEXT NOT NULL,
    owner TEXT NOT NULL,
    line TEXT NOT NULL,
    touched_at_ms INTEGER NOT NULL,
    PRIMARY KEY (bucket, owner)
) STRICT, WITHOUT ROWID;
CREATE TABLE audit (
    id INTEGER PRIMARY KEY,
    slot TEXT NOT NULL,
    sandbox TEXT,
    at_ms INTEGER NOT NULL,
    entry TEXT NOT NULL
) STRICT;
CREATE INDEX audit_by_slot ON audit (slot, id);
CREATE INDEX audit_by_sandbox ON audit (sandbox) WHERE sandbox IS NOT NULL;
CREATE INDEX audit_by_time ON audit (at_ms);
