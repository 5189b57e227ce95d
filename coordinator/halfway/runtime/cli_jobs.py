"""Jobs from the terminal: started, watched to their end, and stopped by Ctrl-C."""

from __future__ import annotations

import secrets
import time
from typing import Any, Final

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from halfway.runtime.cli_remote import Remote, objects_of, path_of
from halfway.runtime.terminal import complain, printable, say

_LOOK_EVERY_S: Final = 0.5
_SAY_EVERY_S: Final = 5.0
_FAILED_SHOWN: Final = 20
_NOT_DONE: Final = ("failed", "replaced")
_GONE: Final = 404
_OVER: Final = frozenset({"done", "stopped", "failed"})


def preview(remote: Remote, job: dict[str, Any]) -> None:
    """Say how many a job would act on, and name the oldest."""
    told = remote.ask("POST", path_of("jobs"), body={**job, "preview": True})
    say(f"{printable(str(told.get('count')))} transactions match; nothing is done")
    for one in objects_of(told, "sample"):
        say(f"  {printable(str(one.get('id')))}  {printable(str(one.get('reason') or one.get('last_error') or ''))}")


def run(remote: Remote, job: dict[str, Any]) -> None:
    """Start a job and show its progress to its end; exit status 1 unless everything is done.

    If its instance ends, the same request is sent again, which does nothing twice.
    """
    job = {**job, "id": f"cli-{secrets.token_hex(6)}"}
    remote.ask("POST", path_of("jobs"), body=job)
    click.echo(f"job {job['id']} is accepted", err=True)
    try:
        told = _watched(remote, job)
    except KeyboardInterrupt:
        remote.ask("DELETE", path_of("jobs", job["id"]))
        complain(f"job {job['id']} is stopped; what was under way is finished, the rest is as it was")
        raise SystemExit(1) from None
    _report(remote, told)


def _watched(remote: Remote, job: dict[str, Any]) -> dict[str, Any]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    said_at = time.monotonic()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        shown = progress.add_task(job["action"], total=None)
        while True:
            told = remote.ask_patiently("GET", path_of("jobs", job["id"]), query={"limit": "1"}, expected=_GONE)
            if told is not None and told.get("error_code") == "unknown_job":
                complain("its instance has ended: the job is sent again, and goes on with what is left")
                # While another instance cannot be asked whether it has the job, this is refused: it comes again.
                remote.ask_patiently("POST", path_of("jobs"), body=job)
            elif told is not None:
                finished, found = told.get("finished") or 0, told.get("found")
                progress.update(shown, completed=finished, total=found)
                if told.get("state") in _OVER:
                    return told
                if not console.is_terminal and time.monotonic() - said_at > _SAY_EVERY_S:
                    said_at = time.monotonic()
                    click.echo(printable(f"{finished} of {'?' if found is None else found}"), err=True)
            time.sleep(_LOOK_EVERY_S)


def _report(remote: Remote, told: dict[str, Any]) -> None:
    results = told.get("results")
    counts = ", ".join(f"{count} {name}" for name, count in results.items()) if isinstance(results, dict) else ""
    say(f"{printable(str(told.get('state')))}: {printable(counts) or 'nothing matched'}")
    if told.get("detail"):
        complain(str(told["detail"]))
    if told.get("more"):
        complain(f"{told.get('found')} matched, and it took {told.get('most')}: run it again for the rest")
    wrong = [name for name in _NOT_DONE if isinstance(results, dict) and results.get(name)]
    for name in wrong:
        query = {"result": name, "limit": str(_FAILED_SHOWN)}
        for item in objects_of(remote.ask("GET", path_of("jobs", str(told.get("id"))), query=query), "items"):
            complain(f"{item.get('id')}: {item.get('error_code')}: {item.get('detail')}")
    if wrong or told.get("state") != "done":
        raise SystemExit(1)
