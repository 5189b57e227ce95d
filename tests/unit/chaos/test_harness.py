"""The parts of the chaos harness that decide what a run is told: faults, check endpoints, probes, dumps, audits."""

import asyncio
import json
import random
import struct
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from confluent_kafka import KafkaException
from standardwebhooks.webhooks import Webhook

from checker.cases import Case
from checker.content import content_of
from checker.history import HistoryWriter, Serving, read_history
from checker.records import AnyRecord, Half, Op, Parked, read_records
from tests.chaos import batches, probes
from tests.chaos.__main__ import SHORT_HORIZON_S, Shares, faults_for, horizon_for, split
from tests.chaos.answer import NOTHING, Answer
from tests.chaos.answering import PLAIN_FROM, CheckEndpoints
from tests.chaos.audits import Row, agreement
from tests.chaos.batches import Batches
from tests.chaos.coordinator_faults import AWAY
from tests.chaos.decisions import Decisions
from tests.chaos.faults import BROKER_FAULTS, COORDINATOR_FAULTS, FULL_STOP, KINDS, TOPIC_FAULTS, possible_kinds
from tests.chaos.follower import Follower
from tests.chaos.log_ends import lose_end
from tests.chaos.probes import Probes


def test_a_run_of_a_hundred_thousand_has_thirty_faults_of_coordinators_ten_of_each_other_and_a_full_stop() -> None:
    """Without a word about faults."""
    shares = split(faults_for(100_000))
    assert shares.coordinators >= 30
    assert shares.brokers >= 10
    assert shares.topics >= 10
    assert shares.full_stops >= 1


@pytest.mark.parametrize("faults", [8, 19, 60])
def test_all_faults_that_were_asked_for_are_shared_out(faults: int) -> None:
    """Most of them are of coordinators."""
    shares = split(faults)
    assert shares.coordinators + shares.brokers + shares.topics == faults
    assert shares.coordinators > shares.brokers == shares.topics > 0


@pytest.mark.parametrize(
    "kinds, wanted",
    [
        (COORDINATOR_FAULTS, Shares(coordinators=60, brokers=0, topics=0, full_stops=0)),
        (BROKER_FAULTS, Shares(coordinators=0, brokers=60, topics=0, full_stops=1)),
        (TOPIC_FAULTS, Shares(coordinators=0, brokers=0, topics=60, full_stops=0)),
        ([*COORDINATOR_FAULTS, *TOPIC_FAULTS], Shares(coordinators=40, brokers=0, topics=20, full_stops=0)),
        ([FULL_STOP], Shares(coordinators=0, brokers=0, topics=0, full_stops=1)),
    ],
)
def test_no_fault_is_waited_for_that_is_not_played(kinds: list[str], wanted: Shares) -> None:
    """Where only some kinds are wanted."""
    assert split(60, list(kinds)) == wanted


def test_an_absence_for_a_whole_horizon_is_played_where_the_horizon_is_short() -> None:
    """By default with odd seeds, and with any seed if it was asked for."""
    assert possible_kinds(horizon_for(1)) == set(KINDS)
    assert possible_kinds(horizon_for(2)) == set(KINDS) - {AWAY}
    assert horizon_for(2, [AWAY]) == SHORT_HORIZON_S


PLAIN, DATA, MARKER, EMPTY = (0, 1), (0x10, 1), (0x30, 1), (0x10, 0)


def batch(base: int, kind: tuple[int, int], producer: int = 7) -> bytes:
    """Return a record batch of one offset; an empty one is what compaction leaves of a producer's last batch."""
    attributes, count = kind
    return struct.pack(">qiibihiqqqhii", base, 49, 0, 2, 0, attributes, 0, 0, 0, producer, 0, 0, count)


@pytest.mark.parametrize("seed", range(20))
def test_no_transaction_stays_open_and_the_files_of_what_is_lost_go(seed: int, tmp_path: Path) -> None:
    """Offset 2 to 5 are one transaction, which reaches into the second segment; the one of 8 is still open."""
    kinds = [PLAIN, EMPTY, DATA, PLAIN, DATA, MARKER, PLAIN, PLAIN, DATA]
    for first, end in ((0, 4), (4, 9)):
        name = tmp_path / f"{first:020}"
        name.with_suffix(".log").write_bytes(b"".join(batch(at, kinds[at]) for at in range(first, end)))
        name.with_suffix(".index").touch()
        name.with_suffix(".snapshot").touch()

    end = lose_end(tmp_path, random.Random(seed))

    assert end in (1, 2, 6, 7, 8)
    logs = sorted(tmp_path.glob("*.log"))
    assert b"".join(log.read_bytes() for log in logs) == b"".join(batch(at, kinds[at]) for at in range(end))
    assert {int(name.stem) for name in tmp_path.glob("*.snapshot")} == ({0, 4} if end > 4 else {0})
    assert not list(tmp_path.glob("*4.index"))


SECRET, ANOTHER = ("whsec_" + b64encode(bytes([number]) * 32).decode() for number in (1, 2))
BODY = json.dumps({"id": "o-42", "group": "shop", "attempt": PLAIN_FROM, "nonce": "n", "messages": [{"key": None}]})


@pytest.fixture
async def endpoints(tmp_path: Path) -> AsyncIterator[CheckEndpoints]:
    producers = SimpleNamespace(undecided=set())
    decisions = Decisions(tmp_path / "decisions.db")
    with HistoryWriter(tmp_path / "history.jsonl") as history:
        made = CheckEndpoints(decisions, cast("Any", producers), history, 1)
        await made.start()
        yield made
        await made.stop()
    decisions.close()


def signed(secret: str) -> dict[str, str]:
    now = datetime.now(UTC)
    signature = Webhook(secret).sign("o-42:1", now, BODY)
    return {"webhook-id": "o-42:1", "webhook-timestamp": str(int(now.timestamp())), "webhook-signature": signature}


async def post(endpoints: CheckEndpoints, headers: dict[str, str]) -> int:
    async with aiohttp.ClientSession() as session, session.post(endpoints.url, data=BODY, headers=headers) as answer:
        return answer.status


async def test_what_the_groups_secret_has_signed_is_answered_once(endpoints: CheckEndpoints) -> None:
    """A copy of it is reported."""
    endpoints.trust("shop", [SECRET])
    headers = signed(SECRET)
    assert await post(endpoints, headers) == 200
    assert endpoints.forged == []
    assert await post(endpoints, headers) == 401
    assert len(endpoints.forged) == 1


@pytest.mark.parametrize("headers", [{}, signed(ANOTHER)], ids=["not signed", "signed by another"])
async def test_a_check_that_is_not_signed_by_its_group_is_reported(
    endpoints: CheckEndpoints, headers: dict[str, str]
) -> None:
    assert await post(endpoints, headers) == 200, "no secret is known yet"
    endpoints.trust("shop", [SECRET])
    assert await post(endpoints, headers) == 401
    [forged] = endpoints.forged
    assert forged.startswith(f"o-42, attempt {PLAIN_FROM}: ")


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


HALF = Half(shard=0, offset=1, id="a", contents=(content_of("orders", None, b"v"),))
PARKED = Parked(shard=0, offset=1, id="a")
GIVEN_UP = Op(shard=0, offset=4, id="a", kind="PARKED", cause="policy", remark="no verdict after 2 checks")


class Log:
    """Gives what it is told to, and fails after it where it is told to."""

    def __init__(self) -> None:
        self.next: list[AnyRecord] = []
        self.fails = False
        self.begun_again: list[str] = []

    def read(self) -> Iterator[AnyRecord]:
        yield from self.next
        if self.fails:
            raise KafkaException
        self.next = []


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def follower(log: Log, tmp_path: Path) -> Follower:
    return Follower(log.read, tmp_path / "dump", log.begun_again.append, lambda *_: None)


def test_what_is_pending_and_parked_follows_the_records(log: Log, follower: Follower) -> None:
    """A tombstone takes it away; why a policy gave up is counted without its numbers."""
    log.next = [HALF]
    follower.look()
    assert set(follower.prepared) == {"a"}
    log.next = [GIVEN_UP, PARKED, Half(shard=0, offset=2, id="a")]
    follower.look()
    assert (follower.prepared, follower.parked) == ({}, {"a"})
    assert follower.reasons == {"no verdict after checks": 1}
    log.next = [Parked(shard=0, offset=3, id="a", tombstone=True)]
    follower.look()
    assert follower.parked == set()


def test_what_failed_in_the_middle_is_read_again_and_stands_once(log: Log, follower: Follower, tmp_path: Path) -> None:
    """All of it or nothing."""
    log.next, log.fails = [HALF], True
    with pytest.raises(KafkaException):
        follower.look()
    assert follower.records.total() == 0
    log.next, log.fails = [HALF, PARKED], False
    follower.look()
    assert list(read_records(tmp_path / "dump")) == [HALF, PARKED]


def test_a_topic_is_read_to_its_end_before_it_is_deleted_and_from_its_beginning_afterwards(
    log: Log, follower: Follower, tmp_path: Path
) -> None:
    """Also where the last reading fails: then the history says that the topic was deleted."""
    log.next = [HALF]
    with follower.away("orders"):
        assert list(read_records(tmp_path / "dump")) == [HALF]
        assert log.begun_again == []
    assert log.begun_again == ["orders"]
    log.fails = True
    with follower.away("orders"):
        pass
    assert (log.begun_again, follower.failures) == (["orders", "orders"], 1)


def committed() -> dict[str, Case]:
    marker = Op(shard=0, offset=1, id="mine", kind="COMMITTED", cause="producer")
    return {"mine": Case(id="mine", asked_at=0, ops=[marker])}


def differences(*verdicts: str, cases: dict[str, Case]) -> int:
    rows: list[Row] = [{"id": "mine", "verdict": verdict, "evidence": None} for verdict in verdicts]
    return len(agreement(rows, cases, (), emptied=frozenset()).differences)


def test_the_same_outcome_agrees_and_so_does_a_verdict_that_proves_nothing() -> None:
    assert differences("committed_ok", cases=committed()) == 0
    assert differences("expired_unknown", cases=committed()) == 0


@pytest.mark.parametrize("verdict", ["contradicted", "doubled", "rolled_back_ok", "lost"])
def test_another_verdict_is_a_difference(verdict: str) -> None:
    """Also if it is one of two about the id."""
    assert differences(verdict, cases=committed()) == 1
    assert differences("committed_ok", verdict, cases=committed()) == 1


def test_what_only_one_of_them_knows_is_a_difference() -> None:
    assert differences(cases=committed()) == 1
    assert differences("committed_ok", cases={}) == 1


def test_one_that_kafka_and_its_owner_have_lost_at_once_proves_nothing() -> None:
    cases = committed()
    cases["mine"].lost_in_memory = True
    assert differences("contradicted", cases=cases) == 0


Body = Mapping[str, list[object]]


class Coordinator:
    """Answers each item of a batch with the item itself, or whatever it is told to."""

    def __init__(self) -> None:
        self.got: list[Body] = []
        self.groups: list[str] = []
        self.instead: Answer | None = None

    async def post(self, group: str, body: Body) -> Answer:
        self.got.append(body)
        self.groups.append(group)
        if self.instead is not None:
            return self.instead
        items = {kind: [{"status": 201, "body": {"id": item}} for item in given] for kind, given in body.items()}
        return Answer(status=200, body=items)


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator()


@pytest.fixture(autouse=True)
def _unbroken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "BROKEN_OFF", 0)


def gathering(coordinator: Coordinator) -> Batches:
    return Batches(coordinator.post, random.Random(1))


async def test_each_gets_the_answer_to_its_own_item(coordinator: Coordinator) -> None:
    """Prepares and ends of one batch, in whatever order they came."""
    many = gathering(coordinator)
    answers = await asyncio.gather(
        many.send("shop", "end", "a"), many.send("shop", "prepare", "b"), many.send("shop", "end", "c")
    )
    assert [answer.text("id") for answer in answers] == ["a", "b", "c"]
    assert coordinator.got == [{"prepare": ["b"], "end": ["a", "c"]}]


async def test_a_batch_is_of_one_group(coordinator: Coordinator) -> None:
    """Its key reaches no other."""
    many = gathering(coordinator)
    answers = await asyncio.gather(*(many.send(group, "end", group) for group in ("shop", "other", "shop")))
    assert [answer.text("id") for answer in answers] == ["shop", "other", "shop"]
    sent = zip(coordinator.groups, coordinator.got, strict=True)
    assert sorted((group, body["end"]) for group, body in sent) == [("other", ["other"]), ("shop", ["shop", "shop"])]


async def test_a_problem_is_the_answer_of_its_item_alone(coordinator: Coordinator) -> None:
    """The others are answered as if it were not there."""
    items = [{"status": 201, "body": {"id": "a"}}, {"status": 503, "problem": {"error_code": "shard_unavailable"}}]
    coordinator.instead = Answer(status=200, body={"prepare": items, "end": []})
    many = gathering(coordinator)
    first, second = await asyncio.gather(many.send("shop", "prepare", "a"), many.send("shop", "prepare", "b"))
    assert (first.status, first.text("id")) == (201, "a")
    assert (second.status, second.text("error_code")) == (503, "shard_unavailable")


@pytest.mark.parametrize("answer", [NOTHING, Answer(status=429, body={"error_code": "too_many_requests"})])
async def test_what_the_whole_batch_was_answered_is_the_answer_of_each(
    coordinator: Coordinator, answer: Answer
) -> None:
    """Also where no answer came."""
    coordinator.instead = answer
    many = gathering(coordinator)
    answers = await asyncio.gather(many.send("shop", "prepare", "a"), many.send("shop", "end", "b"))
    assert list(answers) == [answer, answer]


async def test_a_full_batch_goes_at_once_and_the_next_one_begins(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is left out of both."""
    monkeypatch.setattr(batches, "MOST", 2)
    many = gathering(coordinator)
    answers = await asyncio.gather(*(many.send("shop", "end", str(number)) for number in range(5)))
    assert [answer.text("id") for answer in answers] == ["0", "1", "2", "3", "4"]
    assert [len(body["end"]) for body in coordinator.got] == [2, 2, 1]


async def test_a_producer_that_disappears_takes_no_other_with_it(coordinator: Coordinator) -> None:
    """Its item is sent all the same, as its request would have been."""
    many = gathering(coordinator)
    gone = asyncio.create_task(many.send("shop", "end", "gone"))
    await asyncio.sleep(0)
    stays = asyncio.create_task(many.send("shop", "end", "stays"))
    await asyncio.sleep(0)
    gone.cancel()
    assert (await stays).text("id") == "stays"
    assert coordinator.got == [{"prepare": [], "end": ["gone", "stays"]}]


async def test_a_connection_that_is_broken_off_answers_nobody(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the batch arrived is left open."""
    monkeypatch.setattr(batches, "BROKEN_OFF", 1)

    async def never(_: str, body: Body) -> Answer:
        coordinator.got.append(body)
        await asyncio.Event().wait()
        return NOTHING

    assert await Batches(never, random.Random(1)).send("shop", "end", "a") == NOTHING
    assert coordinator.got == [{"prepare": [], "end": ["a"]}]
