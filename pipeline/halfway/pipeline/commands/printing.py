"""Tables that commands print."""

from __future__ import annotations

import click


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """Print rows in columns, the first of text and the others of numbers."""
    # Names come from topics that others can write to: their control characters must not reach the terminal.
    lines = [[cell if cell.isprintable() else repr(cell)[1:-1] for cell in row] for row in [header, *rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for row in lines:
        first, *others = row
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        click.echo("  ".join(cells).rstrip())
