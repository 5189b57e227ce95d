"""Helpers for the reports of all runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console


def counts(counted: Mapping[str, int]) -> str:
    """Return counts as text."""
    return ", ".join(f"{count} {name}" for name, count in sorted(counted.items())) or "none"


def write_json(path: Path, result: Any, say: Callable[[str], None]) -> None:
    """Write the result as indented JSON, and print the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    say(f"written to {path}")


def wide_console() -> Console:
    """Return a console that does not fold tables when it writes to a file."""
    console = Console()
    return console if console.is_terminal else Console(width=180)
