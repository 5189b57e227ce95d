"""What a supervisor does about workers that die, hang or cannot start, with workers that do nothing else."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from halfway.app.serve import supervisor
from halfway.app.serve.supervisor import Supervisor
from halfway.app.settings import load
from halfway.protocol.errors import ConfigurationError
from tests.support.waiting import until_true

WORKER = """
import json, os, signal, socket, sys, time
how, starts, link = sys.argv[1], open(sys.argv[2], "a"), socket.socket(fileno=int(sys.argv[4]))
lines = link.makefile("r")
number = json.loads(lines.readline())["number"]
print(os.getpid(), file=starts, flush=True)
is_first = len(open(sys.argv[2]).readlines()) == 1

def say(**message):
    link.sendall(json.dumps(message).encode() + b"\\n")

if how == "refuses":
    say(type="failed", detail="the reason")
    sys.exit(1)
if how == "fails":
    sys.exit(1)
if how == "crashes" and is_first:
    os.kill(os.getpid(), signal.SIGKILL)
say(type="alive", ready=True, pages=1)
if how == "hangs" and is_first or how == "stays":
    time.sleep(600)
while json.loads(lines.readline())["type"] != "stop":
    pass
"""


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file with the ids of all workers that were started. A slow one is not taken for one that hangs."""
    (tmp_path / "worker.py").write_text(WORKER)
    for name, seconds in (("_HANGS_S", 600.0), ("_STOP_S", 600.0), ("_FIRST_PAUSE_S", 0.01)):
        monkeypatch.setattr(supervisor, name, seconds)
    return tmp_path / "starts"


def service(starts: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> Supervisor:
    monkeypatch.setattr(sys, "orig_argv", ["python", str(starts.parent / "worker.py"), how, str(starts)])
    settings = load(
        {
            "HALFWAY_KAFKA__BOOTSTRAP_SERVERS": "127.0.0.1:1",
            **{f"HALFWAY_{name}": "127.0.0.1" for name in ("HOST", "HEALTH_HOST")},
            **{f"HALFWAY_{name}": "0" for name in ("PORT", "HEALTH_PORT", "DRAIN_S")},
            "HALFWAY_WORKERS": "1",
        }
    )
    return Supervisor(settings, lambda: settings)


def pids(starts: Path) -> list[int]:
    return [int(line) for line in starts.read_text().split()] if starts.exists() else []


@pytest.mark.parametrize(
    "how, event, said", [("crashes", "worker_died", -signal.SIGKILL), ("hangs", "worker_killed", None)]
)
async def test_a_worker_that_crashes_or_hangs_is_replaced(
    starts: Path, monkeypatch: pytest.MonkeyPatch, how: str, event: str, said: int | None
) -> None:
    monkeypatch.setattr(supervisor, "_HANGS_S", 1.0 if how == "hangs" else 600.0)
    with capture_logs() as log:
        run = asyncio.create_task(service(starts, monkeypatch, how).run())
        await until_true(lambda: len(pids(starts)) == 2 or run.done(), what="a second one was started")
        os.kill(os.getpid(), signal.SIGTERM)
        assert await run == 0
    line, *_ = [line for line in log if line["event"] == event]  # a slow machine may let the second one hang too
    assert (line["worker"], line.get("status")) == (0, said)


@pytest.mark.parametrize("how, why", [("refuses", "the reason"), ("fails", "the log says why")])
async def test_a_first_worker_that_cannot_start_ends_the_service(
    starts: Path, monkeypatch: pytest.MonkeyPatch, how: str, why: str
) -> None:
    with pytest.raises(ConfigurationError, match=why):
        await service(starts, monkeypatch, how).run()
    assert len(pids(starts)) == 1


async def test_a_worker_that_does_not_stop_is_killed(starts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_STOP_S", 1.0)
    with capture_logs() as log:
        run = asyncio.create_task(service(starts, monkeypatch, "stays").run())
        await until_true(lambda: pids(starts) or run.done(), what="it was started")
        os.kill(os.getpid(), signal.SIGTERM)
        assert await run == 1
    assert [line["worker"] for line in log if line["event"] == "worker_killed"] == [0]


async def test_a_successor_that_cannot_start_changes_nothing(starts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with capture_logs() as log:
        run = asyncio.create_task(service(starts, monkeypatch, "serves").run())
        await until_true(lambda: pids(starts) or run.done(), what="it was started")
        monkeypatch.setattr(sys, "orig_argv", [*sys.orig_argv[:2], "refuses", str(starts)])
        os.kill(os.getpid(), signal.SIGHUP)
        await until_true(lambda: any(line["event"] == "reload_failed" for line in log), what="the reload has failed")
        first, _ = pids(starts)
        assert [line["error"] for line in log if line["event"] == "worker_not_started"] == ["the reason"]
        os.kill(first, 0)
        monkeypatch.setattr(sys, "orig_argv", [*sys.orig_argv[:2], "serves", str(starts)])
        os.kill(os.getpid(), signal.SIGHUP)
        await until_true(lambda: any(line["event"] == "reloaded" for line in log), what="the reload is done")
        assert len(pids(starts)) == 3
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await run == 0
