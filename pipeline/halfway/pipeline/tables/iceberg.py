"""Tables in an Iceberg catalog, through PyIceberg (`halfway[iceberg]`). Each has its ledger as of one batch."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from halfway.pipeline.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pyarrow as pa
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table

_LEDGER: Final = "halfway.ledger"
_BATCH: Final = "halfway.batch"
_OFFSETS: Final = "halfway.offsets"
_ONE_ATTEMPT: Final = {"commit.retry.num-retries": "0"}
"""PyIceberg would repeat an append after another export has appended the same rows, which would then be there twice."""
_PLAIN: Final = {"large_string": "string", "string_view": "string", "large_binary": "binary"}
"""Arrow types that are the same in Iceberg."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The part of a ledger that a table has. It is committed with the rows, as properties of the table.

    `ledger` is None for a table without rows of a ledger. `offsets` has, by shard, the last offset in op whose outcome
    the table has.
    """

    ledger: str | None = None
    batch: int = -1
    offsets: Mapping[int, int] = field(default_factory=dict)

    @property
    def properties(self) -> dict[str, str]:
        """The mark as properties of a table."""
        offsets = {str(shard): offset for shard, offset in sorted(self.offsets.items())}
        return {_LEDGER: str(self.ledger), _BATCH: str(self.batch), _OFFSETS: json.dumps(offsets)}


class Tables:
    """The tables in a namespace of a catalog."""

    def __init__(self, catalog: str, namespace: str) -> None:
        """Open a catalog of PyIceberg's own configuration, and make the namespace if it is missing.

        Raises:
            SourceError: PyIceberg is not installed, or the catalog is not configured or does not answer.

        """
        try:
            from pyiceberg.catalog import load_catalog
        except ImportError:
            raise SourceError("--format iceberg needs PyIceberg: pip install 'halfway[iceberg]'") from None
        self._name = catalog
        self._namespace = namespace
        with self._explained("configure it in ~/.pyiceberg.yaml or by PYICEBERG_CATALOG__<NAME>__URI"):
            self._catalog: Catalog = load_catalog(catalog)
            self._catalog.create_namespace_if_not_exists(namespace)

    def open(self, name: str, schema: pa.Schema, *, by: str | None = None) -> Table:
        """Return a table, made first, partitioned by a column, if it is missing.

        Raises:
            SourceError: there is a table of this name with other columns.

        """
        from pyiceberg.exceptions import NoSuchTableError

        place = self._place(name)
        with self._explained():
            try:
                table = self._catalog.load_table(place)
            except NoSuchTableError:
                table = self._created(place, schema, by)
            if not _ONE_ATTEMPT.items() <= table.properties.items():
                with table.transaction() as changing:
                    changing.set_properties(_ONE_ATTEMPT)
            found, wanted = _columns(table.schema().as_arrow()), _columns(schema)
        if found != wanted:
            differing = ", ".join(sorted(name for name, _ in found.items() ^ wanted.items()))
            raise SourceError(
                f"the Iceberg table {place} has other columns than the ledger ({differing}): give another --namespace"
            )
        return table

    def _created(self, place: str, schema: pa.Schema, by: str | None) -> Table:
        from pyiceberg.transforms import IdentityTransform

        with self._catalog.create_table_transaction(place, schema, properties=_ONE_ATTEMPT) as making:
            if by is not None:
                with making.update_spec() as spec:
                    spec.add_field(by, IdentityTransform(), by)
        return self._catalog.load_table(place)

    def mark(self, table: Table) -> Mark:
        """Return the mark of a table.

        Raises:
            SourceError: its properties are damaged.

        """
        properties = table.properties
        if _LEDGER not in properties:
            return Mark()
        try:
            offsets = {int(shard): int(offset) for shard, offset in json.loads(properties[_OFFSETS]).items()}
            return Mark(ledger=properties[_LEDGER], batch=int(properties[_BATCH]), offsets=offsets)
        except (KeyError, ValueError, AttributeError):
            raise SourceError(
                f"the properties {_BATCH} and {_OFFSETS} of the Iceberg table {_name_of(table)} are damaged: "
                "give another --namespace"
            ) from None

    def append(self, table: Table, parts: Iterable[pa.Table], mark: Callable[[], Mark]) -> int:
        """Append parts, and the mark as it is when all were taken, in one commit; return the number of rows."""
        rows = 0
        with self._explained(), table.transaction() as writing:
            for part in parts:
                writing.append(part)
                rows += len(part)
            writing.set_properties(mark().properties)
        return rows

    def replace(self, table: Table, rows: pa.RecordBatchReader, mark: Mark) -> None:
        """Replace all rows of a table, in one commit with the mark."""
        with self._explained(), table.transaction() as writing:
            with warnings.catch_warnings():
                # Of a table without rows.
                warnings.filterwarnings("ignore", "Delete operation did not match any records")
                writing.overwrite(rows)
            writing.set_properties(mark.properties)

    def _place(self, name: str) -> str:
        return f"{self._namespace}.{name}"

    @contextmanager
    def _explained(self, remedy: str = "") -> Iterator[None]:
        """Raise the errors of a catalog and its storage as SourceError."""
        from pyiceberg.exceptions import CommitFailedException

        try:
            yield
        except SourceError:
            raise
        except CommitFailedException as error:
            raise SourceError(
                f"another writer has changed a table of the Iceberg catalog {self._name!r}: run it again"
            ) from error
        # A catalog can be a database, a service or a cloud's own, each with exceptions of its own.
        except Exception as error:
            message = f"the Iceberg catalog {self._name!r} cannot be used: {type(error).__name__}: {error}"
            raise SourceError(f"{message}: {remedy}" if remedy else message) from error


def _columns(schema: pa.Schema) -> dict[str, str]:
    """Return the types of columns by name. Types that are the same in Iceberg have the same text."""
    found = {}
    for column in schema:
        kind = str(column.type).replace("large_list", "list").replace("element:", "item:").replace(" not null", "")
        for other, plain in _PLAIN.items():
            kind = kind.replace(other, plain)
        found[column.name] = kind
    return found


def _name_of(table: Table) -> str:
    return ".".join(table.name())
