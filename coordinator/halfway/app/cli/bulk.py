"""`halfway transactions bulk`: one action on every transaction that a filter finds.

It lists what matches, sends that as a batch, and lists again, no faster than a rate. It knows only counts, the last
failures and the ids of one page. Started again, it goes on with what the filter still finds.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter, deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from halfway.app.cli.remote import Remote, objects_of, path_of
from halfway.app.terminal import complain, fail, printable, say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIN_RATE: Final = 0.1
MAX_RATE: Final = 500
RATE: Final = 50.0
"""The default rate, in transactions per second."""
STATES: Final = {
    "check": ("prepared",),
    "resume": ("parked",),
    "commit": ("prepared", "parked"),
    "rollback": ("prepared", "parked"),
}
"""The states of the transactions that each action is for."""
MAX_FAILURES: Final = 100
SAMPLE: Final = 20
_PATIENCE_S: Final = 300.0
"""How long it goes on without any result, while the coordinator restarts or a shard moves."""
_ITEM_PATIENCE_S: Final = 60.0
"""How long one transaction is tried, while others have results."""
_PAUSE_S: Final = 1.0
_LOOK_EVERY_S: Final = 0.1
_PRINT_EVERY_S: Final = 5.0
_ERROR: Final = 400
_MEANWHILE: Final = frozenset({404, 409, 410})
"""It was ended, parked or resumed since it was listed: there is nothing to do."""
_LATER: Final = frozenset({429, 503})
_NEEDS_OPERATOR: Final = frozenset({"topic_unavailable", "not_authorised"})
"""Errors with one of the statuses above that time does not mend."""


class BulkAction:
    """One action on all transactions that match."""

    def __init__(self, remote: Remote, action: str, filters: dict[str, str], remark: str, rate: float) -> None:
        """Take what to do; `filters` are the parameters of a list, without the state."""
        self._remote = remote
        self._action = action
        self._filters = filters
        self._remark = remark
        self._rate = rate
        self._size = max(1, min(round(rate), MAX_RATE))
        self._next_at = time.monotonic()
        self._result_at = time.monotonic()
        self._show: Callable[[], None] = lambda: None
        self.counts: Counter[str] = Counter()
        """The results by their names: `done`, `changed meanwhile` and `failed`."""
        self.failures: deque[str] = deque(maxlen=MAX_FAILURES)
        self.left: int | None = None
        """How many still match, None if the coordinator does not say it."""
        self.is_stopped = False

    def preview(self) -> None:
        """Print how many transactions match, and the oldest of them."""
        pages = [self._list(state, None, SAMPLE) for state in STATES[self._action]]
        say(f"{sum(page.get('count') or 0 for page in pages)} transactions match; nothing is done")
        for item in [item for page in pages for item in objects_of(page, "transactions")][:SAMPLE]:
            reason = printable(str(item.get("reason") or item.get("last_error") or ""))
            say(f"  {printable(str(item.get('id')))}  {reason}")

    def stop(self) -> None:
        """Send no further batch."""
        self.is_stopped = True

    def run(self, show: Callable[[], None]) -> None:
        """Act on everything that matches; `show` is called after each change of the counts."""
        self._show = show
        for state in STATES[self._action]:
            self._run(state)

    def _run(self, state: str) -> None:
        cursor: str | None = None
        settled: set[str] = set()
        """What has its result, of the transactions from the cursor on."""
        tried_at: dict[str, float] = {}
        while self._wait():
            # What is sent has matched a moment ago: what was done since, also by a batch whose answer was lost, is not
            # sent again.
            page = self._list(state, cursor, self._size)
            if not page:
                continue
            names = [str(item.get("id")) for item in objects_of(page, "transactions")]
            wanted = [name for name in names if name not in settled]
            count = page.get("count")
            self.left = count - len(names) + len(wanted) if isinstance(count, int) else None
            self._show()
            if wanted:
                self._next_at = time.monotonic() + len(wanted) / self._rate
                for name, answer in self._send(wanted):
                    if self._settle(name, answer, tried_at.setdefault(name, time.monotonic())):
                        settled.add(name)
                self._show()
            if settled.issuperset(names):
                cursor = page.get("next")
                settled.clear()
                tried_at.clear()
                if not cursor:
                    return
            elif not settled.issuperset(wanted):
                self._pause()

    def _list(self, state: str, cursor: str | None, limit: int) -> dict[str, Any]:
        """Return a page, empty if it has to be asked for again. The first one must come."""
        query = {**self._filters, "state": state, "limit": str(limit)} | ({} if cursor is None else {"cursor": cursor})
        if self.left is None and not self.counts:
            return self._remote.ask("GET", path_of("transactions"), query=query)
        answer = self._remote.ask_patiently("GET", path_of("transactions"), query=query)
        if answer is None:
            self._pause()
        return answer or {}

    def _send(self, names: list[str]) -> list[tuple[str, dict[str, Any]]]:
        """Return the answer to each item of a batch, none if the batch has no answer."""
        items = [{"id": name, "remark": self._remark} for name in names]
        kind = self._action
        if kind in ("commit", "rollback"):
            kind, items = "end", [{**item, "outcome": self._action} for item in items]
        headers = {"Halfway-Cause": "operator"} if kind == "end" else {}
        answer = self._remote.ask_patiently("POST", path_of("batch"), body={kind: items}, headers=headers)
        return [] if answer is None else list(zip(names, objects_of(answer, kind), strict=False))

    def _settle(self, name: str, answer: dict[str, Any], tried_at: float) -> bool:
        """Count the result of a transaction; return False if it is to be tried again."""
        found, given = answer.get("status"), answer.get("problem")
        status = found if isinstance(found, int) else _ERROR
        problem = given if isinstance(given, dict) else {}
        code = problem.get("error_code")
        if status < _ERROR:
            self.counts["done"] += 1
        elif status in _MEANWHILE:
            self.counts["changed meanwhile"] += 1
        elif status in _LATER and code not in _NEEDS_OPERATOR and time.monotonic() - tried_at < _ITEM_PATIENCE_S:
            return False
        else:
            self.counts["failed"] += 1
            self.failures.append(f"{name}: {code}: {problem.get('detail')}")
        self._result_at = time.monotonic()
        if self.left:
            self.left -= 1
        return True

    def _pause(self) -> None:
        """Let some time pass before the next try; end the command after a long time without a result."""
        now = time.monotonic()
        if now - self._result_at > _PATIENCE_S:
            self.report()
            fail(f"no result for {_PATIENCE_S:.0f} s: run the command again, and it acts on the rest")
        self._next_at = max(self._next_at, now + _PAUSE_S)

    def _wait(self) -> bool:
        """Return True when the next batch may be sent, False if it is stopped before."""
        while not self.is_stopped and (left := self._next_at - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_EVERY_S))
        return not self.is_stopped

    def report(self) -> None:
        """Print the counts and the last failures."""
        counts = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        say(f"{'stopped' if self.is_stopped else 'over'}: {counts or 'nothing to do'}")
        for failure in self.failures:
            complain(failure)
        if self.counts["failed"] > len(self.failures):
            complain(f"and {self.counts['failed'] - len(self.failures)} earlier failures")


def run(bulk: BulkAction, name: str) -> None:
    """Run it with its progress. The exit status is 1 unless it has come to its end without a failure."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    printed_at = time.monotonic()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(name, total=None)

        def show() -> None:
            nonlocal printed_at
            settled = bulk.counts.total()
            total = None if bulk.left is None else settled + bulk.left
            progress.update(bar, completed=settled, total=total)
            if not console.is_terminal and time.monotonic() - printed_at > _PRINT_EVERY_S:
                printed_at = time.monotonic()
                click.echo(f"{settled} of {'?' if total is None else total}", err=True)

        with _stopped_by_interrupt(bulk):
            bulk.run(show)
    bulk.report()
    if bulk.is_stopped:
        complain("run the command again, and it acts on the rest")
    if bulk.is_stopped or bulk.counts["failed"]:
        raise SystemExit(1)


@contextmanager
def _stopped_by_interrupt(bulk: BulkAction) -> Iterator[None]:
    """Stop after the batch in flight on the first Ctrl-C, and at once on the second."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets signals
        return

    def stop(*_: object) -> None:
        if bulk.is_stopped:
            raise KeyboardInterrupt
        bulk.stop()
        click.echo("stopping after this batch", err=True)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
