"""A thread or a background task that dies ends the process: nobody else does its work."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from structlog.testing import capture_logs

from halfway.app.serve import app
from halfway.app.serve.process import supervised
from halfway.app.settings import load

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
