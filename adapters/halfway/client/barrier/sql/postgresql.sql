-- The barrier in PostgreSQL, for a service in any language. The Python client runs these statements too.
--
-- $1, $2 are the parameters in order. The client writes another table's name for halfway_barrier. A statement runs where its
-- comment says: in the local transaction, or on a connection of its own that commits each statement.
-- After a statement that failed, COMMIT rolls back, and some drivers (node-postgres, Psycopg) report no error: an error that you
-- catch must be raised again, or the answer to COMMIT be compared with 'COMMIT'.
--
-- To decide, which answers a check, run on a connection of its own:
--   1. look: if there is a row, its outcome is the answer. So the same check always gets the same answer.
--   2. If the transaction was prepared longer ago than half the retention of `clean`, answer unknown and write nothing: its
--      row may have been deleted.
--   3. take_place ($1 the id, $2 'rollback'), and commit: a local transaction that comes later fails.
--   4. look again: only a committed row is an answer. If there is none, or a statement failed, answer unknown.

-- name: exists
-- Returns 1 if the table is there. It takes no lock: a lock would wait for open transactions, and hold up others behind it.
SELECT count(to_regclass('halfway_barrier'));

-- name: create
-- The primary key lets one row win. An id is ASCII: "C" compares bytes, whatever the database's locale.
-- clock_timestamp() and not now(), which is when the transaction began: a long one would seem old when it commits.
CREATE TABLE IF NOT EXISTS halfway_barrier (
  transaction_id varchar(128) COLLATE "C" PRIMARY KEY,
  outcome varchar(8) NOT NULL,
  decided_at timestamptz NOT NULL DEFAULT clock_timestamp());
-- For `clean`, which otherwise reads the whole table each time.
CREATE INDEX IF NOT EXISTS halfway_barrier_decided_at ON halfway_barrier (decided_at);

-- name: create_once
-- Runs `create` in place of {create}, while other processes do the same. Without the lock, one of two processes fails at a
-- unique index of the catalogue. Without the condition, CREATE INDEX would wait for every transaction that has written to
-- the table, and hold up every later one. One statement, because a connection that commits each statement would release the
-- lock too early.
DO $$ BEGIN
  PERFORM pg_advisory_xact_lock(hashtext('create halfway_barrier')); IF to_regclass('halfway_barrier') IS NULL THEN {create}; END IF; END
$$;

-- name: mark
-- Lets the Python client notice that local transactions write to another database than checks read. No transaction has this
-- id, and the row is never old enough for `clean`. A service without the client needs no such row.
INSERT INTO halfway_barrier VALUES ('#table', substr(md5(CAST(random() AS text)), 1, 8), 'infinity')
  ON CONFLICT (transaction_id) DO NOTHING;

-- name: read_mark
-- Runs in the local transaction, so it takes no lock.
SELECT outcome FROM halfway_barrier WHERE transaction_id = '#table';

-- name: insert
-- $1 is the id, $2 'commit': the first statement of the local transaction. If it writes no row, the transaction is decided
-- already: roll the local transaction back. It waits for an open transaction that has written the same id: that one's commit
-- or rollback decides.
INSERT INTO halfway_barrier (transaction_id, outcome) VALUES ($1, $2) ON CONFLICT (transaction_id) DO NOTHING;

-- name: look
-- Returns the outcome, or no row. It never sees what is not committed.
SELECT outcome FROM halfway_barrier WHERE transaction_id = $1;

-- name: take_place
-- `insert` for a check: it waits half a second for an open local transaction; then it fails, and the answer is unknown. On a
-- read replica it fails too, which is right: a replica does not know yet what has committed.
-- `true` makes the setting local to the transaction, so that pgbouncer hands it to nobody else. Its own statement would have no
-- effect on a connection that commits each statement. MATERIALIZED, so that it takes effect before the row is written.
WITH bound AS MATERIALIZED (SELECT set_config('lock_timeout', '500', true))
  INSERT INTO halfway_barrier (transaction_id, outcome) SELECT $1, $2 FROM bound ON CONFLICT (transaction_id) DO NOTHING;

-- name: remove
-- Deletes the row of a trial that belongs to no transaction.
DELETE FROM halfway_barrier WHERE transaction_id = $1;

-- name: clean
-- $1 is the retention in seconds, at least twice the group's max_age_s; $2 how many rows to delete at most: others wait no
-- longer than a batch takes. One instance deletes at a time, or they would wait for each other's rows. MATERIALIZED, so that the
-- lock is asked for once. The oldest rows, found through the index.
WITH elected AS MATERIALIZED (SELECT pg_try_advisory_xact_lock(hashtext('halfway_barrier')) AS mine)
  DELETE FROM halfway_barrier WHERE (SELECT mine FROM elected) AND (transaction_id) IN (
    SELECT transaction_id FROM halfway_barrier WHERE decided_at < now() - $1 * interval '1 second'
    ORDER BY decided_at LIMIT $2);
