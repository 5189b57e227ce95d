"""The output of the demo: progress while it runs, and tables at its end."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from rich import progress as bars
from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from examples.orders.consumers import Department
from examples.orders.judge import Evidence, Problem, orders_by_state, resolved_by
from examples.orders.plan import Fault

MEANINGS = {"awaiting": "awaiting payment"}
SHOWN_PROBLEMS = 20


class HasDepartments(Protocol):
    """The part of the demo that the progress reads."""

    departments: list[Department]


class Progress:
    """A line with the current step, and bars for placed orders, pending transactions and processed messages."""

    def __init__(self, console: Console, orders: int) -> None:
        """Prepare the display, which `with` shows."""
        self._console = console
        self._bars = bars.Progress(
            bars.TextColumn("{task.description}"), bars.BarColumn(30), bars.TextColumn("{task.fields[count]}")
        )
        self._step = Spinner("dots")
        self._live = Live(Group(self._step, self._bars), console=console, transient=True)
        self._placed_bar = self._bars.add_task("orders placed", total=orders, count="0")
        self._resolved_bar = self._bars.add_task("transactions resolved", total=orders, count="")
        self._messages_bar = self._bars.add_task("messages read", total=None, count="0")
        self._orders = orders
        self._placed = 0
        self._last_step = ""

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show_step(self, step: str) -> None:
        """Show the current step; without a terminal, print each step once on its own line."""
        self._step.update(text=step)
        if not self._console.is_terminal and step != self._last_step:
            self._console.print(step, highlight=False)
        self._last_step = step

    def placed(self) -> None:
        """Count an order whose request has ended."""
        self._placed += 1
        self._bars.update(self._placed_bar, completed=self._placed, count=f"{self._placed}/{self._orders}")

    def pending(self, count: int) -> None:
        """Show how many transactions have no outcome yet."""
        self._bars.update(self._resolved_bar, completed=self._orders - count, count=f"{count} pending")

    async def watch(self, demo: HasDepartments) -> None:
        """Show how many messages the departments have processed, until cancelled."""
        while True:
            counts = ", ".join(f"{department.processed} {department.topic}" for department in demo.departments)
            self._bars.update(self._messages_bar, count=counts)
            await asyncio.sleep(0.2)


def summary(
    evidence: Evidence, problems: Sequence[Problem], happened: Mapping[Fault, int], kills: int
) -> dict[str, Any]:
    """Return the result for the JSON line."""
    return {
        "agree": not problems,
        "orders": {state: count for state, count, _ in orders_by_state(evidence)},
        "messages": {topic: len(ids) for topic, ids in evidence.seen.items()},
        "effects": {topic: len(ids) for topic, ids in evidence.effects.items()},
        "dead_letters": {topic: len(ids) for topic, ids in evidence.dead.items()},
        "resolved_by": {cause: dict(states) for cause, states in resolved_by(evidence).items()},
        "faults": {fault.name.lower(): happened.get(fault, 0) for fault in Fault if fault is not Fault.NONE},
        "kills": kills,
        "problems": [
            {"where": problem.where, "what": problem.what, "orders": list(problem.orders)} for problem in problems
        ],
    }


def tables(
    console: Console, evidence: Evidence, problems: Sequence[Problem], happened: Mapping[Fault, int], kills: int
) -> None:
    """Print the faults of the run, and its results."""
    console.print(_faults(happened, kills))
    console.print(_orders(evidence))
    console.print(_resolved(evidence))
    if not problems:
        console.print(
            "[bold green]They agree:[/] each paid order is in each topic and took effect once, and nothing else did."
        )
        return
    console.print("[bold red]They do not agree:[/]")
    for problem in problems[:SHOWN_PROBLEMS]:
        orders = ", ".join(problem.orders[:5]) + (" …" if len(problem.orders) > 5 else "")  # noqa: PLR2004 - fits a line
        console.print(f"  {problem.where}: {len(problem.orders)} {problem.what}: {orders}", highlight=False)


def _faults(happened: Mapping[Fault, int], kills: int) -> Table:
    table = Table("What went wrong", "times", title="Faults", title_justify="left")
    for fault in Fault:
        if fault not in {Fault.NONE, Fault.KILLED}:
            table.add_row(fault.value, str(happened.get(fault, 0)))
    table.add_row(Fault.KILLED.value, str(kills))
    return table


def _orders(evidence: Evidence) -> Table:
    table = Table("Orders", "number", *evidence.seen, title="Orders and their messages", title_justify="left")
    for state, count, messages in orders_by_state(evidence):
        cells = (str(messages[topic]) for topic in evidence.seen)
        table.add_row(MEANINGS.get(state, state), str(count), *cells)
    doubled = {topic: sum(count - 1 for count in Counter(ids).values()) for topic, ids in evidence.seen.items()}
    table.add_section()
    table.add_row("messages seen twice", "", *(str(doubled[topic]) for topic in evidence.seen))
    table.add_row("took effect", "", *(str(len(evidence.effects.get(topic, ()))) for topic in evidence.seen))
    table.add_row("dead letters", "", *(str(len(evidence.dead.get(topic, ()))) for topic in evidence.seen))
    return table


def _resolved(evidence: Evidence) -> Table:
    table = Table("Resolved by", "committed", "rolled back", "pending", title="Transactions", title_justify="left")
    for cause, states in resolved_by(evidence).items():
        pending = states["prepared"] + states["parked"]
        table.add_row(cause, str(states["committed"]), str(states["rolled_back"]), str(pending))
    return table
