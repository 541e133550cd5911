CREATE TABLE tenants (
    namespace TEXT NOT NULL,
    env TEXT NOT NULL,
    created_at_ms INTEGER NOT NULL,
    PRIMARY KEY (namespace, env)
) STRICT, WITHOUT ROWID;

CREATE TABLE api_keys (
    id TEXT NOT NULL PRIMARY KEY,
    digest TEXT NOT NULL UNIQUE,
    namespace TEXT NOT NULL,
    env TEXT NOT NULL,
    role TEXT NOT NULL CHECK (role IN ('member', 'admin')),
    name TEXT NOT NULL,
    hint TEXT NOT NULL,
    created_at_ms INTEGER NOT NULL,
    last_used_at_ms INTEGER,
    revoked_at_ms INTEGER,
    FOREIGN KEY (namespace, env) REFERENCES tenants (namespace, env)
) STRICT, WITHOUT ROWID;

CREATE INDEX api_keys_by_bucket ON api_keys (namespace, env);

CREATE TABLE idempotency (
    namespace TEXT NOT NULL,
    env TEXT NOT NULL,
    key TEXT NOT NULL,
    fingerprint BLOB NOT NULL,
    generation INTEGER NOT NULL,
    request TEXT NOT NULL,
    claimed_at_ms INTEGER NOT NULL,
    claimed_until_ms INTEGER NOT NULL,
    expires_at_ms INTEGER NOT NULL,
    sandbox TEXT,
    PRIMARY KEY (namespace, env, key)
) STRICT, WITHOUT ROWID;

CREATE INDEX idempotency_by_expiry ON idempotency (expires_at_ms);

-- The newest generation given out. It outlives the records, so that none is given out twice.
CREATE TABLE counters (
    name TEXT NOT NULL PRIMARY KEY,
    value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE secrets (
    name TEXT NOT NULL PRIMARY KEY,
    value BLOB NOT NULL
) STRICT, WITHOUT ROWID;
