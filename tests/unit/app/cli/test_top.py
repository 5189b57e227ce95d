"""`halfway top`, with a coordinator in memory, and with a server that answers anything."""

import asyncio
import json

import pytest
from click.testing import CliRunner

from halfway.app.cli.main import halfway
from tests.support.rest.client import RestWorld
from tests.support.rest.parked import park
from tests.unit.app.cli.test_transactions import HOSTILE, Answer, answer

__all__ = ["answer"]


async def test_top_shows_what_statistics_say() -> None:
    """Once, if the output is not a terminal."""
    async with RestWorld() as world:
        await park(3, world)
        for words in ((), ("--json",)):  # on a thread, because it calls the coordinator over HTTP
            shown = await asyncio.to_thread(CliRunner().invoke, halfway, ["top", *words, "--url", world.url])
            assert shown.exit_code == 0, shown.output
            for part in ("pending", "shop", "shards"):
                assert part in shown.output
            assert not words or json.loads(shown.output)["totals"]["parked"] == 3


def test_top_in_a_pipe_cuts_no_name(answer: Answer) -> None:
    group, url = "a-group-with-a-long-name-" + "x" * 60, "http://10.0.0.1:7080"
    warning = {"check": "topics", "detail": "by time"}
    answer.set(
        {
            "groups": [{"group": group}],
            "instances": [{"url": url, "last_failure": {"reason": "fenced"}, "warnings": [warning]}],
            "shards": [{"shard": number, "instance": url, "pending": 0} for number in range(3)],
            "failures": {"quarantined": [{"topic": "orders", "id": "t-1", "state": "refused", "detail": "too large"}]},
        }
    )
    shown = CliRunner().invoke(halfway, ["top", "--url", answer.url], env={"COLUMNS": None}).output
    assert "…" not in shown
    for part in (group, "fenced", "by time", "t-1", "too large"):
        assert shown.count(part) == 1


@pytest.mark.parametrize("text", list(HOSTILE.values()), ids=list(HOSTILE))
def test_top_obeys_nothing_that_it_shows(answer: Answer, text: str) -> None:
    statistics = {
        "at": text,
        "totals": {"pending": text},
        "away": [{"shard": 1, "instance": text, "detail": text}],
        "groups": [{"group": text, "breaker": text}],
        "instances": [{"url": text, "last_failure": {"reason": text}, "warnings": [{"check": text, "detail": text}]}],
        "shards": [{"shard": 0, "instance": text}],
        "failures": {
            "topics": [{"topic": text, "detail": text, "error_code": text}],
            "skipped": [{"topic": text, "reason": text}],
        },
    }
    answer.set(statistics)
    shown = CliRunner().invoke(halfway, ["top", "--url", answer.url])
    assert shown.exit_code == 0, shown.output
    assert all(character.isprintable() or character == "\n" for character in shown.output)
