"""Measures the load beside many groups and beside many pending transactions, which must not slow it down.

Each case has its own coordinator on one broker. They are loaded in turn, so that a change of the machine's speed
affects all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final

import msgspec

from bench.measures.scenarios import Lengths, Line, Slice, line_of, slice_of, warm_up
from bench.plan import GROUP, SCENARIOS
from bench.system.prefill import fill
from bench.system.rig import Rig

_SCENARIOS: Final = ("single-64", "batch-100")
_WAITING: Final = "waiting"
_FAR: Final = {"first_check_after_s": 259_200.0, "max_age_s": 345_600.0}
"""No transaction is due during the measurement."""


class BesideOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of groups and pending transactions, and the lengths of the parts in seconds."""

    groups: int = 1_000
    """Groups, whose transactions take turns."""
    pending: int = 1_000_000
    warm_up_s: float = 30.0
    lead_s: float = 1.0
    run_s: float = 24.0
    """Measured seconds of each scenario over each coordinator, over all slices."""
    slices: int = 4


class BesideLine(msgspec.Struct, frozen=True, kw_only=True):
    """A scenario, and what existed beside it."""

    beside: str
    line: Line


def beside(
    options: BesideOptions, *, say: Callable[[str], None], bootstrap_servers: str | None = None
) -> list[BesideLine]:
    """Measure scenarios with nothing beside them, with many groups, and with many pending transactions."""
    lengths = Lengths(lead_s=options.lead_s, run_s=options.run_s, raw_s=0, slices=options.slices)
    with ExitStack() as stack:
        plain = stack.enter_context(Rig(say=say, bootstrap_servers=bootstrap_servers, name="beside-nothing"))
        grouped, waiting = (
            stack.enter_context(Rig(say=say, bootstrap_servers=plain.bootstrap_servers, name=name))
            for name in ("beside-groups", "beside-pending")
        )
        grouped.broker_pid = waiting.broker_pid = plain.broker_pid
        say(f"{options.groups:,} groups are registered")
        groups = [GROUP, *(f"{GROUP}-{number}" for number in range(1, options.groups))]
        for name in groups[1:]:
            grouped.register(name)
        say(f"{options.pending:,} transactions are prepared")
        waiting.register(_WAITING, policy=_FAR)
        fill(waiting, _WAITING, options.pending)
        warm_up(plain, options.warm_up_s, say=say)
        kinds: list[tuple[str, Rig, Sequence[str]]] = [
            ("nothing", plain, (GROUP,)),
            (f"{options.groups:,} groups", grouped, groups),
            (f"{options.pending:,} pending", waiting, (GROUP,)),
        ]
        return [line for name in _SCENARIOS for line in _measure(name, kinds, lengths, say)]


def _measure(
    name: str, kinds: Sequence[tuple[str, Rig, Sequence[str]]], lengths: Lengths, say: Callable[[str], None]
) -> list[BesideLine]:
    scenario = next(scenario for scenario in SCENARIOS if scenario.name == name)
    slices: dict[str, list[Slice]] = {kind: [] for kind, _, _ in kinds}
    for turn in range(lengths.slices):
        say(f"{name}: turn {turn + 1} of {lengths.slices}")
        for kind, rig, groups in kinds if turn % 2 else kinds[::-1]:
            slices[kind].append(slice_of(rig, scenario, lengths, raw=False, groups=groups))
    return [BesideLine(beside=kind, line=line_of(name, scenario, measured)) for kind, measured in slices.items()]
