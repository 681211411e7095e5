-- Schema 4 as it was, with two leases that stand and one of the past.
CREATE TABLE boot (id TEXT NOT NULL, namespaces TEXT NOT NULL) STRICT;
CREATE UNIQUE INDEX boot_by_id ON boot (id);
CREATE TABLE lease (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    root TEXT NOT NULL,
    sandbox TEXT,
    pod_request TEXT,
    former TEXT NOT NULL,
    exclusive INTEGER NOT NULL CHECK (exclusive IN (0, 1)),
    compute_policy TEXT NOT NULL CHECK (compute_policy IN ('fixed', 'burst', 'none')),
    ceiling INTEGER NOT NULL CHECK (ceiling BETWEEN 1 AND 100),
    priority INTEGER NOT NULL CHECK (priority BETWEEN 0 AND 9),
    granted_at INTEGER NOT NULL
) STRICT;
CREATE UNIQUE INDEX lease_by_pod ON lease (root, sandbox) WHERE pod_request IS NOT NULL;
CREATE TABLE member (
    id INTEGER PRIMARY KEY,
    lease INTEGER NOT NULL REFERENCES lease (id) ON DELETE CASCADE,
    root TEXT NOT NULL,
    container TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('reserved', 'active')),
    pid INTEGER NOT NULL CHECK (pid > 0),
    start_time INTEGER NOT NULL,
    cgroup TEXT,
    leads INTEGER NOT NULL DEFAULT 0 CHECK (leads IN (0, 1)),
    UNIQUE (root, container)
) STRICT;
CREATE INDEX member_by_lease ON member (lease);
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
    others TEXT NOT NULL,
    grants TEXT NOT NULL,
    granted_at INTEGER NOT NULL,
    released_at INTEGER NOT NULL,
    reason TEXT NOT NULL
) STRICT;
INSERT INTO boot VALUES ('{BOOT}', '{NAMESPACES}');
INSERT INTO sqlite_sequence (name, seq) VALUES ('lease', {LEASES});
INSERT INTO lease VALUES (7, '/run/runc', NULL, NULL, '', 0, 'burst', 60, 7, 3);
INSERT INTO member VALUES (7, 7, '/run/runc', 'running', 'active', {PID}, {START}, '/cgroup', 0);
INSERT INTO lease VALUES (8, '/run/runc', NULL, NULL, '', 0, 'burst', 60, 7, 3);
INSERT INTO member VALUES (8, 8, '/run/runc', 'starting', 'reserved', {PID}, {START}, '/cgroup', 0);
INSERT INTO granted VALUES (7, 0, '{GPU}', 4294967296, 30, 0);
INSERT INTO granted VALUES (8, 0, '{GPU}', 4294967296, 30, 0);
INSERT INTO past VALUES (5, '/run/runc', 'before', '', 'GPU: 1 GiB', 1, 2, 'ended');
PRAGMA application_id = 1735422824;
PRAGMA user_version = 4;
