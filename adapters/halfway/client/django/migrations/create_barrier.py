"""Creates the barrier's table with the SQL of the project's database."""

from typing import Any

from django.db import migrations, router
from django.db.migrations.operations.base import Operation

from halfway.client.barrier import TABLE, migration


class CreateBarrier(Operation):
    """Creates the table in databases for which the routers allow this application."""

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Change no model."""

    def database_forwards(self, app_label: str, schema_editor: Any, *_states: Any) -> None:
        """Create the table and its index."""
        for sql in migration(schema_editor.connection.vendor):
            self._execute(app_label, schema_editor, sql)

    def database_backwards(self, app_label: str, schema_editor: Any, *_states: Any) -> None:
        """Drop the table."""
        self._execute(app_label, schema_editor, f"DROP TABLE {TABLE}")

    def describe(self) -> str:
        """Return the text for `migrate --plan`."""
        return f"Create the table {TABLE}"

    def _execute(self, app_label: str, schema_editor: Any, sql: str) -> None:
        if router.allow_migrate(schema_editor.connection.alias, app_label):
            schema_editor.execute(sql, params=None)


class Migration(migrations.Migration):
    """The first and only migration."""

    initial = True
    operations = (CreateBarrier(),)
