-- The barrier in SQLite, for a service in any language. The Python client runs these statements too.
--
-- Each ? is a parameter. postgresql.sql says how to decide with these statements, and what each is for; here is what differs.

-- name: exists
SELECT COUNT(*) FROM sqlite_master WHERE type = 'table' AND name = 'halfway_barrier';

-- name: create
-- SQLite has no type for a time: seconds since 1970, with their fractions.
CREATE TABLE IF NOT EXISTS halfway_barrier (
  transaction_id text PRIMARY KEY,
  outcome text NOT NULL,
  decided_at real NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS halfway_barrier_decided_at ON halfway_barrier (decided_at);

-- name: mark
INSERT INTO halfway_barrier VALUES ('#table', lower(hex(randomblob(4))), 9e9) ON CONFLICT (transaction_id) DO NOTHING;

-- name: read_mark
SELECT outcome FROM halfway_barrier WHERE transaction_id = '#table';

-- name: begin
-- Begins the transaction of a check that inserts. Without a write-ahead log a commit waits for readers; this waits first, and
-- no longer than bound_lock_wait says.
BEGIN EXCLUSIVE;

-- name: insert
INSERT INTO halfway_barrier (transaction_id, outcome) VALUES (?, ?) ON CONFLICT (transaction_id) DO NOTHING;

-- name: look
-- Run bound_lock_wait before it: without a write-ahead log it waits for an open local transaction.
SELECT outcome FROM halfway_barrier WHERE transaction_id = ?;

-- name: read_lock_wait
PRAGMA busy_timeout;

-- name: bound_lock_wait
PRAGMA busy_timeout = 500;

-- name: restore_lock_wait
PRAGMA busy_timeout = {value};

-- name: remove
DELETE FROM halfway_barrier WHERE transaction_id = ?;

-- name: clean
-- Nobody is elected: only one connection can write. SQLite is usually built without LIMIT in a DELETE.
DELETE FROM halfway_barrier WHERE (transaction_id) IN (
  SELECT transaction_id FROM halfway_barrier WHERE decided_at < (julianday('now') - 2440587.5) * 86400.0 - ?
  ORDER BY decided_at LIMIT ?);
