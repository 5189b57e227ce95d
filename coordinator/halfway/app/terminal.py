"""Input and output of a terminal: finite numbers, text of other origin made safe, and tables."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NoReturn

import click
from rich.cells import cell_len

_GAP: Final = "  "
_MAX_ALIGNED: Final = 64
"""Columns align up to this width. A longer value shifts only the rest of its own row."""
_MAX_SHOWN: Final = 2_000
"""Shown characters of one value; ids, groups, topics and times are far shorter."""
_ABSENT: Final = "-"


class FiniteRange(click.FloatRange):
    """A number in a range, without `nan` and `inf`, which click would accept (`inf` if the range is open)."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


def printable(text: str) -> str:
    r"""Return the text with control, invisible and reordering characters escaped, such as `\x1b` or `\u202e`."""
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode("ascii")


def json_line(value: object) -> str:
    """Return the whole value as JSON on one line of printable ASCII."""
    return json.dumps(value).replace("\x7f", "\\u007f")


def say(line: str) -> None:
    """Print one line on standard output. If that fails, the command ends with status 1."""
    try:
        click.echo(line)
    except BrokenPipeError:
        raise  # click ends the command silently, because the reader has closed the pipe
    except OSError as error:
        fail(f"cannot write the output: {error.strerror}")


def complain(message: str) -> None:
    """Print a message on standard error, with its line breaks."""
    click.echo("\n".join(map(printable, f"halfway: {message}".split("\n"))), err=True)


def fail(message: str) -> NoReturn:
    """Print a message on standard error, and end the command with status 1."""
    complain(message)
    raise SystemExit(1)


def say_rows(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table without wrapping or cutting rows, so that a row can be copied from a narrow terminal, and piped."""
    lines = [list(columns), *([_cell(value) for value in row] for row in rows)]
    widths = [max(_width(line[column]) for line in lines) for column in range(len(columns))]
    for line in lines:
        padded = (cell + " " * (width - cell_len(cell)) for cell, width in zip(line, widths, strict=True))
        say(_GAP.join(padded).rstrip())


def say_fields(fields: Mapping[str, object]) -> None:
    """Print one field per line. Each item of a list of objects has its own line."""
    width = max((_width(printable(name)) for name in fields), default=0)
    for name, value in fields.items():
        printable_name = printable(name)
        label = printable_name + " " * (width - cell_len(printable_name))
        for item in _items(value):
            say(f"{label}{_GAP}{_cell(item)}".rstrip())
            label = " " * width


def _items(value: object) -> list[object]:
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return value
    return [value]


def _width(cell: str) -> int:
    return min(cell_len(cell), _MAX_ALIGNED)


def _cell(value: object) -> str:
    if value is None or value == "":
        return _ABSENT
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    more = len(text) - _MAX_SHOWN
    if more <= 0:
        return printable(text)
    return f"{printable(text[:_MAX_SHOWN])}… ({more:,} more characters: --json shows all)"
