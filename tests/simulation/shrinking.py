"""A failing run, cut down to the shortest plan that still fails in the same way, and told in a dozen lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from tests.simulation.oracles import problems
from tests.simulation.run import Simulation
from tests.simulation.story import Plan

T = TypeVar("T")

_CALM: Final = {
    "net_late": 0.0, "net_lost": 0.0, "threads_late": 0.0, "endpoint_bad": 0.0, "kafka_s": 0.001, "markers_s": 0.001,
}  # fmt: skip
_LINES: Final = 40
_ID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f-]{21}")


def rule(problem: str) -> str:
    return problem.split(":", 1)[0]


def shrink(plan: Plan, found: Sequence[str], at_most: int = 200) -> tuple[Plan, list[str]]:
    """Return the shortest plan found that breaks the same rule, and what is wrong with it; run at most so many."""
    wanted, left = rule(found[0]), at_most
    best, best_found = plan, list(found)

    def still_fails(candidate: Plan) -> bool:
        nonlocal left, best, best_found
        if left <= 0:
            return False
        left -= 1
        now = [one for one in problems(Simulation(candidate).go()) if rule(one) == wanted]
        if now:
            best, best_found = candidate, now
        return bool(now)

    for name, calm in _CALM.items():
        if best.traits[name] != calm:
            still_fails(replace(best, traits={**best.traits, name: calm}))
    for count in range(1, best.instances):
        if still_fails(replace(best, instances=count)):
            break
    _leave_out(best.faults, lambda kept: still_fails(replace(best, faults=kept)))
    _leave_out(best.transactions, lambda kept: still_fails(replace(best, transactions=kept)))
    _leave_out(best.faults, lambda kept: still_fails(replace(best, faults=kept)))
    return best, best_found


def _leave_out(items: list[T], still_fails: Callable[[list[T]], bool]) -> None:
    """Leave out as many items as possible, first many together, then one by one."""
    size = len(items)
    while size:
        start = 0
        while start < len(items):
            kept = items[:start] + items[start + size :]
            if still_fails(kept):
                items = kept
            else:
                start += size
        size //= 2


def story(plan: Plan, found: Sequence[str]) -> Iterator[str]:
    """Tell what happens to the transactions that are wrong, and the faults; at most 40 lines."""
    simulation = Simulation(plan, keeps_trace=True).go()
    names = set(_ID.findall(" ".join(found)))
    short = {name: f"<{number}>" for number, name in enumerate(sorted(names), 1)}
    lines: list[Any] = []
    for line in simulation.trace or ():
        if " fault" in line or any(name in line for name in names):
            for name, other in short.items():
                line = line.replace(name, other)  # noqa: PLW2901 - the same line
            lines.append(line[:200])
    counts = f"{plan.instances} instances, {len(plan.transactions)} transactions, {len(plan.faults)} faults"
    yield f"seed {plan.seed}: {counts}"
    yield from lines[:_LINES]
    yield from found
