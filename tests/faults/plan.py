"""What is to happen at fault points, and what has been reached: two files that a test and its coordinator share."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from tests.faults.points import POINTS

Action = Literal["kill", "doom", "pause", "delay", "fail", "note", "skip", "initialise"]
REACHED_WITHIN_S = 180.0
_LOOK_AGAIN_S = 0.02


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What to do at a point; see the package's docstring."""

    point: str
    action: Action = "note"
    hit: int = 1
    times: int = 1
    seconds: float = 0.0
    thread: str = ""
    code: int | None = None
    fatal: bool = False
    retriable: bool = False
    txn_requires_abort: bool = False

    def acts_at(self, hit: int) -> bool:
        """Whether it acts at this hit."""
        return hit >= self.hit and (self.times == 0 or hit < self.hit + self.times)


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """One hit of a point of the plan; `action` is None where nothing was due at that hit."""

    point: str
    hit: int
    action: Action | None
    pid: int
    thread: str
    at_ms: int


class Faults:
    """The faults of one coordinator, in a directory of their own: `plan.json`, `reached.jsonl`, `release`."""

    def __init__(self, directory: Path) -> None:
        """Use a directory; it is made where it is not there."""
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.plan_path = directory / "plan.json"
        self.reached_path = directory / "reached.jsonl"
        self.release_path = directory / "release"
        self.planned: tuple[Fault, ...] = ()

    # --- the test's side

    def plan(self, *faults: Fault) -> None:
        """Have just these faults from now on; what was reached before is forgotten."""
        unknown = [fault.point for fault in faults if fault.point not in POINTS]
        assert not unknown, f"not in tests/faults/points.py: {unknown}"
        self.release_path.unlink(missing_ok=True)
        self.reached_path.unlink(missing_ok=True)
        self._hold(faults)

    def clear(self) -> None:
        """Have no faults from now on; what was reached can still be asked for, and what pauses goes on."""
        self.release()
        self._hold(())

    def _hold(self, faults: Sequence[Fault]) -> None:
        self.planned = tuple(faults)
        new = self.plan_path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(self.planned))
        new.replace(self.plan_path)

    def release(self) -> None:
        """Let everything that pauses go on, now and until the next plan."""
        self.release_path.touch()

    def reached(self, point: str | None = None, *, acted: bool = False) -> list[Reached]:
        """Give the hits of a point, or of all that are planned; with `acted` only those at which something was done."""
        if not self.reached_path.exists():
            return []
        hits = [msgspec.json.decode(line, type=Reached) for line in self.reached_path.read_bytes().splitlines()]
        return [hit for hit in hits if (point is None or hit.point == point) and (not acted or hit.action is not None)]

    def until_reached(self, point: str, *, times: int = 1, within_s: float = REACHED_WITHIN_S) -> list[Reached]:
        """Wait until something was done so often at a point; blocks: from a coroutine through `asyncio.to_thread`."""
        deadline = time.monotonic() + within_s
        while len(hits := self.reached(point, acted=True)) < times:
            assert time.monotonic() < deadline, f"{point} was reached {len(hits)} times in {within_s:g} s, not {times}"
            time.sleep(_LOOK_AGAIN_S)
        return hits
