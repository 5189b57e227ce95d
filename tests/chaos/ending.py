"""The end of a run: the violations as text, and one JSON line."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from checker.judge import Verdict

SHOWN = 30


class Outcome(Protocol):
    """The result of a run."""

    @property
    def verdict(self) -> Verdict: ...

    @property
    def forged(self) -> list[str]: ...

    @property
    def sound(self) -> bool: ...

    def summary(self) -> Mapping[str, object]: ...


def end(outcome: Outcome, directory: Path, *, keep: bool, more: Iterable[str] = ()) -> int:
    """Print the violations, remove the directory if there are none unless `keep`, and return the exit status."""
    for finding in outcome.verdict.findings[:SHOWN]:
        say(f"{finding.count} {finding.rule} {finding.id}: {'; '.join(finding.evidence)}")
    for check in outcome.forged[:SHOWN]:
        say(f"no valid signature: {check}")
    for line in more:
        say(line)
    if outcome.sound and not keep:
        shutil.rmtree(directory, ignore_errors=True)
    print(json.dumps(outcome.summary()))  # noqa: T201  the result
    return 0 if outcome.sound else 1


def say(line: str) -> None:
    """Print a line for a person at a terminal."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201  this is its purpose
