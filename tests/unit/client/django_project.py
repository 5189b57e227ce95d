"""A Django project in one module. Each test has its own databases."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import django
from django.conf import settings
from django.core.management import call_command
from django.db import connections


@contextmanager
def project(**default: Any) -> Iterator[None]:
    """Use a database as `default`, with the barrier's table from its migration and a table `orders`."""
    if not settings.configured:
        settings.configure(
            DATABASES={},
            INSTALLED_APPS=["halfway.client.django"],
            MIDDLEWARE=["django.middleware.csrf.CsrfViewMiddleware"],
            ALLOWED_HOSTS=["testserver"],
            SECRET_KEY="for tests",
            USE_TZ=True,
        )
        django.setup()
    before = connections.settings["default"]
    connections.settings["default"] = connections.configure_settings({"default": default})["default"]
    forget_connection()
    try:
        call_command("migrate", verbosity=0)
        with connections["default"].cursor() as cursor:
            cursor.execute(
                "CREATE TABLE orders (id varchar(20) PRIMARY KEY,"
                " parent varchar(20) REFERENCES orders DEFERRABLE INITIALLY DEFERRED)"
                if connections["default"].vendor != "mysql"
                else "CREATE TABLE orders (id varchar(20) PRIMARY KEY)"
            )
        yield
    finally:
        forget_connection()
        connections.settings["default"] = before


def forget_connection() -> None:
    """Close the connection of this thread; the next one uses the current settings."""
    if hasattr(connections._connections, "default"):
        connections["default"].close()
        del connections["default"]


def insert(key: str, parent: str | None = None) -> None:
    """Do the local work of a service."""
    with connections["default"].cursor() as cursor:
        if parent is None:
            cursor.execute("INSERT INTO orders (id) VALUES (%s)", [key])
        else:
            cursor.execute("INSERT INTO orders (id, parent) VALUES (%s, %s)", [key, parent])


def count(table: str = "orders") -> int:
    """Return the number of committed rows."""
    connection = connections.create_connection("default")
    try:
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT count(*) FROM {table}")  # noqa: S608 - a constant name
            # The barrier's table has one row that belongs to no transaction.
            return int(cursor.fetchone()[0]) - (table == "halfway_barrier")
    finally:
        connection.close()
