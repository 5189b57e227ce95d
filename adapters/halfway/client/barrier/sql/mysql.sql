-- The barrier in MySQL and MariaDB, for a service in any language. The Python client runs these statements too.
--
-- Each ? is a parameter. postgresql.sql says how to decide with these statements, and what each is for; here is what differs:
-- in place of take_place, read_only and bound_lock_wait, then insert ('rollback'), then restore_lock_wait.

-- name: exists
-- A query of the catalogue takes no lock on the table.
SELECT COUNT(*) FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = 'halfway_barrier';

-- name: create
-- An id is ASCII: ascii_bin compares bytes, also upper and lower case. InnoDB, because other engines have no transactions.
-- The index is for `clean`. MySQL has no CREATE INDEX IF NOT EXISTS, so it is part of the table.
CREATE TABLE IF NOT EXISTS halfway_barrier (
  transaction_id varchar(128) CHARACTER SET ascii COLLATE ascii_bin PRIMARY KEY,
  outcome varchar(8) NOT NULL,
  decided_at timestamp(3) NOT NULL DEFAULT CURRENT_TIMESTAMP(3),
  KEY halfway_barrier_decided_at (decided_at)) ENGINE=InnoDB;

-- name: mark
-- 2037, because a timestamp of MySQL ends in January 2038.
INSERT IGNORE INTO halfway_barrier VALUES ('#table', LEFT(MD5(CONCAT(RAND(), UUID())), 8), '2037-12-31');

-- name: read_mark
-- Not a locking read: it runs in the local transaction.
SELECT outcome FROM halfway_barrier WHERE transaction_id = '#table';

-- name: insert
-- IGNORE and not an error, which in some clients ends the transaction. The row count is 0 if there is a row.
INSERT IGNORE INTO halfway_barrier (transaction_id, outcome) VALUES (?, ?);

-- name: look
-- A locking read: it never sees an uncommitted row, not even at READ UNCOMMITTED, and never an old snapshot.
-- Run bound_lock_wait before it, because it waits for an open local transaction.
SELECT outcome FROM halfway_barrier WHERE transaction_id = ? LOCK IN SHARE MODE;

-- name: read_lock_wait
SELECT @@SESSION.innodb_lock_wait_timeout;

-- name: bound_lock_wait
-- 0 means no wait, but only in MariaDB. MySQL's minimum is 1 s.
SET SESSION innodb_lock_wait_timeout = IF(LOCATE('MariaDB', VERSION()) > 0, 0, 1);

-- name: restore_lock_wait
SET SESSION innodb_lock_wait_timeout = {value};

-- name: read_only
-- Returns 1 on a read replica, which must not answer: it does not know yet what has committed, and lets an administrator write.
-- Compared as text, because newer releases of MariaDB have OFF and ON in place of 0 and 1.
SELECT CONCAT(@@GLOBAL.read_only, '') NOT IN ('0', 'OFF');

-- name: remove
DELETE FROM halfway_barrier WHERE transaction_id = ?;

-- name: clean
-- Between elect and resign, on one connection. The parameters are the seconds and the limit.
DELETE FROM halfway_barrier WHERE decided_at < NOW(3) - INTERVAL ? SECOND ORDER BY decided_at LIMIT ?;

-- name: elect
-- Returns 1 if this connection may delete rows now. The lock is the server's, so its name has the database's.
SELECT GET_LOCK(SHA1(CONCAT(DATABASE(), '.halfway_barrier')), 0);

-- name: resign
-- Undoes elect, which no commit does.
SELECT RELEASE_LOCK(SHA1(CONCAT(DATABASE(), '.halfway_barrier')));
