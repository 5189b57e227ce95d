"""Which settings workers get, and what a reload or a pause of the supervisor does to them; the workers are scripts."""

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
from tests.support.waiting import until_true

HANGS_S = 3.0
NEVER_READY = 1
"""The `max_pending` with which the script does not get ready."""
WORKER = """
import base64, json, os, pickle, select, socket, sys
link = socket.socket(fileno=int(sys.argv[3]))
lines = link.makefile("rb", 0)  # unbuffered, or select would not see what was read beyond a line
settings = pickle.loads(base64.b64decode(json.loads(lines.readline())["settings"]))
with open(sys.argv[1], "a") as starts:
    print(os.getpid(), settings.host, settings.max_pending, file=starts, flush=True)
while True:
    link.sendall(json.dumps({"type": "alive", "ready": settings.max_pending > 1, "pages": 1}).encode() + b"\\n")
    while select.select([link], [], [], 0.1)[0]:
        if json.loads(lines.readline() or b'{"type": "stop"}')["type"] == "stop":
            sys.exit()
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

    def __init__(self, file: Path, log: list[EventDict]) -> None:
        self.log = log
        self.settings = settings_of(10)
        self._file = file

    def starts(self) -> list[tuple[int, str, int]]:
        """Return the process id, host and `max_pending` of each worker that was started."""
        lines = [line.split() for line in self._file.read_text().splitlines()] if self._file.exists() else []
        return [(int(pid), host, int(most)) for pid, host, most in lines]

    async def started(self, count: int) -> None:
        await until_true(lambda: len(self.starts()) == count, what=f"{count} workers were started")

    def said(self, event: str) -> list[EventDict]:
        return [line for line in self.log if line["event"] == event]


Running = Callable[[], AbstractAsyncContextManager[Service]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Running:
    """Return a context with a running service; it ends with SIGTERM, and must end in order."""
    script, file = tmp_path / "worker.py", tmp_path / "starts"
    script.write_text(WORKER)
    monkeypatch.setattr(sys, "orig_argv", ["python", str(script), str(file)])
    for name, seconds in (("_HANGS_S", 600.0), ("_FIRST_PAUSE_S", 0.01), ("_LONGEST_PAUSE_S", 0.1)):
        monkeypatch.setattr(supervisor, name, seconds)

    @asynccontextmanager
    async def running() -> AsyncIterator[Service]:
        with capture_logs() as log:
            service = Service(file, log)
            task = asyncio.create_task(Supervisor(service.settings, lambda: service.settings).run())
            await service.started(1)
            yield service
            assert not task.done()
            os.kill(os.getpid(), signal.SIGTERM)
            assert await task == 0

    return running


async def test_a_worker_that_replaces_another_has_the_settings_as_last_read(run: Running) -> None:
    """A file that is being edited is read by a reload only."""
    async with run() as service:
        service.settings = settings_of(20)
        os.kill(service.starts()[0][0], signal.SIGKILL)
        await service.started(2)
        os.kill(os.getpid(), signal.SIGHUP)
        await until_true(lambda: service.said("reloaded"), what="the reload is done")
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
        os.kill(os.getpid(), signal.SIGHUP)
        await until_true(lambda: service.said("reloaded"), what="the reload is done")
        [failed] = service.said("reload_failed")
        assert "not ready yet" in failed["error"]
        assert [most for _, _, most in service.starts()] == [10, NEVER_READY, 20]


async def test_a_reload_moves_no_port_and_judges_access_by_where_it_is(run: Running) -> None:
    """The sockets stay where they are, so settings without keys are no safer because they name loopback."""
    async with run() as service:
        service.settings = settings_of(20, host="127.0.0.2")
        os.kill(os.getpid(), signal.SIGHUP)
        await until_true(lambda: service.said("reloaded"), what="the reload is done")
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
