"""Batches in Delta tables each count once, and are written with as little reading as that takes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from halfway.pipeline.tables import delta
from halfway.pipeline.transforms.ledger import MERGE, PENDING_COLUMNS

SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("id", "group", "state")),
        *((name, pa.int64()) for name in ("since", "shard", "offset")),
        ("open", pa.bool_()),
        ("horizon", pa.int64()),
    ]
)


class Rows:
    """What Spark's DataFrame gives."""

    def __init__(self, number: int, *, is_open: bool = True) -> None:
        self._row = ("g", "prepared", 1, 0, number, is_open, None)
        self._id = f"id-{number}"

    def toArrow(self) -> pa.Table:  # noqa: N802 - Spark's name
        return pa.Table.from_pylist([dict(zip(SCHEMA.names, (self._id, *self._row), strict=True))], SCHEMA)


def appended(uri: str, number: int) -> int:
    return delta.append(cast(Any, Rows(number)), uri, delta.Batch(writer="w", number=number))


def merged(uri: str, number: int, *, is_open: bool = True) -> int:
    batch = delta.Batch(writer="w", number=number)
    return delta.merge(cast(Any, Rows(number, is_open=is_open)), uri, batch, PENDING_COLUMNS, MERGE)


@pytest.mark.parametrize("write", [appended, merged])
def test_a_batch_opens_the_log_of_a_table_once(
    write: Callable[[str, int], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an object store each opening is several requests; a batch that is there already changes nothing."""
    uri = str(tmp_path)
    write(uri, 0)
    opened: list[str] = []
    begin = DeltaTable.__init__

    def noted(table: DeltaTable, *args: Any, **settings: Any) -> None:
        opened.append(uri)
        begin(table, *args, **settings)

    monkeypatch.setattr(DeltaTable, "__init__", noted)
    told = write(uri, 1)
    assert len(opened) == 1
    again = write(uri, 1)
    assert len(opened) == 2
    assert (told, again) == ((1, 0) if write is appended else (2, 2))
    assert delta.count(DeltaTable(uri)) == 2
    assert delta.last(uri, writer="w") == 1


def test_a_batch_counts_although_it_changes_no_row(tmp_path: Path) -> None:
    """A ledger whose transactions have all ended has nothing to write into `pending`, and continues."""
    uri = str(tmp_path)
    for number in range(2):
        assert merged(uri, number, is_open=False) == 0
        assert delta.last(uri, writer="w") == number
    assert merged(uri, 2) == 1
    assert merged(uri, 3, is_open=False) == 1
    assert delta.last(uri, writer="w") == 3
