-- Schema 1 as it was, with two leases that stand and one of the past.
CREATE TABLE boot (id TEXT NOT NULL) STRICT;
CREATE TABLE lease (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    root TEXT NOT NULL,
    container TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('reserved', 'active')),
    exclusive INTEGER NOT NULL CHECK (exclusive IN (0, 1)),
    compute_policy TEXT NOT NULL CHECK (compute_policy IN ('fixed', 'burst', 'none')),
    priority INTEGER NOT NULL CHECK (priority BETWEEN 0 AND 9),
    pid INTEGER NOT NULL CHECK (pid > 0),
    start_time INTEGER NOT NULL,
    cgroup TEXT,
    granted_at INTEGER NOT NULL,
    UNIQUE (root, container)
) STRICT;
CREATE TABLE granted (
    lease INTEGER NOT NULL REFERENCES lease (id) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    gpu TEXT NOT NULL,
    memory INTEGER NOT NULL CHECK (memory > 0),
    cores INTEGER CHECK (cores BETWEEN 1 AND 100),
    exclusive INTEGER NOT NULL CHECK (exclusive IN (0, 1)),
    PRIMARY KEY (lease, position)
) STRICT, WITHOUT ROWID;
CREATE INDEX granted_by_gpu ON granted (gpu, memory, cores, exclusive);
CREATE TABLE past (
    id INTEGER PRIMARY KEY,
    root TEXT NOT NULL,
    container TEXT NOT NULL,
    grants TEXT NOT NULL,
    granted_at INTEGER NOT NULL,
    released_at INTEGER NOT NULL,
    reason TEXT NOT NULL
) STRICT;
INSERT INTO boot VALUES ('{BOOT}');
INSERT INTO sqlite_sequence (name, seq) VALUES ('lease', {LEASES});
INSERT INTO lease VALUES (7, '/run/runc', 'running', 'active', 0, 'burst', 7, {PID}, {START}, '/cgroup', 3);
INSERT INTO lease VALUES (8, '/run/runc', 'starting', 'reserved', 0, 'burst', 7, {PID}, {START}, '/cgroup', 3);
INSERT INTO granted VALUES (7, 0, '{GPU}', 4294967296, 30, 0);
INSERT INTO granted VALUES (8, 0, '{GPU}', 4294967296, 30, 0);
INSERT INTO past VALUES (5, '/run/runc', 'before', 'GPU: 1 GiB', 1, 2, 'ended');
PRAGMA application_id = 1735422824;
PRAGMA user_version = 1;
