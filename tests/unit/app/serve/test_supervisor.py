"""What a supervisor does about workers that die, hang or cannot start, at a reload and after a pause."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from halfway.app.serve import supervisor
from halfway.app.serve.supervisor import Supervisor
from halfway.app.settings import Settings, load
from halfway.protocol.errors import ConfigurationError
from tests.support.waiting import until_true

HANGS_S = 3.0
NEVER_READY = 1
"""The `max_pending` with which the script does not get ready."""
WORKER = """
import base64, json, os, pickle, select, signal, socket, sys, time
how, link = sys.argv[1], socket.socket(fileno=int(sys.argv[4]))
lines = link.makefile("rb", 0)  # unbuffered, or select would not see what was read beyond a line
settings = pickle.loads(base64.b64decode(json.loads(lines.readline())["settings"]))
with open(sys.argv[2], "a") as starts:
    print(os.getpid(), settings.host, settings.max_pending, file=starts, flush=True)
is_first = len(open(sys.argv[2]).readlines()) == 1

def say(**message):
    link.sendall(json.dumps(message).encode() + b"\\n")

if how == "refuses":
    say(type="failed", detail="the reason")
if how in ("refuses", "fails"):
    sys.exit(1)
if how == "crashes" and is_first:
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    say(type="alive", ready=settings.max_pending > 1, pages=1)
    if how == "hangs" and is_first or how == "stays":
        time.sleep(600)
    while select.select([link], [], [], 0.1)[0]:
        if json.loads(lines.readline() or b'{"type": "stop"}')["type"] == "stop":
            os._exit(0)  # at once: one that is slow to end would be taken for one that hangs
"""


def settings_of(max_pending: int, host: str = "127.0.0.1") -> Settings:
    return load(
        {
            "HALFWAY_KAFKA__BOOTSTRAP_SERVERS": "127.0.0.1:1",
            **{f"HALFWAY_{name}": "0" for name in ("PORT", "HEALTH_PORT", "DRAIN_S")},
            "HALFWAY_HOST": host,
            "HALFWAY_HEALTH_HOST": "127.0.0.1",
            "HALFWAY_MAX_PENDING": str(max_pending),
        }
    )


class Service:
    """A supervisor with one worker, the settings that a reload would read, and what it has logged."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[EventDict] = []
        self.settings = settings_of(10)
        self._script, self._file = folder / "worker.py", folder / "starts"
        self._script.write_text(WORKER)
        self._monkeypatch = monkeypatch

    def run(self, how: str = "serves") -> asyncio.Task[int]:
        """Run it with workers that serve, or behave as the script knows."""
        self.behave(how)
        return asyncio.create_task(Supervisor(self.settings, lambda: self.settings).run())

    def behave(self, how: str) -> None:
        """Let workers that are started from now on behave so."""
        self._monkeypatch.setattr(sys, "orig_argv", ["python", str(self._script), how, str(self._file)])

    def starts(self) -> list[tuple[int, str, int]]:
        """Return the process id, host and `max_pending` of each worker that was started."""
        lines = [line.split() for line in self._file.read_text().splitlines()] if self._file.exists() else []
        return [(int(pid), host, int(most)) for pid, host, most in lines]

    async def started(self, count: int) -> None:
        await until_true(lambda: len(self.starts()) == count, what=f"{count} workers were started")

    async def reload(self, event: str = "reloaded") -> None:
        """Send SIGHUP, and wait until this was logged."""
        os.kill(os.getpid(), signal.SIGHUP)
        await until_true(lambda: self.said(event), what=f"the reload is over: {event}")

    def said(self, event: str) -> list[EventDict]:
        return [line for line in self.log if line["event"] == event]


Running = Callable[..., AbstractAsyncContextManager[Service]]


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    """Return a service that takes no slow worker for one that hangs."""
    times = {"_HANGS_S": 600.0, "_STOP_S": 600.0, "_FIRST_PAUSE_S": 0.01, "_LONGEST_PAUSE_S": 0.1}
    for name, seconds in times.items():
        monkeypatch.setattr(supervisor, name, seconds)
    return Service(tmp_path, monkeypatch)


@pytest.fixture
def run(service: Service) -> Running:
    """Return a context with the service running; it ends with SIGTERM, and must end with this status."""

    @asynccontextmanager
    async def running(how: str = "serves", *, status: int = 0) -> AsyncIterator[Service]:
        with capture_logs() as service.log:
            task = service.run(how)
            await until_true(lambda: service.starts() or task.done(), what="a worker was started")
            yield service
            assert not task.done()
            os.kill(os.getpid(), signal.SIGTERM)
            assert await task == status

    return running


@pytest.mark.parametrize(
    "how, event, status", [("crashes", "worker_died", -signal.SIGKILL), ("hangs", "worker_killed", None)]
)
async def test_a_worker_that_crashes_or_hangs_is_replaced(
    run: Running, monkeypatch: pytest.MonkeyPatch, how: str, event: str, status: int | None
) -> None:
    monkeypatch.setattr(supervisor, "_HANGS_S", HANGS_S if how == "hangs" else 600.0)
    async with run(how) as service:
        await service.started(2)
    line, *_ = service.said(event)  # a slow machine may let the second one hang too
    assert (line["worker"], line.get("status")) == (0, status)


@pytest.mark.parametrize("how, why", [("refuses", "the reason"), ("fails", "the log says why")])
async def test_a_first_worker_that_cannot_start_ends_the_service(service: Service, how: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        await service.run(how)
    assert len(service.starts()) == 1


async def test_a_worker_that_does_not_stop_is_killed(run: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_STOP_S", 1.0)
    async with run("stays", status=1) as service:
        pass
    assert [line["worker"] for line in service.said("worker_killed")] == [0]


async def test_a_successor_that_cannot_start_changes_nothing(run: Running) -> None:
    async with run() as service:
        service.behave("refuses")
        await service.reload("reload_failed")
        (first, *_), _ = service.starts()
        assert [line["error"] for line in service.said("worker_not_started")] == ["the reason"]
        os.kill(first, 0)
        service.behave("serves")
        await service.reload()
        assert len(service.starts()) == 3
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)


async def test_a_worker_that_replaces_another_has_the_settings_as_last_read(run: Running) -> None:
    """A file that is being edited is read by a reload only."""
    async with run() as service:
        service.settings = settings_of(20)
        os.kill(service.starts()[0][0], signal.SIGKILL)
        await service.started(2)
        await service.reload()
        os.kill(service.starts()[2][0], signal.SIGKILL)
        await service.started(4)
        assert [most for _, _, most in service.starts()] == [10, 10, 20, 20]


async def test_a_reload_gives_up_one_whose_worker_does_not_get_ready(run: Running) -> None:
    """For example because of a wrong address of Kafka: the next SIGHUP reads the settings again."""
    async with run() as service:
        service.settings = settings_of(NEVER_READY)
        os.kill(os.getpid(), signal.SIGHUP)
        await service.started(2)
        assert not service.said("reload_failed")
        service.settings = settings_of(20)
        await service.reload()
        [failed] = service.said("reload_failed")
        assert "not ready yet" in failed["error"]
        assert [most for _, _, most in service.starts()] == [10, NEVER_READY, 20]


async def test_a_reload_moves_no_port_and_judges_access_by_where_it_is(run: Running) -> None:
    """The sockets stay where they are, so settings without keys are no safer because they name loopback."""
    async with run() as service:
        service.settings = settings_of(20, host="127.0.0.2")
        await service.reload()
        assert [host for _, host, _ in service.starts()] == ["127.0.0.1"] * 2
        assert [line["setting"] for line in service.said("setting_not_reloaded")] == ["HALFWAY_HOST"]


async def test_a_supervisor_that_stood_still_kills_no_worker(run: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """It, or all of its container, was frozen: what the workers said meanwhile is not read yet."""
    monkeypatch.setattr(supervisor, "_HANGS_S", HANGS_S)
    async with run() as service:
        time.sleep(2 * HANGS_S)  # noqa: ASYNC251 - it stands still
        await asyncio.sleep(HANGS_S / 10)
        assert not service.said("worker_killed")
        assert len(service.starts()) == 1


async def test_a_worker_that_cannot_be_started_is_tried_again(run: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process may be free, or the program is just being replaced: the others serve on."""
    async with run() as service:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/missing/python")
            os.kill(service.starts()[0][0], signal.SIGKILL)
            await until_true(lambda: len(service.said("worker_died")) > 1, what="it was tried")
        await service.started(2)
        assert "could not be started" in service.said("worker_died")[1]["error"]
