"""What both engines need: how a frame, a merge and progress are described, and the SQL that the two write differently.

A table of an engine is a `Frame`, whose content only that engine reads.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any, Final, NamedTuple

EVERY_S: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class Doing:
    """What an engine does now, and how much of it is done, if that is known."""

    what: str
    done: float = 0
    total: float = 0
    unit: str = ""


@contextmanager
def told(job: str, doing: Callable[[], Doing | None]) -> Iterator[None]:
    """Say on stderr, until the end, what a job does."""
    ended = Event()

    def tell() -> None:
        began, before = time.monotonic(), Doing(what="")
        while not ended.wait(EVERY_S):
            now = doing()
            if now is None:
                continue
            if (now.what, now.total) != (before.what, before.total) or now.done < before.done:
                began = time.monotonic() - EVERY_S
            before = now
            sys.stderr.write(f"halfway-pipeline {job}: {line(now, time.monotonic() - began)}\n")
            sys.stderr.flush()

    thread = Thread(target=tell, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def line(now: Doing, seconds: float) -> str:
    """Return a line about work that has taken a time."""
    if not now.total:
        return f"{now.what}: {now.done:,.0f} {now.unit}, {seconds:.0f} s so far"
    share = min(1.0, now.done / now.total)
    amount = f"{now.done:,.0f} of {now.total:,.0f} {now.unit}" if now.unit else f"{share:.0%}"
    left = f", about {seconds * (1 - share) / share:,.0f} s left" if share else ""
    return f"{now.what}: {amount}{left}"


Frame = Any
"""A table of an engine: Spark's DataFrame, or the name of one of DuckDB's."""
INPUT: Final = re.compile(r"\$([a-z_]+)")


class Once(NamedTuple):
    """A number of an application. A Delta table holds the last one; a commit with one that it holds changes nothing."""

    application: str
    number: int


@dataclass(frozen=True, kw_only=True)
class Merge:
    """How a row `new` changes the row `old` of a table, as SQL."""

    same: str
    deletes: str
    replaces: str
    begins: str
    deciding: tuple[str, ...] = ()
    """Columns of the changes that the table does not have."""


MACROS: Final = (
    "unix_millis(time) as epoch_ms(time)",
    "timestamp_millis(millis) as make_timestamptz(millis * 1000)",
    # Used for hexadecimal digits only.
    "conv(digits, from_base, to_base) as '0x' || digits",
    "sha2(bytes, bits) as sha256(bytes)",
    "shiftright(number, bits) as number >> bits",
    "percentile(number, share) as quantile_cont(number, share)",
    "size(list) as len(list)",
    "collect_list(item) as list(item) filter (where item is not null)",
    "collect_set(item) as list(distinct item) filter (where item is not null)",
    "sort_array(list) as coalesce(list_sort(list), [])",
    "array_compact(list) as list_filter(list, lambda item: item is not null)",
    "xxhash64(text) as cast(hash(text) >> 1 as bigint)",
)
"""Functions of Spark's that DuckDB knows by another name, as its macros. Their hashes differ: a hash is of one run."""


def number_of(text: str) -> str:
    """Return a number that represents a text in this run: 64 bits of a hash, null for null."""
    return f"case when {text} is not null then xxhash64({text}) end"


class Dialect:
    """The expressions that the two engines write differently. Functions of Spark's alone are in `MACROS`."""

    def __init__(self, *, spark: bool) -> None:
        self._spark = spark
        self.array = self._either("array", "list_value")
        """The function that returns an array of its arguments."""

    def _either(self, spark: str, duckdb: str) -> str:
        return spark if self._spark else duckdb

    def header(self, name: str) -> str:
        """Return the last value of a header as text, null if the header is missing or its value is not UTF-8."""
        last = self._either(
            f"try_element_at(filter(headers, each -> each.key = '{name}'), -1)",
            f"list_filter(headers, lambda each: each.key = '{name}')[-1]",
        )
        return self.text(f"{last}.value")

    def text(self, binary: str) -> str:
        """Return bytes as text, null if they are not UTF-8."""
        return self._either(f"try_validate_utf8(cast({binary} as string))", f"try(decode({binary}))")

    def matches(self, text: str, pattern: str) -> str:
        """Return whether the whole text matches a pattern. The pattern has no quotes."""
        return self._either(rf"({text} rlike r'\A(?:{pattern})\z')", f"regexp_full_match({text}, '{pattern}')")

    def own_headers(self) -> str:
        """Return the producer's own headers as the bytes that are hashed (docs/protocol.md#topics)."""
        spark = """filter(headers, each -> not startswith(each.key, 'halfway-')),
            each -> concat(lower(hex(each.key)), '=', coalesce(lower(hex(each.value)), '-'))"""
        duckdb = """list_filter(headers, lambda each: not starts_with(each.key, 'halfway-')),
            lambda each: lower(hex(each.key)) || '=' || coalesce(lower(hex(each.value)), '-')"""
        return self._either(
            f"cast(array_join(transform({spark}), ',') as binary)",
            f"encode(array_to_string(list_transform({duckdb}), ','))",
        )

    def struct(self, **fields: str) -> str:
        """Return a struct of named expressions."""
        spark = ", ".join(f"'{name}', {value}" for name, value in fields.items())
        duckdb = ", ".join(f'"{name}" := {value}' for name, value in fields.items())
        return self._either(f"named_struct({spark})", f"struct_pack({duckdb})")

    def numbered(self, array: str, number: str, element: str) -> str:
        """Return select items that make a row of each element: its number from 0, and the element."""
        return self._either(
            f"posexplode({array}) as ({number}, {element})",
            f"generate_subscripts({array}, 1) - 1 as {number}, unnest({array}) as {element}",
        )

    def any(self, array: str, condition: str) -> str:
        """Return whether an element of an array, named `one`, meets a condition."""
        return self._either(
            f"exists({array}, one -> {condition})",
            f"coalesce(len(list_filter({array}, lambda one: {condition})) > 0, false)",
        )

    def xor(self, one: str, other: str) -> str:
        """Return the bits in which two numbers differ."""
        return self._either(f"(({one}) ^ ({other}))", f"xor({one}, {other})")

    def folded(self, count: str, first: str, step: str) -> str:
        """Return the last value of `so_far`: from `first`, by `step` for each `number` from 0 below a count."""
        numbers = (
            f"case when {count} > 0 then sequence(0, cast({count} as int) - 1) else cast(array() as array<int>) end"
        )
        return self._either(
            f"aggregate({numbers}, cast({first} as bigint), (so_far, number) -> {step})",
            f"list_reduce(range(cast({count} as bigint)), lambda so_far, number: {step}, cast({first} as bigint))",
        )


SPARK: Final = Dialect(spark=True)
DUCKDB: Final = Dialect(spark=False)
