"""The process: its log, its limits, its garbage collection, its stop, and the death of a thread or task."""

import asyncio
import gc
import json
import os
import resource
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from unittest.mock import Mock

import pytest
from structlog.testing import capture_logs

from halfway.app.serve import app
from halfway.app.serve.backend import STOP_S
from halfway.app.serve.process import (
    Deaths,
    collect_periodically,
    collect_rarely,
    connections_within,
    freeze_existing,
    raise_limit,
    supervised,
)
from halfway.app.settings import load
from halfway.http.server.server import MAX_CONNECTIONS
from tests.support.waiting import GENEROUS_S, until_true

SCRIPT = """
import logging, structlog
from pydantic import SecretStr
from halfway.app.serve.process import configure
configure(level="info")
log = structlog.get_logger("test")
log.info("joined", sasl_password="open sesame", given=SecretStr("open sesame"), shard=3)
log.debug("not shown")
logging.getLogger("library").warning("a library speaks")
"""


def log_of(script: str) -> str:
    """Return the log of a program."""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=GENEROUS_S
    )
    return done.stderr


def shown_on_terminal(script: str) -> str:
    """Return what a program writes to its terminal."""
    terminal, given = os.openpty()
    # What a program writes stays in the terminal's buffer until it is read.
    plain = {**os.environ, "NO_COLOR": "1"}
    subprocess.run([sys.executable, "-c", script], stderr=given, check=True, timeout=GENEROUS_S, env=plain)
    os.close(given)
    shown = b""
    with os.fdopen(terminal, "rb", buffering=0) as reading, suppress(OSError):  # nobody writes to it any more
        while part := reading.read(65_536):
            shown += part
    return shown.decode().replace("\r\n", "\n")


def test_secrets_are_redacted_by_name_and_by_type() -> None:
    """Every line is one JSON object, also those of libraries; the value of a secret occurs nowhere."""
    told = log_of(SCRIPT)
    lines = [json.loads(line) for line in told.splitlines()]
    assert [line["event"] for line in lines] == ["joined", "a library speaks"]
    assert lines[0]["shard"] == 3
    assert "open sesame" not in told


CONSOLE = """
import structlog
from halfway.app.serve.process import configure
configure(level="info")
log = structlog.get_logger("test")
log.info("refused", remark="\\x1b]0;title\\x07 \\u202egnp.exe\\na line of its own", errors=["\\x1b[31m"])
def fail(password):
    raise ValueError("\\x1b[31mred")
try:
    fail("open sesame")
except ValueError:
    log.exception("failed")
"""


def test_a_start_that_fails_keeps_its_line_breaks_on_a_terminal() -> None:
    """Elsewhere it is a line of JSON like any other."""
    script = "from halfway.app.serve.process import log_start_failure as fail; fail('one\\ntwo')"
    assert shown_on_terminal(script) == "halfway: one\ntwo\n"


def test_the_terminal_obeys_nothing_in_a_field_and_shows_no_local_variable() -> None:
    """Fields and errors contain text of clients and endpoints; the variables of a traceback may contain secrets."""
    told = shown_on_terminal(CONSOLE)
    assert all(line.isprintable() for line in told.split("\n")), told
    first, *traceback = told.splitlines()
    for shown in (r"x1b]0;title", r"x07 ", r"u202egnp.exe", r"na line of its own"):
        assert "\\" + shown in first
    assert any("ValueError" in line for line in traceback)
    assert "sesame" not in told.replace('fail("open sesame")', "")


@pytest.mark.parametrize("limit", [256, 1_024, 4_096, 20_000, 1_048_576])
def test_files_are_left_for_kafka_however_many_connect(limit: int) -> None:
    held = connections_within(limit)
    assert 0 < held <= MAX_CONNECTIONS
    assert limit - held >= limit // 3


def test_where_there_is_room_the_bound_is_the_usual_one() -> None:
    assert connections_within(65_536) == MAX_CONNECTIONS
    assert connections_within(4_096) < 4_096 - 1_000


def test_the_soft_limit_is_raised_as_far_as_it_may_be() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        held = raise_limit()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert hard == before[1]
        assert soft == min(hard, 65_536) or hard == resource.RLIM_INFINITY
        assert held == connections_within(soft)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


IN_FLIGHT = 20_000


@pytest.fixture
def searched_generations() -> Iterator[list[int]]:
    """Provide the list of generations that the collector has searched; restore its settings."""
    thresholds = gc.get_threshold()
    gc.collect()
    seen: list[int] = []

    def record(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(record)
    yield seen
    gc.callbacks.remove(record)
    gc.set_threshold(*thresholds)


def test_a_few_full_batches_in_flight_are_looked_through_once_at_most(searched_generations: list[int]) -> None:
    """Transactions in flight are alive: repeated searches for cycles among them find nothing."""
    collect_rarely()
    in_flight = [[number] for number in range(IN_FLIGHT)]
    assert len(in_flight) == IN_FLIGHT
    assert len(searched_generations) <= 1


def test_cycles_are_still_freed(searched_generations: list[int]) -> None:
    """Errors and closed connections leave cycles, which must not accumulate."""
    collect_rarely()
    for _ in range(10 * IN_FLIGHT):
        cycle: list[object] = []
        cycle.append(cycle)
    assert searched_generations


class Knot:
    def __init__(self) -> None:
        self.me = self


@pytest.mark.usefixtures("searched_generations")
async def test_a_cycle_is_freed_within_its_time_when_little_else_is_made() -> None:
    """An idle coordinator frees a client in a cycle, with its threads and connections."""
    collect_rarely()
    knot = weakref.ref(Knot())
    assert knot() is not None
    looking = asyncio.create_task(collect_periodically(0.01))
    await until_true(lambda: knot() is None)
    looking.cancel()


def test_what_stands_is_not_looked_through_again(searched_generations: list[int]) -> None:
    """Modules and the records of a recovery never become garbage."""
    collect_rarely()
    standing = [[number] for number in range(IN_FLIGHT)]
    frozen_before = gc.get_freeze_count()
    freeze_existing()
    assert gc.get_freeze_count() >= frozen_before + len(standing)
    assert searched_generations[-1] == 2


WENT_ON = 3


def test_the_grace_of_the_compose_file_is_longer_than_a_stop() -> None:
    """Docker's and Kubernetes' usual 30 s are enough too, with a margin."""
    assert load({}).drain_s + STOP_S <= 30 - 5


def test_a_stop_during_the_imports_is_no_failure() -> None:
    """SIGTERM comes while `halfway.app.cli.main` is found: before any of it runs."""
    program = f"""
import os, signal, sys
from halfway.app.cli import __main__ as entry

class Found:
    def find_spec(self, name, path, target=None):
        if name == "halfway.app.cli.main":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Found())
sys.argv = ["halfway", "serve"]
entry.main()
sys.exit({WENT_ON})
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


ALONE = {
    "HALFWAY_KAFKA__BOOTSTRAP_SERVERS": "127.0.0.1:1",
    "HALFWAY_HOST": "127.0.0.1",
    "HALFWAY_PORT": "0",
    "HALFWAY_HEALTH_HOST": "127.0.0.1",
    "HALFWAY_HEALTH_PORT": "0",
}


async def die() -> None:
    raise RuntimeError("by a test")


def die_on_a_thread() -> None:
    threading.Thread(target=asyncio.run, args=[die()], name="halfway-victim", daemon=True).start()


def die_as_a_task() -> None:
    supervised(die())


@pytest.mark.parametrize(
    "kill, event, field", [(die_on_a_thread, "thread_died", "thread"), (die_as_a_task, "task_died", "task")]
)
def test_a_death_is_logged_and_ends_the_process_with_an_error(
    kill: Callable[[], None], event: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops as after SIGTERM, with a status after which every restart policy starts it again."""

    async def wait_for_topics(*_: Any) -> None:
        kill()
        await asyncio.Event().wait()

    monkeypatch.setattr(app, "configure", lambda **_: None)
    monkeypatch.setattr(app, "collect_rarely", lambda: None)
    monkeypatch.setattr("halfway.app.serve.backend.wait_for_topics", wait_for_topics)
    monkeypatch.setattr(threading, "Timer", Mock())  # it would end the tests if the stop hung
    hook = threading.excepthook
    with capture_logs() as logs:
        assert app.run(load(ALONE)) == 1
    [death] = [entry for entry in logs if entry["event"] == event]
    assert death[field] == {"thread": "halfway-victim", "task": "die"}[field]
    assert "stopped" in [entry["event"] for entry in logs]
    assert threading.excepthook is hook


async def test_what_python_can_raise_to_nobody_is_logged_without_its_text() -> None:
    """A client can cause it, as by a name in a TLS handshake that is not ASCII."""

    class Fails:
        def __del__(self) -> None:
            raise LookupError("a client's text")

    former = sys.unraisablehook
    deaths = Deaths(Mock())
    deaths.watch()
    try:
        with capture_logs() as logs:
            Fails()
    finally:
        deaths.close()
    assert [(entry["event"], entry["error"]) for entry in logs] == [("error_ignored", "LookupError")]
    assert "text" not in str(logs)
    assert sys.unraisablehook is former


async def test_a_background_task_that_is_cancelled_has_not_died() -> None:
    """A stop cancels all of them."""
    reported: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reported.append(context))
    task = supervised(asyncio.sleep(3600))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    loop.set_exception_handler(None)
    assert reported == []
