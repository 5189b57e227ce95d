"""Alembic leaves the barrier's tables alone, as docs/python.md says."""

from pathlib import Path

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import MetaData, create_engine

from halfway.client.barrier import Barrier, Store

INCLUDE_NAME = 'include_name=lambda name, kind, _: kind != "table" or not name.startswith("halfway_")'
PAGE = Path(__file__).parents[3] / "docs" / "python.md"


def test_autogenerate_does_not_drop_the_barriers_tables(tmp_path: Path) -> None:
    assert INCLUDE_NAME in PAGE.read_text(encoding="utf-8")
    engine = create_engine(f"sqlite:///{tmp_path / 'shop.sqlite'}")
    Barrier("sqlite", engine.begin, store=Store()).create()
    include_name = eval(INCLUDE_NAME.removeprefix("include_name="))  # noqa: S307 - from our own page
    with engine.connect() as connection:
        told = compare_metadata(MigrationContext.configure(connection), MetaData())
        assert {change[0] for change in told} == {"remove_index", "remove_table"}
        context = MigrationContext.configure(connection, opts={"include_name": include_name})
        assert compare_metadata(context, MetaData()) == []
    engine.dispose()
