"""A history of transactions with every outcome, written through the coordinator, and what a rogue producer adds."""

import asyncio
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from uuid import uuid4

from confluent_kafka import Producer

from checker.content import content_of
from checker.history import AnyEvent, End, Ended, Outcome, Prepare, Prepared, Run
from checker.history import Rest as AtRest
from halfway.kafka.records import codec
from halfway.protocol.ids import partition_for_key
from halfway.protocol.records import Message, OpKind
from tests.support.coordinator.endpoints import CheckEndpoint
from tests.support.coordinator.rest_client import QUIET, Json, Rest, message, preparation
from tests.support.ids import new_id
from tests.support.pipeline.log_writer import KafkaLog, Writer

BATCH = 200
ANSWERED_WITHIN_S = 120
PARK_AT_ONCE: Json = {"first_check_after_s": 0.2, "check_interval_s": 0.2, "max_interval_s": 0.2, "max_age_s": 0.6}


@dataclass(kw_only=True)
class History:
    """What was done: the verdict that each transaction must get."""

    topics: tuple[str, ...]
    expected: dict[str, str] = field(default_factory=dict)
    messages: dict[str, list[Json]] = field(default_factory=dict)

    def with_verdict(self, verdict: str) -> list[str]:
        return sorted(name for name, wanted in self.expected.items() if wanted == verdict)


async def write_history(rest: Rest, topics: tuple[str, ...], *, count: int, seed: int) -> History:
    """Prepare `count` transactions over several topics and end most of them, in every way there is."""
    rng = random.Random(seed)
    history = History(topics=topics)
    (await rest.put_group("shop", topics=topics, policy=QUIET)).expect(200, 201)
    (await rest.put_group("parking", topics=topics, policy=PARK_AT_ONCE)).expect(200, 201)
    async with asyncio.TaskGroup() as parts:
        # Each takes what is random from its own seed: which of them comes first is not known.
        for part in (_parked, _given_up, _checked):
            parts.create_task(part(rest, history, random.Random(rng.random())))
        parts.create_task(_ended(rest, history, random.Random(rng.random()), count))
    return history


async def _ended(rest: Rest, history: History, rng: random.Random, count: int) -> None:
    topics = history.topics
    for start in range(0, count, BATCH):
        wanted = [_messages(rng, topics) for _ in range(min(BATCH, count - start))]
        own_ids = [new_id() if rng.random() < 0.3 else None for _ in wanted]
        body = [preparation("shop", messages, as_id=own) for messages, own in zip(wanted, own_ids, strict=True)]
        answer = (await rest.batch(prepare=body)).expect(200)
        ids = [str(item["body"]["id"]) for item in answer["prepare"]]
        history.messages |= dict(zip(ids, wanted, strict=True))
        outcomes = rng.choices(["commit", "rollback", None], [70, 25, 5], k=len(ids))
        ends = [{"id": name, "outcome": how} for name, how in zip(ids, outcomes, strict=True) if how is not None]
        ended = (await rest.batch(end=ends)).expect(200)
        assert {item["status"] for item in ended["end"]} == {200}
        verdicts = {"commit": "committed_ok", "rollback": "rolled_back_ok", None: "pending"}
        history.expected |= {name: verdicts[how] for name, how in zip(ids, outcomes, strict=True)}


def _messages(rng: random.Random, topics: Sequence[str]) -> list[Json]:
    chosen = [
        message(rng.choice(topics), f"value {rng.random()}", key=f"key {rng.randrange(50)}", headers=[])
        for _ in range(rng.choice((1, 1, 2, 3)))
    ]
    # Two equal messages are no mistake.
    return [*chosen, chosen[0]] if rng.random() < 0.1 else chosen


async def _parked(rest: Rest, history: History, rng: random.Random) -> None:
    ids = []
    for _ in range(14):
        messages = _messages(rng, history.topics)
        ids.append(await rest.prepared("parking", messages))
        history.messages[ids[-1]] = messages
    await asyncio.gather(*(rest.until(name, "parked") for name in ids))
    # What is resumed under the same policy is parked again soon: it may have to be ended from there.
    for name, verdict in zip(ids, ["parked", "committed_ok", "rolled_back_ok"] * 4, strict=False):
        history.expected[name] = verdict
        if verdict == "parked":
            continue
        (await rest.resume(name)).expect(200)
        outcome = "commit" if verdict == "committed_ok" else "rollback"
        (await rest.end(name, outcome)).expect(200)
    (await rest.put_group("parking", topics=history.topics, policy=QUIET)).expect(200)
    for name in ids[12:]:
        (await rest.resume(name)).expect(200)
        history.expected[name] = "pending"


async def _given_up(rest: Rest, history: History, rng: random.Random) -> None:
    # Policy rolls back only what was asked about.
    endpoint = CheckEndpoint("unknown")
    await endpoint.start()
    try:
        giving_up = PARK_AT_ONCE | {"on_exhausted": "rollback", "max_age_s": 3600, "max_checks": 1}
        (await rest.put_group("giving-up", topics=history.topics, urls=[endpoint.url], policy=giving_up)).expect(
            200, 201
        )
        ids = []
        for _ in range(3):
            messages = _messages(rng, history.topics)
            ids.append(await rest.prepared("giving-up", messages))
            history.messages[ids[-1]] = messages
        for name in ids:
            await rest.until(name, "rolled_back")
            history.expected[name] = "rolled_back_ok"
    finally:
        await endpoint.stop()


async def _checked(rest: Rest, history: History, rng: random.Random) -> None:
    for outcome, verdict in (("commit", "committed_ok"), ("rollback", "rolled_back_ok"), ("unknown", "pending")):
        messages = _messages(rng, history.topics)
        name = await rest.prepared("shop", messages)
        history.messages[name] = messages
        (await rest.check(name)).expect(202)
        leased = [check for check in await rest.lease("shop", wait_s=10) if check["id"] == name]
        (await rest.end(name, outcome, check_id=leased[0]["check_id"] if leased else None)).expect(200)
        history.expected[name] = verdict


class Rogue:
    """A producer that writes what only the lane may write, in its very format."""

    def __init__(self, bootstrap_servers: str, prefix: str, shards: int) -> None:
        self._servers = bootstrap_servers
        self._prefix = prefix
        self._shards = shards
        self._producer = Producer({"bootstrap.servers": bootstrap_servers})
        self._partitions: dict[str, int] = {}
        self._writer = self._writing(self._producer)

    def _writing(self, producer: Producer) -> Writer:
        return Writer(KafkaLog(producer, self._partition), "shop", self._prefix)

    def plant(self, history: History, seed: int) -> dict[str, str]:
        """Plant two of each anomaly and return their verdicts, which are in `history` too."""
        rng = random.Random(seed)
        topic = history.topics[0]
        committed = rng.sample(
            [name for name in history.with_verdict("committed_ok") if len(history.messages[name]) == 1], 4
        )
        planted: dict[str, str] = {}
        for name in committed[:2]:
            self.message(name, as_messages(history.messages[name])[0], 1, 1)
            planted[name] = "doubled"
        for name in committed[2:]:
            self.op(name, OpKind.ROLLED_BACK, [])
            planted[name] = "contradicted"
        for name in (rng.choice(history.with_verdict("rolled_back_ok")), rng.choice(history.with_verdict("pending"))):
            self.message(name, as_messages(history.messages[name])[0], 1, 1)
            planted[name] = "leaked"
        for number in range(2):
            bodies = [message(topic, text, key="k", headers=[]) for text in ("1", "2")]
            first, second = as_messages(bodies)
            lost, torn, changed = (f"{what}-{number}-{uuid4().hex[:8]}" for what in ("lost", "torn", "changed"))
            self.op(lost, OpKind.COMMITTED, [first, second])
            self.op(torn, OpKind.COMMITTED, [first, second])
            self.message(torn, second, 2, 2)
            self.op(changed, OpKind.COMMITTED, [first])
            self.message(changed, second, 1, 1)
            planted |= {lost: "lost", torn: "torn", changed: "payload_changed"}
            history.messages |= {lost: bodies, torn: bodies, changed: bodies[:1]}
        self.flush()
        history.expected |= planted
        return planted

    def plant_garbage(self, history: History) -> None:
        """Write records that cannot be read into all topics except the real ones.

        One of them is an outcome, whose message is there, and one a transaction that was parked.
        """
        for kind in ("op", "half"):
            self._producer.produce(self._prefix + kind, b"\x00garbage", b"who-knows", 0)
        headers = codec.record_headers("op", "shop", "committed")
        self._producer.produce(self._prefix + "op", b"\xc3\x01garbage-in-avro", b"damaged", 0, headers=headers)
        (named,) = as_messages([message(history.topics[0], "1", key="k", headers=[])])
        self.message("damaged", named, 1, 1)
        history.expected["damaged"] = "not_judged"
        self._producer.produce(
            self._prefix + "half", None, b"parked", 0, headers=codec.record_headers("half", "shop", "parked")
        )
        headers = codec.record_headers("parked", "shop", "parked")
        self._producer.produce(self._prefix + "parked", b"\xc3\x01garbage-in-avro", b"parked", 0, headers=headers)
        history.expected["parked"] = "parked"
        self._producer.produce(self._prefix + "groups", b"\xc3\x01garbage-in-avro", b"garbled", 0)
        self.flush()

    def abort(self, history: History) -> None:
        """Write messages of rolled back and pending transactions in a Kafka transaction that is aborted."""
        producer = self._transaction(history)
        assert producer.flush(ANSWERED_WITHIN_S) == 0
        producer.abort_transaction(ANSWERED_WITHIN_S)

    def leave_open(self, history: History, name: str) -> Producer:
        """Write a second copy of a message in a Kafka transaction, and give its producer before it is ended."""
        producer = self._transaction(history, name)
        assert producer.flush(ANSWERED_WITHIN_S) == 0
        return producer

    def _transaction(self, history: History, *names: str) -> Producer:
        settings = {"bootstrap.servers": self._servers, "transactional.id": f"rogue-{uuid4().hex}"}
        # One that is left open stays so however long a test takes.
        producer = Producer({**settings, "transaction.timeout.ms": 900_000})
        producer.init_transactions(ANSWERED_WITHIN_S)
        producer.begin_transaction()
        writer, now = self._writing(producer), round(time.time() * 1000)
        for name in names or [*history.with_verdict("rolled_back_ok")[:20], *history.with_verdict("pending")[:20]]:
            for index, each in enumerate(as_messages(history.messages[name]), 1):
                writer.message(name, each, f"{index}/{len(history.messages[name])}", now, now, prefix=None)
        return producer

    def message(self, name: str, what: Message, index: int, total: int) -> None:
        now = round(time.time() * 1000)
        self._writer.message(name, what, f"{index}/{total}", now, now, prefix=None)

    def op(self, name: str, kind: OpKind, messages: list[Message]) -> None:
        now = round(time.time() * 1000)
        self._writer.op(name, kind, messages, now, now - 5)

    def commit(self, name: str, what: Message) -> None:
        """Write an outcome and the message that it names."""
        self.op(name, OpKind.COMMITTED, [what])
        self.message(name, what, 1, 1)
        self.flush()

    def flush(self) -> None:
        assert self._producer.flush(ANSWERED_WITHIN_S) == 0

    def _partition(self, topic: str, key: bytes | None) -> int:
        """Return the partition that halfway chooses: messages with one key have one order, from any producer."""
        assert key is not None
        if topic == self._prefix + "op":
            return partition_for_key(key, self._shards)
        if topic not in self._partitions:
            metadata = self._producer.list_topics(topic, timeout=ANSWERED_WITHIN_S)
            self._partitions[topic] = len(metadata.topics[topic].partitions)
        return partition_for_key(key, self._partitions[topic])


def as_messages(bodies: Sequence[Json]) -> list[Message]:
    def each() -> Iterator[Message]:
        for body in bodies:
            yield Message(topic=body["topic"], key=body["key"].encode(), value=body["value"].encode())

    return list(each())


def events(history: History, verdicts: Mapping[str, str]) -> list[AnyEvent]:
    """Return the calls and answers for the checker: every prepare, and an end for each of these verdicts."""
    outcomes: dict[str, tuple[Outcome, str]] = {
        "committed_ok": ("commit", "committed"),
        "rolled_back_ok": ("rollback", "rolled_back"),
    }
    told: list[AnyEvent] = [Run(seed=0, topics=history.topics)]
    for name, bodies in history.messages.items():
        contents = tuple(content_of(each.topic, each.key, each.value) for each in as_messages(bodies))
        told += [
            Prepare(ref=name, group="shop", contents=contents),
            Prepared(ref=name, status=201, id=name, state="prepared"),
        ]
        if verdicts[name] in outcomes:
            outcome, state = outcomes[verdicts[name]]
            told += [
                End(id=name, outcome=outcome),
                Ended(id=name, outcome=outcome, status=200, state=state, changed=True),
            ]
    return [*told, AtRest()]
