"""What docs/python.md says works as written."""

import asyncio
import re
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import MetaData, create_engine

from halfway.client.barrier import Barrier, Store
from tests.support.rest.client import RestWorld

PAGE = Path(__file__).parents[3] / "docs" / "python.md"
PRODUCING = PAGE.read_text(encoding="utf-8").partition("\n## Consuming\n")[0]
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PRODUCING, re.DOTALL | re.MULTILINE)


async def test_every_block_runs_and_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    async with RestWorld() as world:
        names: dict[str, object] = {"__name__": "tutorial"}

        def run() -> None:
            for block in BLOCKS:
                code = compile(block.replace("http://halfway:8080", world.url), str(PAGE), "exec")
                exec(code, names)  # noqa: S102 - our own tutorial

        await asyncio.to_thread(run)
        keys = sorted(str(record.key) for record in world.memory.records("orders"))
    promised = re.findall(
        r"\)  # (.+)$", "\n".join(line for line in "".join(BLOCKS).splitlines() if "print(" in line), re.MULTILINE
    )
    printed = [line for line in capsys.readouterr().out.splitlines() if "[info" not in line and "[debug" not in line]
    assert len(promised) == 3
    assert printed == promised
    assert keys == ["b'42'", "b'43'", "b'44'", "b'45'"]


INCLUDE_NAME = 'include_name=lambda name, kind, _: kind != "table" or not name.startswith("halfway_")'


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
