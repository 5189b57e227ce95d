"""One table in the service's own database that ties a transaction's outcome to the local transaction.

The row is written inside the local transaction, so it exists if and only if that commits. A check reads the row. If
there is none, the check inserts one that says rollback, so a later local transaction fails: the first one wins.
"""

from halfway.client.barrier.barrier import (
    RETENTION_S,
    AsyncBarrier,
    Barrier,
    InvalidRetentionError,
    OtherDatabaseError,
    UncommittedConnectionError,
)
from halfway.client.barrier.drivers import NoTransactionError, UnsupportedConnectionError
from halfway.client.barrier.maintenance import BarrierMaintenance
from halfway.client.barrier.stored import NoStoreError, ParkedMessages, Store, StoredFigures, StoreFullError, migration
from halfway.client.barrier.table import (
    TABLE,
    ConflictError,
    Dialect,
    LateTransactionError,
    MissingTableError,
    UncountedRowsError,
    sqlite_transactions,
)

__all__ = [
    "RETENTION_S",
    "TABLE",
    "AsyncBarrier",
    "Barrier",
    "BarrierMaintenance",
    "ConflictError",
    "Dialect",
    "InvalidRetentionError",
    "LateTransactionError",
    "MissingTableError",
    "NoStoreError",
    "NoTransactionError",
    "OtherDatabaseError",
    "ParkedMessages",
    "Store",
    "StoreFullError",
    "StoredFigures",
    "UncommittedConnectionError",
    "UncountedRowsError",
    "UnsupportedConnectionError",
    "migration",
    "sqlite_transactions",
]
