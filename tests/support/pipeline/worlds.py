"""Random histories as a deployment makes them in weeks, and a source that shows them as of any moment.

There are several shards and partitions, coordinators whose clocks differ, checks, parked and resumed transactions, ids
that are used again, aborted Kafka transactions, other producers, idle partitions, and a few keys that most messages
have. Compaction, op's retention and that of real topics remove records at any time. Pins are taken one after the other
while everything goes on. Nothing in such a history is wrong; `plant` adds what is. `disagreements` says which verdicts
of an audit are not those of the history.

An audit costs about the same for one history and for fifty, so `Worlds` puts several into one deployment: each has
shards and real topics of its own, and no verdict depends on those of another one.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import count
from typing import Any, Final

import pyarrow as pa

from halfway.kafka.records import codec
from halfway.pipeline.engines.duckdb import DuckEngine
from halfway.pipeline.engines.engine import Engine
from halfway.pipeline.sources.duckdb import RECORD
from halfway.pipeline.sources.pinned import UNSETTLED, Part, Rows, Source
from halfway.pipeline.sources.pins import PartitionPin, Pins, TopicPin
from halfway.protocol.ids import partition_for_key
from halfway.protocol.records import Half, Message, MessageDigest, Op, OpKind, Parked
from halfway.protocol.transactions import Cause
from tests.support.pipeline.logs import HORIZON, PREFIX, START, Headers, frame_of

DAY: Final = 86_400_000
SHARDS: Final = 3
OP_KEPT_MS: Final = 7 * DAY
REAL_KEPT_MS: Final = 5 * DAY
REAL: Final = {"orders": 3, "mails": 2, "state": 2}
"""The real topics of a world and their partitions. `state` is compacted."""
INTERNAL: Final = frozenset(PREFIX + kind for kind in ("half", "op", "parked"))
NEVER: Final = 1 << 60
LONG_MS: Final = 120_000
"""An audit that begins at a time sees, of what happens so long before or after it, everything or nothing."""
UNPROVABLE: Final = frozenset({"leaked", "lost", "torn"})
"""Anomalies that a removal of other records can hide."""
Place = tuple[str, int]
"""A topic and a partition."""


def compacted(topic: str) -> bool:
    return topic in INTERNAL or topic.startswith("state")


@dataclass
class Record:
    """A record; `at` is when it was written, `told_at` what its writer's clock said, `visible_at` when it committed."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    at: int
    told_at: int
    headers: Headers
    visible_at: int
    aborted: bool = False
    gone_at: int = NEVER
    """When compaction removed it."""
    offset: int = -1


@dataclass(frozen=True, kw_only=True)
class Transaction:
    """One transaction of a world, whose coordinator's clock is `skew` ms ahead."""

    id: str
    shard: int
    skew: int
    messages: tuple[Message, ...]
    prepared_at: int
    """By the coordinator's clock."""

    def half(self, since: int) -> Half:
        return Half(
            id=self.id,
            group="g",
            messages=self.messages,
            prepared_at=self.prepared_at,
            since=since + self.skew,
            fingerprint=b"f" * 16,
        )


@dataclass
class World:
    """A history of `days` days, made from a seed. A quarter of it happens in the last minute, one in the last hour.

    It is the one with a number among so many that share the topics of halfway.
    """

    seed: int
    number: int = 0
    among: int = 1
    days: int = 12
    count: int = 120
    records: list[Record] = field(default_factory=list)
    planted: dict[str, str] = field(default_factory=dict)
    """By id, the anomaly that was planted."""
    begun: dict[tuple[str, int], Transaction] = field(default_factory=dict)
    """Every use of an id, by id and the time of its prepare by the coordinator's clock."""
    ended: dict[tuple[str, int], tuple[int, str]] = field(default_factory=dict)
    """When each ended, and the verdict that it then has."""
    trims: dict[Place, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """By place, times at which all before an offset was removed."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.end = START + self.days * DAY
        self._number = 0
        self._by_place: dict[Place, list[Record]] = defaultdict(list)
        shards = range(SHARDS * self.number, SHARDS * (self.number + 1))
        self._skew = {shard: self.random.randrange(-2_000, 2_001) for shard in shards}
        self.real = {f"{topic}-{self.number}": partitions for topic, partitions in REAL.items()}
        self._idle = {topic: self.random.random() < 0.5 for topic in self.real}
        layout = codec.encode_layout(codec.Layout(shards=SHARDS * self.among, created_at=START))
        self._write(
            (PREFIX + "owners", 0), codec.LAYOUT_KEY, layout, START, codec.record_headers("layout", "", "created")
        )
        quarter = self.count // 4
        times = [START + self.random.randrange(1, self.days * DAY) for _ in range(self.count - 2 * quarter)]
        times += [self.end - self.random.randrange(3_600_000) for _ in range(quarter)]
        times += [self.end - self.random.randrange(60_000) for _ in range(quarter)]
        for at in sorted(times):
            self._happen(at)
        self._settle()
        self._compact()
        self._age()

    def start_at(self, place: Place, at: int) -> int:
        """Return where a log begins at a time."""
        return max((offset for when, offset in self.trims[place] if when <= at), default=0)

    def place(self, topic: str, partition: int) -> list[Record]:
        """Return the records of a partition by offset."""
        return self._by_place[topic, partition]

    # --- what happens

    def _happen(self, at: int) -> None:
        chance = self.random
        if chance.random() < 0.2:
            self._foreign(at)
        transaction = self._new(at)
        if transaction.id.startswith("client") and chance.random() < 0.3:
            for _ in range(chance.randrange(1, 4)):
                ended_at = self._run(transaction, at, must_end=True)
                at = ended_at + HORIZON + chance.choice((4_001, 10_000, HORIZON, 2 * DAY)) + chance.randrange(5)
                transaction = replace(
                    transaction, messages=self._messages(), prepared_at=at + self._skew[transaction.shard]
                )
        else:
            self._run(transaction, at)

    def _new(self, at: int) -> Transaction:
        self._number += 1
        if self.random.random() < 0.6:
            shard = self.random.choice([*self._skew])
            digits = f"{at + self._skew[shard]:012x}"
            made = f"{digits[:8]}-{digits[8:]}-7000-8000-{self._number:08x}"
            names = (f"{made}{more:04x}" for more in count())
            hashed = (name for name in names if partition_for_key(name.encode(), SHARDS * self.among) == shard)
            # Earlier releases put the shard before it.
            name = self.random.choice((next(hashed), f"{shard}-{made}0000"))
        else:
            # An id that a client chooses is of one shard of all; only those of this world will do.
            names = (f"client-{self._number}-{more}" for more in count())
            shards = ((name, partition_for_key(name.encode(), SHARDS * self.among)) for name in names)
            name, shard = next((name, shard) for name, shard in shards if shard in self._skew)
        skew = self._skew[shard]
        return Transaction(id=name, shard=shard, skew=skew, messages=self._messages(), prepared_at=at + skew)

    def _messages(self) -> tuple[Message, ...]:
        chance = self.random
        return tuple(
            Message(
                topic=chance.choice([*self.real]),
                key=b"0" if chance.random() < 0.5 else b"%d" % chance.randrange(1, 6),
                value=b"v%d" % chance.randrange(10**6),
                headers=chance.choice(((), (("h", b"1"),))),
            )
            for _ in range(chance.randrange(1, 4))
        )

    def _run(self, one: Transaction, at: int, *, must_end: bool = False) -> int:
        """Let one transaction happen from a time on; return when it ended, or what was last done."""
        chance = self.random
        self._half(one, at)
        at += chance.choice((3, 40, 900, 5_000, 60_000, 2 * HORIZON, DAY))
        if chance.random() < 0.3:
            self._op(one, OpKind.CHECKED, at - 1)
        if chance.random() < 0.15:
            self._half(one, at - 1)
        if not must_end and chance.random() < 0.1:
            self._park(one, at)
            if chance.random() < 0.5:
                return at
            at += chance.choice((10, 2 * HORIZON))
            self._resume(one, at)
            at += chance.choice((5, 5_000))
        if not must_end and chance.random() < 0.1:
            return at
        if chance.random() < 0.2:
            self._end(one, at, OpKind.COMMITTED, aborted=True)
            at += chance.choice((5, 3_000))
        self._end(one, at, OpKind.COMMITTED if chance.random() < 0.8 else OpKind.ROLLED_BACK)
        if chance.random() < 0.1:
            late = at + chance.randrange(1, HORIZON - 10_000)
            self._half(one, late)
            self._tombstone("half", one, late + chance.randrange(1, 3_000), "committed")
        return at

    def _half(self, one: Transaction, at: int, visible: int | None = None) -> None:
        self.begun[one.id, one.prepared_at] = one
        half = one.half(at)
        headers = codec.half_headers(half, "prepared")
        place = (PREFIX + "half", one.shard)
        self._write(place, one.id.encode(), codec.encode_half(half), at, headers, skew=one.skew, visible_at=visible)

    def _tombstone(self, kind: str, one: Transaction, at: int, state: str, **more: Any) -> None:
        headers = codec.record_headers(kind, "g", state)
        self._write((PREFIX + kind, one.shard), one.id.encode(), None, at, headers, skew=one.skew, **more)

    def _op(self, one: Transaction, kind: OpKind, at: int, **more: Any) -> None:
        op = Op(
            kind=kind,
            id=one.id,
            group="g",
            half_offset=0,
            cause=Cause.PRODUCER if kind.final else Cause.CHECK,
            prepared_at=one.prepared_at,
            at=max(at + one.skew, one.prepared_at),
            messages=tuple(map(MessageDigest.of, one.messages)) if kind is OpKind.COMMITTED else (),
        )
        headers = codec.record_headers("op", "g", kind.value.lower())
        place = (PREFIX + "op", one.shard)
        self._write(
            place, one.id.encode(), codec.encode_op(op), at, headers, skew=one.skew, floor=one.prepared_at, **more
        )

    def _park(self, one: Transaction, at: int) -> None:
        seen = self._seen_at(at)
        parked = Parked(half=one.half(at), reason="x", parked_at=at + one.skew, checks=3)
        headers = codec.record_headers("parked", "g", "parked")
        place = (PREFIX + "parked", one.shard)
        self._write(place, one.id.encode(), codec.encode_parked(parked), at, headers, skew=one.skew, visible_at=seen())
        self._tombstone("half", one, at, "parked", visible_at=seen())

    def _resume(self, one: Transaction, at: int) -> None:
        seen = self._seen_at(at)
        self._half(one, at, visible=seen())
        self._tombstone("parked", one, at, "prepared", visible_at=seen())

    def _seen_at(self, at: int) -> Callable[[], int]:
        """Return when the records of a Kafka transaction become visible: in one partition after the other."""
        decided_at = at + self.random.choice((1, 5, 30))
        return lambda: decided_at + self.random.choice((0, 1, 5, 100, 900))

    def _end(self, one: Transaction, at: int, kind: OpKind, *, aborted: bool = False, change: str = "") -> None:
        """End a transaction in one Kafka transaction. `change` is what goes wrong in it."""
        if not aborted:
            verdict = "committed_ok" if kind is OpKind.COMMITTED else "rolled_back_ok"
            self.ended[one.id, one.prepared_at] = (at, verdict)
        seen = self._seen_at(at)
        visible: defaultdict[Place, int] = defaultdict(seen)
        numbered = list(enumerate(one.messages, 1))
        if change == "reordered":
            numbered.reverse()
        for number, message in numbered if kind is OpKind.COMMITTED else ():
            if change == "lost" or (change == "torn" and number == 1):
                continue
            place = (message.topic, self._partition(message, together=change == "reordered"))
            headers = [
                *([("h", b"altered")] if change == "payload_changed" else message.headers),
                ("halfway-transaction-id", one.id.encode()),
                ("halfway-message", b"%d/%d" % (number, len(one.messages))),
                ("halfway-prepared-at", b"%d" % one.prepared_at),
                ("halfway-prefix", PREFIX.encode()),
            ]
            for _ in range(2 if change == "doubled" else 1):
                self._write(
                    place,
                    message.key,
                    message.value,
                    at,
                    headers,
                    skew=one.skew,
                    visible_at=visible[place],
                    aborted=aborted,
                )
        self._op(one, kind, at, visible_at=visible["op", 0], aborted=aborted)
        if change != "half_left":
            self._tombstone(
                "half", one, at, "committed", visible_at=visible["half", 0], aborted=aborted, floor=one.prepared_at
            )

    def _partition(self, message: Message, *, together: bool) -> int:
        """Return a partition; a compacted topic has each key in one. The last partition of an idle topic gets none."""
        if compacted(message.topic) or together:
            return int(message.key or b"0") % 2 if not together else 0
        return self.random.randrange(self.real[message.topic] - self._idle[message.topic])

    def _foreign(self, at: int) -> None:
        """Another producer writes, half of the time to the last partition, which can have no other records."""
        topic = self.random.choice([*self.real])
        key = b"foreign-%d" % self.random.randrange(10)
        place = (topic, self.random.choice((self.random.randrange(self.real[topic]), self.real[topic] - 1)))
        self._write(place, key, b"of another producer", at, [])

    def _write(
        self,
        place: Place,
        key: bytes | None,
        value: bytes | None,
        at: int,
        headers: Iterable[tuple[str, str | bytes | None]],
        *,
        skew: int = 0,
        floor: int = 0,
        visible_at: int | None = None,
        aborted: bool = False,
    ) -> None:
        told_at, seen = max(at + skew, floor), at if visible_at is None else visible_at
        self.records.append(Record(*place, key, value, at, told_at, list(headers), seen, aborted))

    # --- what goes wrong

    def plant(self, anomaly: str, *, ago: int) -> str:
        """Add a transaction that goes wrong in one way, some ms before the end; return its id."""
        at = self.end - ago
        messages = tuple(Message(topic=next(iter(self.real)), key=b"%d" % n, value=b"planted") for n in range(2))
        one = replace(self._new(at), messages=messages)
        self.planted[one.id] = anomaly
        if anomaly == "leaked":
            self._end(one, at, OpKind.COMMITTED)
            self.records = [
                record for record in self.records if record.key != one.id.encode() or record.topic in self.real
            ]
        else:
            if anomaly != "unprepared":
                self._half(one, at - 10)
            self._end(one, at, OpKind.COMMITTED, change=anomaly)
        if anomaly == "unprepared":
            self.records = [
                record for record in self.records if record.key != one.id.encode() or not record.topic.endswith("half")
            ]
        self._settle()
        return one.id

    # --- what an audit must say

    def disagreements(self, rows: Sequence[dict[str, Any]], at: int) -> list[str]:
        """Return what an audit that began at a time has said, or not said, although it is not so.

        A use that was touched while the audit read can have its verdict of before or after. A verdict that needs
        records which Kafka has removed is `expired_unknown`, or `unproved` if they are too young for that.
        """
        touched: Counter[str] = Counter()
        for record in self.records:
            if abs(record.at - at) < LONG_MS or abs(record.visible_at - at) < LONG_MS:
                told = dict(record.headers).get("halfway-transaction-id") or record.key or b""
                touched[told.decode() if isinstance(told, bytes) else told] += 1
        last = {name: max(when for each, when in self.begun if each == name) for name, _ in self.begun}
        found = {(row["id"], _millis(row["prepared_at"])): row["verdict"] for row in rows}
        wrong = []
        for (name, prepared_at), verdict in found.items():
            allowed = self._allowed(name, prepared_at, at, quiet=name not in touched)
            if verdict not in allowed:
                wrong.append(f"{name} prepared at {prepared_at} is {verdict}, not {' or '.join(sorted(allowed))}")
        for name, prepared_at in self.begun:
            ended_at, _ = self.ended.get((name, prepared_at), (at, ""))
            young = prepared_at < at - LONG_MS and ended_at > at - REAL_KEPT_MS + DAY
            if young and last[name] == prepared_at and name not in touched and (name, prepared_at) not in found:
                wrong.append(f"{name} prepared at {prepared_at} has no verdict")
        return wrong

    def _allowed(self, name: str, prepared_at: int | None, at: int, *, quiet: bool) -> set[str]:
        """Return the verdicts that a use of an id can have."""
        if name in self.planted:
            anomaly = self.planted[name]
            return {anomaly, *(["unproved"] if anomaly in UNPROVABLE else [])}
        key = (name, prepared_at or 0)
        one, (ended_at, verdict) = self.begun.get(key), self.ended.get(key, (NEVER, ""))
        if one is None:
            # A trace without the time of its prepare: what is left of it is old.
            return {"expired_unknown", "pending", "unproved"}
        open_still = {"pending", "parked"}
        if ended_at > at + LONG_MS:
            return open_still
        removable = any(self.trims.values()) or any(compacted(message.topic) for message in one.messages)
        old = ended_at <= at - REAL_KEPT_MS + DAY or any(compacted(message.topic) for message in one.messages)
        used_again = any(each == name and prepared_at != key[1] for each, prepared_at in self.begun)
        unknown = {"unproved"} if removable else set()
        unknown |= {"expired_unknown"} if old or used_again else set()
        return {verdict} | unknown | (set() if quiet else open_still)

    # --- what Kafka does

    def _settle(self) -> None:
        self.records.sort(key=lambda record: record.at)
        ends: Counter[Place] = Counter()
        self._by_place.clear()
        for record in self.records:
            place = (record.topic, record.partition)
            record.offset = ends[place]
            ends[place] += 1
            self._by_place[place].append(record)

    def _compact(self) -> None:
        """Let the cleaner run a few times. It stops at the first undecided record."""
        chance = self.random
        for (topic, _), there in self._by_place.items():
            for _ in range(chance.randrange(6) if compacted(topic) else 0):
                now = START + chance.randrange(self.end - START + 120_000)
                before = now - chance.choice((0, 5_000, HORIZON, DAY))
                open_from = min((one.offset for one in there if one.at <= now < one.visible_at), default=NEVER)
                done = [one for one in there if one.visible_at < before and one.offset < open_from]
                last = {one.key: one for one in done if not one.aborted}
                for one in done:
                    old_tombstone = one.value is None and one.at < now - DAY - 3_600_000
                    if one.aborted or last[one.key] is not one or old_tombstone:
                        one.gone_at = min(one.gone_at, now)

    def _age(self) -> None:
        """Let retention remove what is too old, to any offset up to the first that is not.

        An idle partition can lose everything, as after a change of its topic's retention.
        """
        chance = self.random
        for place, there in self._by_place.items():
            if compacted(place[0]) and place[0] != PREFIX + "op":
                continue
            kept_ms = OP_KEPT_MS if place[0] == PREFIX + "op" else REAL_KEPT_MS
            for _ in range(chance.randrange(4) if place[0] in self.real or place[0] == PREFIX + "op" else 0):
                now = START + chance.randrange(kept_ms, self.end - START + 120_000)
                old = next((one.offset for one in there if one.told_at >= now - kept_ms), len(there))
                self.trims[place].append((now, chance.choice((chance.randrange(old + 1), old))))
            if self._idle.get(place[0]) and place[1] == self.real[place[0]] - 1 and chance.random() < 0.5:
                now = self.end - chance.randrange(DAY)
                self.trims[place].append((now, sum(one.at <= now for one in there)))


class Worlds:
    """Several worlds in one deployment, whose seeds begin at this one's times their number."""

    def __init__(self, seed: int, many: int) -> None:
        """Make them."""
        self.seed = seed
        self.worlds = [World(seed * many + number, number, many) for number in range(many)]
        self.end = self.worlds[0].end
        self.shards = SHARDS * many
        self.real = {topic: many for world in self.worlds for topic, many in world.real.items()}
        self._of = {topic: world for world in self.worlds for topic in world.real}

    def world(self, place: Place) -> World:
        """Return whose partition it is."""
        return self._of.get(place[0]) or self.worlds[place[1] // SHARDS]

    def plant(self, anomaly: str, *, ago: int) -> None:
        """Add a transaction that goes wrong to each."""
        for world in self.worlds:
            world.plant(anomaly, ago=ago)

    def disagreements(self, rows: Sequence[dict[str, Any]], at: int) -> list[str]:
        """Return what an audit has said, or not said, although it is not so."""
        by_id = {name: world.seed for world in self.worlds for name in (*(n for n, _ in world.begun), *world.planted)}
        of: defaultdict[int | None, list[dict[str, Any]]] = defaultdict(list)
        for row in rows:
            of[by_id.get(row["id"])].append(row)
        wrong = [f"{row['id']} is {row['verdict']}, and nobody made it" for row in of[None]]
        for world in self.worlds:
            wrong += [f"seed {world.seed}: {each}" for each in world.disagreements(of[world.seed], at)]
        return wrong


class WorldSource(Source):
    """Worlds as an audit sees it that begins at a time; `step` says how long each thing takes, in ms."""

    def __init__(self, engine: DuckEngine | Engine, world: Worlds, at: int, step: Callable[[], int]) -> None:
        """Pin nothing yet."""
        self._engine: Any = engine
        self._world = world
        self._at = at
        self._step = step
        super().__init__(PREFIX, Pins(at=at, topics={}))

    def _present(self, topics: Sequence[str]) -> list[TopicPin]:
        self._at += self._step()
        return [pin for pin in map(self._pin, topics) if pin.partitions]

    def _pin(self, topic: str) -> TopicPin:
        partitions = {PREFIX + "owners": 1, **dict.fromkeys(INTERNAL, self._world.shards), **self._world.real}
        kept_ms = OP_KEPT_MS if topic == PREFIX + "op" else REAL_KEPT_MS if not compacted(topic) else None
        return TopicPin(
            topic=topic,
            at=self._at,
            partitions=tuple(self._partition(topic, number) for number in range(partitions.get(topic, 0))),
            compacted=compacted(topic),
            tombstones_kept_ms=DAY if compacted(topic) else 0,
            kept_ms=kept_ms,
            made="1",
        )

    def _partition(self, topic: str, number: int) -> PartitionPin:
        world = self._world.world((topic, number))
        there, start = world.place(topic, number), world.start_at((topic, number), self._at)
        high = sum(record.at <= self._at for record in there)
        end = min([high, *(record.offset for record in there[:high] if record.visible_at > self._at)])
        kept = (each for each in there[:high] if each.offset >= start and each.gone_at > self._at)
        first = next((record.told_at for record in kept), None)
        return PartitionPin(partition=number, start=min(start, end), end=end, high=high, first_at=first)

    def reopened(self) -> "WorldSource":
        self._at += self._step()
        return WorldSource(self._engine, self._world, self._at, self._step)

    def _read(self, what: str, parts: Sequence[Part], rows: Rows) -> Any:
        self._at += self._step()
        records = [
            {
                "key": record.key,
                "value": record.value,
                "topic": record.topic,
                "partition": record.partition,
                "offset": record.offset,
                "timestamp": datetime.fromtimestamp(record.told_at / 1000, UTC),
                "headers": [
                    {"key": name, "value": value.encode() if isinstance(value, str) else value}
                    for name, value in record.headers
                ],
            }
            for topic, number, start, end in parts
            for world in (self._world.world((topic, number)),)
            for record in world.place(topic, number)[max(start, world.start_at((topic, number), self._at)) : end]
            if record.gone_at > self._at and (what == UNSETTLED or not record.aborted)
        ]
        return self._engine.query(rows.sql, records=frame_of(self._engine, pa.Table.from_pylist(records, RECORD)))


def _millis(time: datetime | None) -> int | None:
    return None if time is None else round(time.timestamp() * 1000)
