"""What every run's report is made with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console


def counts(found: Mapping[str, int]) -> str:
    """Show how often there was what."""
    return ", ".join(f"{count} {name}" for name, count in sorted(found.items())) or "none"


def write_json(path: Path, found: Any, say: Callable[[str], None]) -> None:
    """Write what was found, indented for a person, in whole, and say where it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    say(f"written to {path}")


def wide_console() -> Console:
    """Return a console that does not fold a table where it writes to a file."""
    console = Console()
    return console if console.is_terminal else Console(width=180)
