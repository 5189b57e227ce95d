"""What stands beside the path and must not slow it: many groups, and many transactions that are pending.

A coordinator each, on one broker, loaded in turns, so that a machine whose pace changes changes all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final

import msgspec

from bench.filling import fill
from bench.plan import GROUP, SCENARIOS
from bench.rig import Rig
from bench.scenarios import Lengths, Line, Slice, line_of, slice_of, warm_up

_SCENARIOS: Final = ("single-64", "batch-100")
_WAITING: Final = "waiting"
_FAR: Final = {"first_check_after_s": 259_200.0, "max_age_s": 345_600.0}
"""Nothing of it is due while it is measured."""


class Beside(msgspec.Struct, frozen=True, kw_only=True):
    """How much stands beside the path, and how long each part takes; seconds."""

    groups: int = 1_000
    """Whose transactions come in turn."""
    pending: int = 1_000_000
    warm_up_s: float = 30.0
    lead_s: float = 1.0
    run_s: float = 24.0
    """That count of each scenario over each coordinator, all slices together."""
    slices: int = 4


class BesideLine(msgspec.Struct, frozen=True, kw_only=True):
    """A scenario, and what stood beside it."""

    beside: str
    line: Line


def beside(wanted: Beside, *, say: Callable[[str], None], bootstrap_servers: str | None = None) -> list[BesideLine]:
    """Measure scenarios over coordinators with nothing beside them, with many groups, and with many pending."""
    lengths = Lengths(lead_s=wanted.lead_s, run_s=wanted.run_s, raw_s=0, slices=wanted.slices)
    with ExitStack() as stack:
        plain = stack.enter_context(Rig(say=say, bootstrap_servers=bootstrap_servers, name="beside-nothing"))
        grouped, waiting = (
            stack.enter_context(Rig(say=say, bootstrap_servers=plain.bootstrap_servers, name=name))
            for name in ("beside-groups", "beside-pending")
        )
        grouped.broker_pid = waiting.broker_pid = plain.broker_pid
        say(f"{wanted.groups:,} groups are registered")
        groups = [GROUP, *(f"{GROUP}-{number}" for number in range(1, wanted.groups))]
        for name in groups[1:]:
            grouped.register(name)
        say(f"{wanted.pending:,} transactions are prepared")
        waiting.register(_WAITING, policy=_FAR)
        fill(waiting, _WAITING, wanted.pending)
        warm_up(plain, wanted.warm_up_s, say=say)
        kinds: list[tuple[str, Rig, Sequence[str]]] = [
            ("nothing", plain, (GROUP,)),
            (f"{wanted.groups:,} groups", grouped, groups),
            (f"{wanted.pending:,} pending", waiting, (GROUP,)),
        ]
        return [line for name in _SCENARIOS for line in _measured(name, kinds, lengths, say)]


def _measured(
    name: str, kinds: Sequence[tuple[str, Rig, Sequence[str]]], lengths: Lengths, say: Callable[[str], None]
) -> list[BesideLine]:
    scenario = next(one for one in SCENARIOS if one.name == name)
    slices: dict[str, list[Slice]] = {kind: [] for kind, _, _ in kinds}
    for turn in range(lengths.slices):
        say(f"{name}: turn {turn + 1} of {lengths.slices}")
        for kind, rig, groups in kinds if turn % 2 else kinds[::-1]:
            slices[kind].append(slice_of(rig, scenario, lengths, raw=False, groups=groups))
    return [BesideLine(beside=kind, line=line_of(name, scenario, found)) for kind, found in slices.items()]
