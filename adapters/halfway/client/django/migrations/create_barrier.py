"""Creates the tables with the SQL of the project's database."""

from typing import Any

from django.db import migrations, router
from django.db.migrations.operations.base import Operation

from halfway.client.barrier import TABLE, migration


class CreateTable(Operation):
    """Creates the barrier's table, or its store's, in databases for which the routers allow this application."""

    def __init__(self, *, store: bool = False) -> None:
        self._store = store
        self._table = f"{TABLE}_stored" if store else TABLE

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Change no model."""

    def database_forwards(self, app_label: str, schema_editor: Any, *_states: Any) -> None:
        for sql in migration(schema_editor.connection.vendor, store=self._store):
            self._execute(app_label, schema_editor, sql)

    def database_backwards(self, app_label: str, schema_editor: Any, *_states: Any) -> None:
        self._execute(app_label, schema_editor, f"DROP TABLE {self._table}")

    def describe(self) -> str:
        return f"Create the table {self._table}"

    def _execute(self, app_label: str, schema_editor: Any, sql: str) -> None:
        if router.allow_migrate(schema_editor.connection.alias, app_label):
            schema_editor.execute(sql, params=None)


class Migration(migrations.Migration):
    """The barrier's table."""

    initial = True
    operations = (CreateTable(),)
