"""Carrying out the barrier's steps on the connection that the service uses itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

from halfway.client.barrier.barrier import Result, Statement, Steps
from halfway.client.errors import HalfwayError

T = TypeVar("T")
Execute = Callable[[Any, Statement], Result]
ExecuteAsync = Callable[[Any, Statement], Awaitable[Result]]


class UnsupportedConnectionError(HalfwayError, TypeError):
    """The barrier does not know this kind of connection; the message names those that it knows."""


def carry_out(steps: Steps[T], connection: Any) -> T:
    """Execute the steps on a connection of a synchronous driver, in the transaction that it has open."""
    execute = _executor(SYNCHRONOUS, connection)
    try:
        statement = next(steps)
        while True:
            try:
                result = execute(connection, statement)
            except Exception as error:  # noqa: BLE001 - the steps say what follows
                statement = steps.throw(error)
            else:
                statement = steps.send(result)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # what the steps return


async def carry_out_async(steps: Steps[T], connection: Any) -> T:
    """Execute the steps on a connection of an asynchronous driver, in the transaction that it has open."""
    execute = _executor(ASYNCHRONOUS, connection)
    try:
        statement = next(steps)
        while True:
            try:
                result = await execute(connection, statement)
            except Exception as error:  # noqa: BLE001 - the steps say what follows
                statement = steps.throw(error)
            else:
                statement = steps.send(result)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # what the steps return


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
    """Execute on a Connection or a Session, with the placeholder of the driver below it."""
    if not hasattr(connection, "exec_driver_sql"):
        connection = connection.connection()
    placeholder = "?" if connection.dialect.paramstyle == "qmark" else "%s"
    done = connection.exec_driver_sql(statement.sql.replace("{p}", placeholder), statement.parameters)
    return Result([tuple(row) for row in done] if done.returns_rows else (), done.rowcount)


async def _sqlalchemy_async(connection: Any, statement: Statement) -> Result:
    return await connection.run_sync(_sqlalchemy, statement)  # type: ignore[no-any-return]


async def _cursor_async(connection: Any, statement: Statement) -> Result:
    async with connection.cursor() as cursor:
        await cursor.execute(statement.sql.replace("{p}", "%s"), statement.parameters)
        return Result(await cursor.fetchall() if cursor.description else (), cursor.rowcount)


async def _asyncpg(connection: Any, statement: Statement) -> Result:
    parts = statement.sql.split("{p}")
    sql = parts[0] + "".join(f"${number}{part}" for number, part in enumerate(parts[1:], 1))
    prepared = await connection.prepare(sql)
    rows = await prepared.fetch(*statement.parameters)
    status = prepared.get_statusmsg() or ""
    written = status.rsplit(" ", 1)[-1]
    return Result([tuple(row) for row in rows], int(written) if written.isdigit() else 0)


SYNCHRONOUS: Final[Mapping[str, Execute]] = {
    "sqlite3": _dbapi("?"),
    "psycopg": _dbapi("%s"),
    "pymysql": _dbapi("%s"),
    "django": _dbapi("%s"),
    "sqlalchemy": _sqlalchemy,
}
ASYNCHRONOUS: Final[Mapping[str, ExecuteAsync]] = {
    "asyncpg": _asyncpg,
    "psycopg": _cursor_async,
    "asyncmy": _cursor_async,
    "sqlalchemy": _sqlalchemy_async,
}

E = TypeVar("E")


def _executor(known: Mapping[str, E], connection: Any) -> E:
    for base in type(connection).__mro__:
        package = base.__module__.partition(".")[0]
        if package in known:
            return known[package]
    raise UnsupportedConnectionError(
        f"{type(connection).__module__}.{type(connection).__qualname__} is no connection of {', '.join(known)}"
    )
