"""Executes the barrier's statements on the service's own connection."""

from __future__ import annotations

import functools
import inspect
import os
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Concatenate, Final, ParamSpec, TypeVar, cast

from halfway.client.barrier.table import Dialect, Result, Statement, Steps
from halfway.client.errors import HalfwayError

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")
R = TypeVar("R")
Execute = Callable[[Any, Statement], Result]
ExecuteAsync = Callable[[Any, Statement], Awaitable[Result]]

_SERVER_STATUS_IN_TRANSACTION: Final = 1
_LIBPQ_IN_TRANSACTION: Final = (1, 2, 3)
"""Active, idle in a transaction, and in one that has failed."""


class UnsupportedConnectionError(HalfwayError, TypeError):
    """The barrier does not support this kind of connection; the message lists those that it supports."""


class NoTransactionError(HalfwayError):
    """The connection commits each statement: begin the local transaction first, and insert within it."""


def carry_out(steps: Steps[T], connection: Any) -> T:
    """Execute the steps on a connection of a synchronous driver, in its open transaction."""
    execute = cast("Execute", _driver(connection, "execute").execute)

    async def execute_at_once(statement: Statement) -> Result:
        return execute(connection, statement)

    return at_once(drive(steps, execute_at_once))


async def carry_out_async(steps: Steps[T], connection: Any) -> T:
    """Execute the steps on a connection of an asynchronous driver, in its open transaction."""
    execute = cast("ExecuteAsync", _driver(connection, "execute_async").execute_async)
    return await drive(steps, lambda statement: execute(connection, statement))


async def drive(generator: Generator[S, R, T], perform: Callable[[S], Awaitable[R]]) -> T:
    """Perform what a generator yields, send it each result or error, and return its result."""
    try:
        wanted = next(generator)
        while True:
            try:
                result = await perform(wanted)
            except Exception as error:  # noqa: BLE001 - the generator handles it
                wanted = generator.throw(error)
            else:
                wanted = generator.send(result)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # the result of the generator


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits for nothing, with or without an event loop; return its result."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # the result of the coroutine
    raise AssertionError(f"{coroutine} waits")


def blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """Return the same method for synchronous connections, on which it waits for nothing, with its docstring."""

    @functools.wraps(method)
    def at_once_of(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return at_once(method(self, *args, **kwargs))

    return at_once_of


WITH: Final = "__enter__"
ASYNC_WITH: Final = "__aenter__"


def demand_opener(name: str, opens: object) -> None:
    """Raise UnsupportedConnectionError for what is no function, such as a connection; that of sqlite3 can be called."""
    if not callable(opens) or any(base.__module__ == "sqlite3" for base in type(opens).__mro__):
        raise UnsupportedConnectionError(
            f"{name} is {type(opens).__name__}: give a function that opens a transaction: `engine.begin`"
        )


def opened_by(name: str, opens: Callable[[], Any], *ways: str) -> Any:
    """Return the context manager of a function that opens a connection; `ways` are those that the caller can enter.

    A coroutine, such as that of psycopg's `AsyncConnection.connect`, is awaited first.
    """
    context = opens()
    if inspect.iscoroutine(context):
        if ASYNC_WITH in ways:
            return _awaited(name, context)
        context.close()
    if not any(hasattr(context, way) for way in ways):
        raise UnsupportedConnectionError(
            f"{name} returned {type(context).__name__}: give a function that returns a context manager, such as"
            " `engine.begin` of SQLAlchemy or `lambda: psycopg.connect(...)`; an asynchronous one only to AsyncBarrier,"
            " AsyncInbox and Halfway"
        )
    return context


@asynccontextmanager
async def _awaited(name: str, opening: Coroutine[Any, Any, Any]) -> AsyncIterator[Any]:
    opened = await opening
    async with opened_by(name, lambda: opened, ASYNC_WITH) as connection:
        yield connection


def in_transaction(connect: Callable[[], Any], dialect: Dialect, steps: Steps[T]) -> T:
    """Execute the steps in a transaction of their own; UnsupportedConnectionError if that is of another database."""
    with opened_by("connect", connect, WITH) as connection:
        _demand_dialect(connection, dialect)
        return carry_out(steps, connection)


async def in_transaction_async(connect: Callable[[], Any], dialect: Dialect, steps: Steps[T]) -> T:
    """Same as `in_transaction`, for an asynchronous driver."""
    async with opened_by("connect", connect, ASYNC_WITH) as connection:
        _demand_dialect(connection, dialect)
        return await carry_out_async(steps, connection)


def _demand_dialect(connection: Any, dialect: Dialect) -> None:
    of_sqlalchemy = getattr(getattr(connection, "dialect", None), "name", None)
    name = _driver(connection).dialect or of_sqlalchemy or getattr(connection, "vendor", None)  # Django's
    if name is not None and name in {*Dialect, "mariadb"} and Dialect(name) is not dialect:
        raise UnsupportedConnectionError(f"the dialect is {str(dialect)!r}, but connect opens {name}: give {name!r}")


def transaction_of(connection: Any) -> Any | None:
    """Return what opens a transaction on a connection of asyncpg, whose pool does not; None for other drivers."""
    driver = _driver(connection)
    return connection.transaction() if driver.execute_async is _asyncpg and driver.commits_each(connection) else None


def require_transaction(connection: Any) -> None:
    """Raise NoTransactionError if a row would commit immediately instead of with the local transaction."""
    if _driver(connection).commits_each(connection):
        raise NoTransactionError(
            "the connection commits each statement: begin the local transaction first, and insert within it"
        )


def is_open(connection: Any) -> bool:
    """Return whether a transaction is open on a connection, as far as its driver knows; also one that has failed."""
    try:
        return _driver(connection).is_open(connection)
    except Exception:  # noqa: BLE001 - of any driver, whose connection is closed or back in its pool
        return False


def _dbapi(placeholder: str) -> Execute:
    def execute(connection: Any, statement: Statement) -> Result:
        cursor = connection.cursor()
        try:
            cursor.execute(statement.sql.replace("{p}", placeholder), statement.parameters)
            return Result(cursor.fetchall() if cursor.description else (), cursor.rowcount)
        finally:
            cursor.close()

    return execute


def _sqlalchemy(connection: Any, statement: Statement) -> Result:
    """Execute on a Connection or a Session, with the placeholders of the driver below it."""
    connection = sqlalchemy_connection(connection)
    _engines.add(connection.engine)
    match connection.dialect.paramstyle:
        case "qmark":
            sql = statement.sql.replace("{p}", "?")
        case "numeric_dollar":
            sql = _numbered(statement.sql)
        case _:
            sql = statement.sql.replace("{p}", "%s")
    result = connection.exec_driver_sql(sql, statement.parameters or None)
    return Result([tuple(row) for row in result] if result.returns_rows else (), result.rowcount)


_engines: weakref.WeakSet[Any] = weakref.WeakSet()
"""The engines whose connections were used, maybe before a fork, such as with gunicorn's --preload."""
_of_parents: Final[list[Any]] = []
"""Pools of the parent. If they were collected, some drivers would end the parent's sessions."""


def _after_fork() -> None:
    """Give the child's engines new pools: on a shared connection, two processes would read each other's answers."""
    for engine in list(_engines):
        if hasattr(engine.pool, "overflow"):  # the others open a connection for each use, or hold a database in memory
            _of_parents.append(engine.pool)
            engine.dispose(close=False)


os.register_at_fork(after_in_child=_after_fork)


async def _sqlalchemy_async(connection: Any, statement: Statement) -> Result:
    return await run_sync(connection, _sqlalchemy, statement)


def is_sqlalchemy(connection: Any) -> bool:
    """Return whether this is a connection or session of SQLAlchemy."""
    return any(base.__module__.startswith("sqlalchemy.") for base in type(connection).__mro__)


async def run_sync(connection: Any, work: Callable[..., T], *arguments: Any) -> T:
    """Run `work` on the synchronous object behind an AsyncSession or an AsyncConnection of SQLAlchemy.

    Whatever may need a connection runs in here: outside, a session can take one only if the pool has an idle one.
    """
    if not is_asynchronous(connection):
        raise UnsupportedConnectionError(f"{type(connection).__name__} is synchronous: give its asynchronous variant")
    return await connection.run_sync(work, *arguments)  # type: ignore[no-any-return]


def is_asynchronous(connection: Any) -> bool:
    """Return whether this is an AsyncSession or an AsyncConnection of SQLAlchemy."""
    return hasattr(connection, "sync_session") or hasattr(connection, "sync_connection")


def sqlalchemy_connection(connection: Any) -> Any:
    """Return the Connection of a Session, or the Connection that is given."""
    if is_asynchronous(connection):
        raise UnsupportedConnectionError(f"{type(connection).__name__} is asynchronous: use the AsyncBarrier for it")
    return connection if hasattr(connection, "exec_driver_sql") else connection.connection()


def pool_of(connection: Any) -> Any | None:
    """Return the pool of a connection, None for a plain driver connection."""
    if any(base.__module__.startswith("django.") for base in type(connection).__mro__):
        return connection  # each of Django's connections belongs to one database
    if is_sqlalchemy(connection):
        return sqlalchemy_connection(connection).engine
    return None


async def _cursor_async(connection: Any, statement: Statement) -> Result:
    async with connection.cursor() as cursor:
        await cursor.execute(statement.sql.replace("{p}", "%s"), statement.parameters)
        return Result(await cursor.fetchall() if cursor.description else (), cursor.rowcount)


async def _asyncpg(connection: Any, statement: Statement) -> Result:
    sql = _numbered(statement.sql)
    if sql.startswith("SELECT"):
        return Result([tuple(row) for row in await connection.fetch(sql, *statement.parameters)], 0)
    count = str(await connection.execute(sql, *statement.parameters)).rsplit(" ", 1)[-1]
    return Result((), int(count) if count.isdigit() else 0)


def _numbered(sql: str) -> str:
    parts = sql.split("{p}")
    return parts[0] + "".join(f"${number}{part}" for number, part in enumerate(parts[1:], 1))


def _sqlite3_commits(connection: Any) -> bool:
    return not connection.in_transaction and (
        connection.isolation_level is None or getattr(connection, "autocommit", None) is True
    )


def _psycopg_commits(connection: Any) -> bool:
    return bool(connection.autocommit) and not _psycopg_is_open(connection)


def _psycopg_is_open(connection: Any) -> bool:
    return connection.info.transaction_status in _LIBPQ_IN_TRANSACTION


def _mysql_commits(connection: Any) -> bool:
    return bool(connection.get_autocommit()) and not _mysql_is_open(connection)


def _mysql_is_open(connection: Any) -> bool:
    return bool(connection.server_status & _SERVER_STATUS_IN_TRANSACTION)


def _asyncpg_commits(connection: Any) -> bool:
    return not connection.is_in_transaction()


def _sqlalchemy_commits(connection: Any) -> bool:
    return bool(sqlalchemy_connection(connection)._is_autocommit_isolation())  # noqa: SLF001 - the public attribute asks the server


def _sqlalchemy_is_open(connection: Any) -> bool:
    connection = connection.registry() if hasattr(connection, "registry") else connection  # of a scoped session
    return bool(connection.in_transaction())


@dataclass(frozen=True)
class _Driver:
    """How to use the connections of a package."""

    commits_each: Callable[[Any], bool]
    is_open: Callable[[Any], bool]
    execute: Execute | None = None
    execute_async: ExecuteAsync | None = None
    dialect: str | None = None
    """None if its connections know it."""


_FORMAT: Final = _dbapi("%s")
_DRIVERS: Final[Mapping[str, _Driver]] = {
    "sqlite3": _Driver(
        _sqlite3_commits, lambda connection: bool(connection.in_transaction), _dbapi("?"), None, "sqlite"
    ),
    "psycopg": _Driver(_psycopg_commits, _psycopg_is_open, _FORMAT, _cursor_async, "postgresql"),
    "psycopg2": _Driver(_psycopg_commits, _psycopg_is_open, _FORMAT, None, "postgresql"),
    "pymysql": _Driver(_mysql_commits, _mysql_is_open, _FORMAT, None, "mysql"),
    "MySQLdb": _Driver(
        lambda one: bool(one.get_autocommit()), lambda one: bool(one.open), _FORMAT, None, "mysql"
    ),  # it tells no more
    "asyncmy": _Driver(_mysql_commits, _mysql_is_open, None, _cursor_async, "mysql"),
    "asyncpg": _Driver(_asyncpg_commits, lambda one: bool(one.is_in_transaction()), None, _asyncpg, "postgresql"),
    "django": _Driver(lambda one: bool(one.get_autocommit()), lambda one: bool(one.in_atomic_block), _FORMAT),
    "sqlalchemy": _Driver(_sqlalchemy_commits, _sqlalchemy_is_open, _sqlalchemy, _sqlalchemy_async),
}


def _driver(connection: Any, use: str = "is_open") -> _Driver:
    """Return the driver of a connection; raises UnsupportedConnectionError if there is none for this use."""
    for base in type(connection).__mro__:
        driver = _DRIVERS.get(base.__module__.partition(".")[0])
        if driver is not None and getattr(driver, use) is not None:
            return driver
    known = ", ".join(name for name, driver in _DRIVERS.items() if getattr(driver, use) is not None)
    raise UnsupportedConnectionError(
        f"{type(connection).__module__}.{type(connection).__qualname__} is not a connection of {known}"
    )
