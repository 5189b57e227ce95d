"""`halfway top` and jobs from the terminal, with a coordinator in memory, and with a server that answers anything."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from click.testing import CliRunner, Result

from halfway.app.cli import transactions as cli_jobs
from halfway.app.cli.main import halfway
from tests.support.rest.client import RestWorld
from tests.support.rest.parked import ids_in_state, park
from tests.unit.app.cli.test_transactions import HOSTILE, Answer, answer

__all__ = ["answer"]


@pytest.fixture
async def world() -> AsyncIterator[RestWorld]:
    async with RestWorld() as world:
        yield world


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_jobs, "_POLL_S", 0.01)


async def run_command(url: str, *words: str) -> Result:
    """Run a command on a thread, because it calls the coordinator over HTTP."""
    return await asyncio.to_thread(CliRunner().invoke, halfway, [*words, "--url", url])


async def test_parked_ones_are_counted_then_resumed_with_progress(world: RestWorld) -> None:
    ids = await park(7, world)
    dry = await run_command(world.url, "transactions", "resume", "--parked", "--group", "shop", "--dry-run")
    assert dry.exit_code == 0
    assert dry.output.startswith("7 transactions match; nothing is done\n")
    assert all(name in dry.output for name in ids)
    assert len(await ids_in_state(world, "parked")) == 7
    done = await run_command(world.url, "transactions", "resume", "--group", "shop", "--parked", "--rate", "200")
    assert done.exit_code == 0, done.output
    assert "done: 7 done" in done.output
    assert await ids_in_state(world, "parked") == []
    again = await run_command(world.url, "transactions", "resume", "--parked", "--reason", "once more")
    assert again.exit_code == 0
    assert "done: nothing matched" in again.output


async def test_one_is_resumed_by_its_id(world: RestWorld) -> None:
    (name,) = await park(1, world)
    done = await run_command(world.url, "transactions", "resume", name)
    assert done.exit_code == 0
    assert await ids_in_state(world, "prepared") == [name]


@pytest.mark.parametrize("words", [[], ["id", "--parked"], ["id", "--group", "shop"], ["--group", "shop"]])
async def test_it_is_never_guessed_which_are_meant(world: RestWorld, words: list[str]) -> None:
    done = await run_command(world.url, "transactions", "resume", *words)
    assert done.exit_code == 2
    assert "--parked" in done.output


def test_what_failed_is_named(answer: Answer) -> None:
    """With exit status 1, and with control characters escaped."""
    items = [
        {"id": f"t{number}", "error_code": "already_ended", "detail": detail}
        for number, detail in enumerate(HOSTILE.values())
    ]
    job = {"id": "j", "state": "done", "found": 9, "finished": 9, "results": {"failed": 9}, "items": items}
    answer.set(job)
    done = CliRunner().invoke(halfway, ["transactions", "resume", "--parked", "--url", answer.url])
    assert done.exit_code == 1
    assert "done: 9 failed" in done.output
    assert "t8: already_ended" in done.output
    assert all(character.isprintable() or character in "\n " for character in done.output)


async def test_top_shows_what_statistics_say(world: RestWorld) -> None:
    """Once, if the output is not a terminal."""
    await park(3, world)
    await asyncio.sleep(0)
    shown = await run_command(world.url, "top")
    assert shown.exit_code == 0, shown.output
    for part in ("pending 0", "parked 3", "shop", "shard"):
        assert part in shown.output
    whole = await run_command(world.url, "top", "--json")
    assert json.loads(whole.output)["totals"]["parked"] == 3


def test_top_in_a_pipe_cuts_no_name_and_tells_each_thing_once(answer: Answer) -> None:
    """The host of an endpoint occurs once, and a failure of the lane counts for its instance, not for each shard."""
    group, url = "a-group-with-a-long-name-" + "x" * 60, "http://10.0.0.1:7080"
    endpoint = {"well": False, "host": "http://shop:9000", "detail": "shop:9000: status 502, not 200"}
    lane = {"failures": 1, "commits_per_s": 2.5, "last_failure": {"reason": "fenced"}}
    answer.set(
        {
            "groups": [{"group": group, "endpoints": [endpoint]}],
            "instances": [
                {"url": url, "shards": [0, 1, 2], "lane": lane, "warnings": [{"check": "topics", "detail": "by time"}]}
            ],
            "shards": [{"shard": number, "instance": url, "pending": 0} for number in range(3)],
            "failures": {"quarantined": [{"topic": "orders", "id": "t-1", "state": "refused", "detail": "too large"}]},
        }
    )
    shown = CliRunner().invoke(halfway, ["top", "--url", answer.url], env={"COLUMNS": None}).output
    assert shown.splitlines()[0] == f"unsafe (topics) on {url}: by time"
    assert shown.count(group) == 2
    assert "…" not in shown
    assert shown.count("shop:9000") == 1
    assert shown.count("fenced") == 1
    (line,) = (line for line in shown.splitlines() if "fenced" in line)
    assert line.split() == [url, "3", "2.5", "1", "fenced"]
    assert "t-1" in shown


@pytest.mark.parametrize("text", list(HOSTILE.values()), ids=list(HOSTILE))
def test_top_obeys_nothing_that_it_shows(answer: Answer, text: str) -> None:
    statistics = {
        "at": text,
        "totals": {"pending": text},
        "away": [{"shard": 1, "instance": text, "detail": text}],
        "ends": [{"outcome": text, "cause": text, "per_s": 1}],
        "groups": [{"group": text, "endpoints": [{"well": False, "host": text, "detail": text}]}],
        "instances": [
            {"url": text, "lane": {"failures": 1}, "warnings": [{"check": text, "detail": text}]},
        ],
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
