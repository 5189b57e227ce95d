"""The example for Spring Boot with transactions that end in ways which their caller does not see, on PostgreSQL."""

import asyncio
import json
import os
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest

from tests.support.conformance.crossings import crossings
from tests.support.conformance.services import ROOT, spring
from tests.support.coordinator.process import CoordinatorProcess
from tests.support.coordinator.topics import Cluster
from tests.support.databases.servers import USER, Server

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("conformance")]
TRAPS = ROOT / "tests" / "support" / "conformance" / "SpringTraps.java"
TOLD = {
    "joins": "commit",
    "savepoint": "commit",
    "other connection": "commit",
    "exception": "rollback",
    "rollback-only": "rollback",
    "participant": "rollback",
    "caught error": "rollback",
    "caught error without Spring": "rollback",
    "before the commit": "rollback",
    "after the commit": "commit",
    "outer": "IllegalTransactionStateException",
    "other data source": "rollback",
}


async def test_however_a_transaction_ends_its_rows_and_its_message_stay_together(
    coordinator: CoordinatorProcess, cluster: Cluster, topic: str, group: str, postgresql_server: Server, tmp_path: Path
) -> None:
    """Its caller gets what the database says, also if the end was silent, or an exception came after the commit."""
    with postgresql_server.new_database("postgresql") as database:
        async with crossings(coordinator.url, postgresql_server.folder / ".s.PGSQL.5432") as places:
            url = f"postgresql://{USER}@127.0.0.1:{places.database_port}{urlsplit(database).path}"
            settings = {"HALFWAY_URL": coordinator.url, "DATABASE_URL": url, "GROUP": group, "TOPIC": topic}
            done = await asyncio.to_thread(
                subprocess.run,
                await asyncio.to_thread(spring, "SpringTraps", TRAPS),
                cwd=tmp_path,
                env={**os.environ, **settings},
                capture_output=True,
                text=True,
                check=False,
            )
        with psycopg.connect(database) as connection:
            placed = [name for (name,) in connection.execute("SELECT id FROM orders")]
    lines = [line.removeprefix("TRAP ") for line in done.stdout.splitlines() if line.startswith("TRAP ")]
    assert {name: told for line in lines for name, told in json.loads(line).items()} == TOLD, done.stdout + done.stderr
    committed = sorted(name for name, told in TOLD.items() if told == "commit")
    assert sorted(placed) == committed
    assert sorted(json.loads(record.value or b"")["order"] for record in await cluster.read(topic)) == committed
