"""Bulk actions from the terminal, with a coordinator in memory, and with a server that answers anything."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from halfway.app.cli import bulk as cli_bulk
from halfway.app.cli.bulk import MAX_FAILURES, BulkAction
from halfway.app.cli.main import halfway
from halfway.app.cli.remote import Remote
from tests.support.ids import named_id
from tests.support.rest.client import RestWorld
from tests.support.rest.parked import ids_in_state, park
from tests.unit.app.cli.test_transactions import HOSTILE


@pytest.fixture
async def world() -> AsyncIterator[RestWorld]:
    async with RestWorld() as world:
        yield world


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_bulk, "_PAUSE_S", 0.01)


async def run_command(url: str, *words: str) -> Result:
    """Run a command on a thread, because it calls the coordinator over HTTP."""
    return await asyncio.to_thread(CliRunner().invoke, halfway, ["transactions", *words, "--url", url])


async def run_all(work: BulkAction, *, size: int, show: Callable[[], None] = lambda: None) -> None:
    """Act in small batches without waiting between them."""
    work._size, work._rate = size, 10_000
    await asyncio.to_thread(work.run, show)


def subjects(world: RestWorld, action: str) -> list[str]:
    return [event.subject for event in world.memory.audit_trail.events if event.action == action]


async def test_parked_ones_are_counted_then_resumed(world: RestWorld) -> None:
    ids = await park(7, world)
    dry = await run_command(world.url, "bulk", "resume", "--group", "shop", "--dry-run")
    assert dry.exit_code == 0
    assert dry.output.startswith("7 transactions match; nothing is done\n")
    assert all(name in dry.output for name in ids)
    assert len(await ids_in_state(world, "parked")) == 7
    words = ("bulk", "resume", "--group", "shop", "--error", "status 502", "--rate", "200", "--reason", "mended")
    done = await run_command(world.url, *words)
    assert done.exit_code == 0, done.output
    assert "over: 7 done" in done.output
    assert await ids_in_state(world, "parked") == []
    again = await run_command(world.url, "bulk", "resume", "--reason", "once more")
    assert (again.exit_code, again.output) == (0, "over: nothing to do\n")


async def test_one_is_resumed_by_its_id(world: RestWorld) -> None:
    (name,) = await park(1, world)
    done = await run_command(world.url, "resume", name)
    assert done.exit_code == 0
    assert await ids_in_state(world, "prepared") == [name]


async def test_nothing_is_sent_without_a_reason(world: RestWorld) -> None:
    done = await run_command(world.url, "bulk", "resume")
    assert done.exit_code == 2
    assert "--reason" in done.output


@pytest.mark.parametrize("action, state", [("commit", "committed"), ("rollback", "rolled_back")])
async def test_prepared_and_parked_ones_are_ended_as_by_an_operator(world: RestWorld, action: str, state: str) -> None:
    """Each with the reason as its remark."""
    parked = await park(3, world)
    ids = sorted([*parked, await world.prepared(id=named_id("u1"))])
    await run_all(BulkAction(Remote(world.url, None), action, {}, "by hand", 50), size=2)
    shown = [(await world.show(name)).body for name in ids]
    assert {(one["state"], one["cause"], one["remark"]) for one in shown} == {(state, "operator", "by hand")}
    assert sorted(subjects(world, "end_by_hand")) == ids


async def test_each_is_checked_once_although_it_still_matches(world: RestWorld) -> None:
    await world.put_shop()
    ids = sorted([await world.prepared(id=named_id(f"t{number}")) for number in range(7)])
    work = BulkAction(Remote(world.url, None), "check", {"group": "shop"}, "asked", 50)
    await run_all(work, size=2)
    assert (work.counts, sorted(subjects(world, "check_now"))) == ({"done": 7}, ids)


async def test_it_is_stopped_after_a_batch_and_started_again_for_the_rest(world: RestWorld) -> None:
    """Nothing is sent twice."""
    ids = await park(9, world)
    first = BulkAction(Remote(world.url, None), "resume", {"group": "shop"}, "mended", 50)
    await run_all(first, size=4, show=lambda: first.stop() if first.counts else None)
    assert (first.counts["done"], first.left, len(await ids_in_state(world, "parked"))) == (4, 5, 5)
    second = BulkAction(Remote(world.url, None), "resume", {"group": "shop"}, "mended", 50)
    await run_all(second, size=4)
    assert (second.counts, await ids_in_state(world, "parked")) == ({"done": 5}, [])
    assert sorted(subjects(world, "resume")) == ids


async def test_a_batch_whose_answer_is_lost_is_not_sent_again(
    world: RestWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it did no longer matches, so only the rest is sent."""
    ids = await park(9, world)
    ask = Remote.ask_patiently
    lost: list[object] = []

    def lose_first(self: Remote, method: str, path: str, **rest: Any) -> dict[str, Any] | None:
        answer = ask(self, method, path, **rest)
        if method == "POST" and not lost:
            lost.append(answer)
            return None
        return answer

    monkeypatch.setattr(Remote, "ask_patiently", lose_first)
    work = BulkAction(Remote(world.url, None), "resume", {}, "mended", 50)
    await run_all(work, size=4)
    assert (work.counts, sorted(subjects(world, "resume"))) == ({"done": 5}, ids)


async def test_what_fails_is_named_and_the_others_are_done(world: RestWorld) -> None:
    """A topic that is gone fails its transaction at once. What another caller has ended meanwhile is no failure."""
    await world.put_shop()
    bad = await world.prepared({"topic": "coupons", "value": "v"}, id=named_id("bad"))
    world.memory.delete_topic("coupons")
    good = [await world.prepared(id=named_id(f"good{number}")) for number in range(3)]
    work = BulkAction(Remote(world.url, None), "commit", {}, "by hand", 50)
    await run_all(work, size=2)
    assert work.counts == {"done": 3, "failed": 1}
    (failure,) = work.failures
    assert failure.startswith(f"{bad}: topic_unavailable: ")
    assert "coupons" in failure
    assert sorted(await ids_in_state(world, "committed")) == sorted(good)


class Made:
    """Stands for a coordinator on which everything matches once, and each item gets the same answer."""

    def __init__(self, count: int, answer: dict[str, Any]) -> None:
        self.left, self.answer, self.sent = count, answer, 0

    def ask_patiently(self, method: str, path: str, *, body: Any = None, **_: Any) -> dict[str, Any] | None:
        if method == "POST":
            items = body["resume"]
            self.sent += len(items)
            return {"resume": [self.answer for _ in items]}
        page, self.left = min(self.left, 50), max(0, self.left - 50)
        names = [{"id": f"t{self.left + number}"} for number in range(page)]
        return {"transactions": names, "count": self.left + page, "next": "more" if self.left else None}

    ask = ask_patiently


async def test_its_memory_does_not_grow_with_the_transactions(capsys: pytest.CaptureFixture[str]) -> None:
    """It keeps counts and the last failures, and says how many more there were, without control characters."""
    problem = {"error_code": "message_too_large", "detail": "".join(HOSTILE.values())}
    made = Made(2_000, {"status": 413, "problem": problem})
    work = BulkAction(made, "resume", {}, "r", 50)  # type: ignore[arg-type]
    await run_all(work, size=50)
    assert (work.counts["failed"], len(work.failures), made.sent) == (2_000, MAX_FAILURES, 2_000)
    work.report()
    out, err = capsys.readouterr()
    assert out == "over: 2000 failed\n"
    assert "and 1900 earlier failures" in err
    assert all(character.isprintable() or character == "\n" for character in err)


@pytest.mark.parametrize("status", [404, 409, 410])
async def test_what_has_changed_meanwhile_is_no_failure(status: int) -> None:
    work = BulkAction(Made(3, {"status": status, "problem": {}}), "resume", {}, "r", 50)  # type: ignore[arg-type]
    await run_all(work, size=50)
    assert work.counts == {"changed meanwhile": 3}


async def test_it_gives_up_after_a_long_time_without_a_result(
    world: RestWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says what was done, and how to go on."""
    await park(3, world)
    monkeypatch.setattr(cli_bulk, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(Remote, "ask_patiently", lambda *_, **__: None)
    with pytest.raises(SystemExit):
        await run_all(BulkAction(Remote(world.url, None), "resume", {}, "r", 50), size=2)
    out, err = capsys.readouterr()
    assert out.endswith("over: nothing to do\n")
    assert "run the command again" in err
