"""The migration of the barrier's table through Alembic, on real servers and SQLite."""

from pathlib import Path
from typing import Any

import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import create_engine, inspect

from halfway.client.barrier import Barrier, migration
from tests.barrier.test_drivers import Servers, asked, url

pytestmark = [pytest.mark.xdist_group("databases"), pytest.mark.timeout(600)]


def upgrade(op: Operations) -> None:
    """Do what docs/producing.md tells a revision to do."""
    for statement in migration(op.get_context().dialect.name, "migrated"):
        op.execute(statement)


def downgrade(op: Operations) -> None:
    op.drop_table("migrated")


@pytest.mark.parametrize("driver", ["postgresql+psycopg", "mysql+pymysql", "mariadb+pymysql", "sqlite"])
def test_a_revision_of_alembic_makes_the_table(servers: Servers, driver: str, tmp_path: Path) -> None:
    where: dict[str, Any]
    if driver == "sqlite":
        where = {"url": f"sqlite:///{tmp_path / 'shop.sqlite'}"}
    else:
        where = url(servers, driver.replace("mariadb", "mysql"))
        where["url"] = where["url"].replace("mysql+pymysql", driver) if "pymysql" in driver else where["url"]
    engine = create_engine(**where)
    with engine.begin() as connection:
        upgrade(Operations(MigrationContext.configure(connection)))
    barrier = Barrier(engine.dialect.name, engine.begin, table="migrated")
    with engine.begin() as connection:
        barrier.insert(connection, "a")
    assert [barrier.decide(asked("a")), barrier.decide(asked("b"))] == ["commit", "rollback"]
    with engine.begin() as connection:
        downgrade(Operations(MigrationContext.configure(connection)))
    assert not inspect(engine).has_table("migrated")
    engine.dispose()
