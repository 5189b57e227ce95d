"""Whether a shard is served is known by what its owner says of an id that nobody has prepared."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from checker.history import HistoryWriter, Serving, read_history
from tests.chaos import probes
from tests.chaos.answer import Answer
from tests.chaos.probes import Probes

UNAVAILABLE = 503


class Caller:
    """Gives the answers of each instance, one after the other; the last one again and again."""

    def __init__(self, **answers: list[int]) -> None:
        self._answers = answers

    async def ask(self, instance: str, path: str) -> Answer:
        assert path.startswith("/transactions/probe-")
        answers = self._answers[instance]
        status = answers.pop(0) if len(answers) > 1 else answers[0]
        return Answer(status=status, body={"error_code": "shard_unavailable"} if status == UNAVAILABLE else {})


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_INTERVAL_S", 0)


@pytest.mark.parametrize(
    "answers, changes",
    [
        pytest.param({"a": [404]}, [], id="served throughout"),
        pytest.param({"a": [404, 503, 0, 503, 404]}, [False, True], id="away for a while"),
        pytest.param({"a": [503], "b": [404]}, [], id="another instance reaches the owner"),
        pytest.param({"a": [404, 429, 503, 429, 404]}, [False, True], id="an overloaded instance says nothing"),
        pytest.param({"a": [503], "b": [500]}, [], id="the owner answers, whatever it is"),
        pytest.param({"a": [503, 410]}, [False, True], id="an expired id is known to its owner"),
    ],
)
async def test_changes_are_written_down(tmp_path: Path, answers: dict[str, list[int]], changes: list[bool]) -> None:
    """Once each, as an event of the history."""
    with HistoryWriter(tmp_path / "history") as history:
        instances: list[Any] = list(answers)
        watching = asyncio.create_task(Probes(cast("Any", Caller(**answers)), instances, history, shards=1).run())
        for _ in range(50):
            await asyncio.sleep(0)
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
    events = list(read_history(tmp_path / "history"))
    assert [(event.shard, event.serving) for event in events if isinstance(event, Serving)] == [
        (0, serving) for serving in changes
    ]
