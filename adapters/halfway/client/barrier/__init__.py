"""One table in the service's own database that ties a transaction's outcome to the local transaction.

The row is written inside the local transaction, so it stands exactly if that commits. A check answers from it, and a
check that finds none takes its place with a rollback, so a local transaction that comes later fails. Whichever is first wins.
"""

from halfway.client.barrier.barrier import Barrier, InvalidRetentionError, LateTransactionError
from halfway.client.barrier.dialect import Dialect
from halfway.client.barrier.dbapi import DbApiBarrier

__all__ = ["Barrier", "DbApiBarrier", "Dialect", "InvalidRetentionError", "LateTransactionError"]
