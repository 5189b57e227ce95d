"""The migration of the barrier's table through Alembic, on real servers and SQLite."""

import re
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import NullPool, create_engine, inspect

from halfway.client.barrier import Barrier, migration
from tests.barrier.test_drivers import Servers, asked, url

pytestmark = [pytest.mark.xdist_group("databases"), pytest.mark.timeout(1800)]


def upgrade(op: Operations) -> None:
    """Do what docs/python.md tells a revision to do."""
    for statement in migration(op.get_context().dialect.name, "migrated"):
        op.execute(statement)


def downgrade(op: Operations) -> None:
    op.drop_table("migrated")


@pytest.mark.parametrize("driver", ["postgresql+psycopg", "mysql+pymysql", "mariadb+pymysql", "sqlite"])
def test_a_revision_of_alembic_makes_the_table(servers: Servers, driver: str, tmp_path: Path) -> None:
    where = f"sqlite:///{tmp_path / 'shop.sqlite'}"
    if driver != "sqlite":
        where = url(servers, driver.replace("mariadb", "mysql")).replace(
            "mysql+", "mariadb+" if "mariadb" in driver else "mysql+"
        )
    engine = create_engine(where)
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


ENV = """
from alembic import context
from sqlalchemy import NullPool, create_engine

with create_engine(context.config.get_main_option("sqlalchemy.url"), poolclass=NullPool).begin() as connection:
    context.configure(connection=connection)
    context.run_migrations()
"""


def test_alembics_own_commands_run_the_revision_of_the_documentation(servers: Servers, tmp_path: Path) -> None:
    """`alembic upgrade head` and `alembic downgrade base`, with the revision as docs/python.md has it."""
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
    (revision,) = re.findall(r"^```python\n([^`]*^def upgrade\(\):\n[^`]*)^```$", page, re.MULTILINE)
    (tmp_path / "versions").mkdir()
    (tmp_path / "env.py").write_text(ENV, encoding="utf-8")
    head = 'from alembic import op\n\nrevision, down_revision = "1", None\n\n'
    (tmp_path / "versions" / "barrier.py").write_text(head + revision, encoding="utf-8")
    with servers["postgresql"].new_database("postgresql+psycopg") as where:
        config = Config()
        config.set_main_option("script_location", str(tmp_path))
        config.set_main_option("path_separator", "os")
        config.set_main_option("sqlalchemy.url", where.replace("%", "%%"))
        engine = create_engine(where, poolclass=NullPool)
        command.upgrade(config, "head")
        barrier = Barrier("postgresql", engine.begin)
        with engine.begin() as connection:
            barrier.insert(connection, "a")
        assert barrier.decide(asked("a")) == "commit"
        command.downgrade(config, "base")
        assert not inspect(engine).has_table("halfway_barrier")
