"""Jobs from the terminal: starts a job, shows its progress until it ends, and stops it on Ctrl-C."""

from __future__ import annotations

import secrets
import time
from typing import Any, Final

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from halfway.runtime.cli.remote import Remote, objects_of, path_of
from halfway.runtime.terminal import complain, printable, say

_POLL_S: Final = 0.5
_PRINT_EVERY_S: Final = 5.0
_MAX_SHOWN_ITEMS: Final = 20
_NOT_DONE: Final = ("failed", "replaced")
_NOT_FOUND: Final = 404
_FINAL_STATES: Final = frozenset({"done", "stopped", "failed"})


def preview(remote: Remote, job: dict[str, Any]) -> None:
    """Print how many transactions a job would act on, and the oldest of them."""
    answer = remote.ask("POST", path_of("jobs"), body={**job, "preview": True})
    say(f"{printable(str(answer.get('count')))} transactions match; nothing is done")
    for item in objects_of(answer, "sample"):
        say(f"  {printable(str(item.get('id')))}  {printable(str(item.get('reason') or item.get('last_error') or ''))}")


def run(remote: Remote, job: dict[str, Any]) -> None:
    """Start a job and show its progress until it ends. The exit status is 1 unless everything is done.

    If the instance of the job ends, the same request is sent again. Nothing is done twice.
    """
    job = {**job, "id": f"cli-{secrets.token_hex(6)}"}
    remote.ask("POST", path_of("jobs"), body=job)
    click.echo(f"job {job['id']} is accepted", err=True)
    try:
        status = _wait_for(remote, job)
    except KeyboardInterrupt:
        remote.ask("DELETE", path_of("jobs", job["id"]))
        complain(f"job {job['id']} is stopped; items under way are finished, and the rest is unchanged")
        raise SystemExit(1) from None
    _report(remote, status)


def _wait_for(remote: Remote, job: dict[str, Any]) -> dict[str, Any]:
    """Show the progress of a job until it ends; return its last status."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    printed_at = time.monotonic()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(job["action"], total=None)
        while True:
            query = {"limit": "1"}
            status = remote.ask_patiently("GET", path_of("jobs", job["id"]), query=query, expected=_NOT_FOUND)
            if status is not None and status.get("error_code") == "unknown_job":
                complain("the instance of the job has ended: the job is sent again, and continues with the rest")
                # This is refused, and sent again, until every instance can answer whether it has the job.
                remote.ask_patiently("POST", path_of("jobs"), body=job)
            elif status is not None:
                finished, found = status.get("finished") or 0, status.get("found")
                progress.update(bar, completed=finished, total=found)
                if status.get("state") in _FINAL_STATES:
                    return status
                if not console.is_terminal and time.monotonic() - printed_at > _PRINT_EVERY_S:
                    printed_at = time.monotonic()
                    click.echo(printable(f"{finished} of {'?' if found is None else found}"), err=True)
            time.sleep(_POLL_S)


def _report(remote: Remote, status: dict[str, Any]) -> None:
    results = status.get("results")
    counts = ", ".join(f"{count} {name}" for name, count in results.items()) if isinstance(results, dict) else ""
    say(f"{printable(str(status.get('state')))}: {printable(counts) or 'nothing matched'}")
    if status.get("detail"):
        complain(str(status["detail"]))
    if status.get("more"):
        complain(f"{status.get('found')} matched, but the job acts on {status.get('most')}: run it again for the rest")
    not_done = [name for name in _NOT_DONE if isinstance(results, dict) and results.get(name)]
    for name in not_done:
        query = {"result": name, "limit": str(_MAX_SHOWN_ITEMS)}
        for item in objects_of(remote.ask("GET", path_of("jobs", str(status.get("id"))), query=query), "items"):
            complain(f"{item.get('id')}: {item.get('error_code')}: {item.get('detail')}")
    if not_done or status.get("state") != "done":
        raise SystemExit(1)
