"""What the log of a Delta table says: its versions, and the batches of a writer whose numbers its commits hold."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from halfway.pipeline.tables.folders import Files

LOG: Final = "_delta_log"
_COMMIT: Final = re.compile(r"(\d{20})\.json")


def versions(folder: Files, table: str) -> list[int]:
    """Return the versions of a table in a folder, the newest first; none if it does not exist."""
    return sorted((int(found[1]) for found in map(_COMMIT.fullmatch, folder.names(table, LOG)) if found), reverse=True)


def batches(folder: Files, table: str, writer: str) -> Iterator[tuple[int, int]]:
    """Return version and number of each batch of a writer, the newest first."""
    for version in versions(folder, table):
        for line in folder.read(table, LOG, f"{version:020}.json").splitlines():
            transaction = json.loads(line).get("txn", {}) if '"txn"' in line else {}
            if transaction.get("appId") == writer:
                yield version, int(transaction["version"])


def last(folder: Files, table: str, writer: str) -> int:
    """Return the number of the last batch of a writer, -1 if there is none."""
    return next((number for _, number in batches(folder, table, writer)), -1)


def as_of(folder: Files, table: str, writer: str, number: int) -> int:
    """Return the version that holds a batch of a writer and none after it."""
    return next(version for version, each in batches(folder, table, writer) if each <= number)
