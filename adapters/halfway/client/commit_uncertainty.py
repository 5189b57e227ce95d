"""Decides whether the database may have committed although an exception was raised."""

from __future__ import annotations

import asyncio
from typing import Final

_UNCERTAIN: Final = frozenset({"OperationalError", "InterfaceError", "InternalError", "PostgresConnectionError"})
"""Names of driver errors after which a commit may have succeeded: those of PEP 249, and of asyncpg."""
_UNCERTAIN_STATES: Final = ("08", "57", "58", "F0", "XX", "40003")
"""SQLSTATEs of PostgreSQL that leave a commit uncertain: lost connections, shutdowns, broken servers."""
_ROLLED_BACK_NUMBERS: Final = frozenset({1205, 1213, 3572})
"""Errors of MySQL and MariaDB that answer a statement before the commit: lock waits and deadlocks."""
_CONFLICT_STATES: Final = frozenset({"40001", "40P01", "55P03"})
"""SQLSTATEs of PostgreSQL: a serialization failure, a deadlock, a lock that is not available."""
_CONFLICT_NUMBERS: Final = _ROLLED_BACK_NUMBERS | {1020}
"""Errors of MySQL and MariaDB; 1020 is an outdated snapshot."""
_SQLITE_BUSY: Final = frozenset({5, 6})
"""SQLite's `database is locked` and `table is locked`: nothing was committed."""


def may_have_committed(error: BaseException | None) -> bool:
    """Return whether an exception, or one of its causes, may come from a commit whose answer was lost."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if _is_uncertain(error):
            return True
        if isinstance(error, BaseExceptionGroup) and any(map(may_have_committed, error.exceptions)):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_conflict(error: BaseException | None) -> bool:
    """Return whether the database refused a statement because of another transaction, so that a retry may succeed."""
    if error is None:
        return False
    original = getattr(error, "orig", None) or error.__cause__  # SQLAlchemy's and Django's errors wrap the driver's
    code = getattr(error, "sqlite_errorcode", None)
    return (
        (isinstance(code, int) and code & 0xFF in _SQLITE_BUSY)
        or getattr(error, "sqlstate", None) in _CONFLICT_STATES
        or bool(error.args and error.args[0] in _CONFLICT_NUMBERS)
        or is_conflict(original)
    )


def _is_uncertain(error: BaseException) -> bool:
    original = getattr(error, "orig", None)  # SQLAlchemy's errors wrap the driver's
    if isinstance(original, BaseException):
        return _is_uncertain(original)
    if not isinstance(error, Exception) or isinstance(error, OSError | asyncio.CancelledError):
        return True
    state = getattr(error, "sqlstate", None)
    if isinstance(state, str):
        return state.startswith(_UNCERTAIN_STATES)
    if not any(kind.__name__ in _UNCERTAIN for kind in type(error).__mro__):
        return False
    code = getattr(error, "sqlite_errorcode", None)
    if isinstance(code, int):
        return code & 0xFF not in _SQLITE_BUSY
    return not (error.args and error.args[0] in _ROLLED_BACK_NUMBERS)
