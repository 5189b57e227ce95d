"""Small histories for the rules of *verdict*, and what judges many of them in one go."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from halfway.pipeline.engines.engine import Engine
from halfway.pipeline.transforms.evidence import Evidence, Limits, of_ops
from halfway.pipeline.transforms.verdict import verdicts

HOUR = 3_600_000
NOW = 1_000 * HOUR
HORIZON = 900_000
SLACK = 5_000
SERVER_MADE = "3-01890a5d-ac96-774b-bcce-b302099a8057"

OPS = (
    "id string, `group` string, kind string, cause string, prepared_at bigint, at bigint, written_at bigint, "
    "partition int, offset bigint, "
    "messages array<struct<topic: string, key_hash: binary, value_hash: binary, size: bigint, headers_hash: binary, "
    "partition: int>>"
)
HALVES = "id string, alive boolean, at bigint, `group` string, offset bigint, prepared_at bigint"
MESSAGES = (
    "id string, prepared_at bigint, at bigint, key_hash string, content string, own_headers string, topic string, "
    "partition int, offset bigint, slot int, total int"
)
TIMES = "id string, at bigint"


def hash_of(content: int | str) -> bytes:
    return f"{content}".encode().ljust(16, b"-")


def key(content: int) -> str:
    return hash_of(f"k{content}").hex()


@dataclass
class History:
    """Records of the topics, as the transforms get them; times are ms. Ids of clients get the prefix."""

    prefix: str = ""
    ops: list[tuple[Any, ...]] = field(default_factory=list)
    halves: list[tuple[Any, ...]] = field(default_factory=list)
    parked: list[tuple[Any, ...]] = field(default_factory=list)
    messages: list[tuple[Any, ...]] = field(default_factory=list)
    unsettled: list[tuple[str, int]] = field(default_factory=list)
    unreadable: list[tuple[str, int]] = field(default_factory=list)
    later: list[tuple[str, int]] = field(default_factory=list)
    offset: int = 0

    def op(
        self,
        name: str,
        outcome: str,
        contents: Sequence[int] = (),
        *,
        at: int = NOW - HOUR,
        took: int = 10,
        headers: int | None = None,
        partition: int | None = None,
    ) -> None:
        """An outcome; its messages, each known by its content, are for the topic `orders`."""
        digests = [
            {
                "topic": "orders",
                "key_hash": hash_of(f"k{content}"),
                "value_hash": hash_of(content),
                "size": 1,
                "headers_hash": None if headers is None else hash_of(headers),
                "partition": partition,
            }
            for content in contents
        ]
        self.ops.append(
            (self._own(name), "g", outcome.upper(), "producer", at - took, at, at, 0, self._next(), digests or None)
        )

    def message(
        self,
        name: str,
        content: int,
        slot: int | None,
        *,
        at: int = NOW - HOUR,
        took: int = 10,
        total: int | None = None,
        headers: int = 0,
        partition: int = 0,
    ) -> None:
        what = key(content)[:16] + hash_of(content).hex()[:16]
        place = ("orders", partition, self._next())
        self.messages.append(
            (self._own(name), at - took, at, key(content), what, hash_of(headers).hex()[:16], *place, slot, total)
        )

    def counted_messages(self) -> list[tuple[Any, ...]]:
        """Each message counts as many as its op names."""
        totals = {op[0]: len(op[-1] or ()) for op in self.ops}
        return [(*row, slot, total or (slot and totals.get(row[0], slot))) for *row, slot, total in self.messages]

    def half(self, name: str, *, alive: bool = True, at: int = NOW - HOUR, prepared_at: int | None = None) -> None:
        self.halves.append((self._own(name), alive, at, "g", self._next(), prepared_at))

    def park(self, name: str, *, alive: bool = True, at: int = NOW - HOUR, prepared_at: int = NOW - 2 * HOUR) -> None:
        self.parked.append((self._own(name), alive, at, "g", self._next(), prepared_at if alive else None))

    def leave_unsettled(self, name: str, *, at: int = NOW - HOUR) -> None:
        self.unsettled.append((self._own(name), at))

    def leave_unreadable(self, name: str) -> None:
        self.unreadable.append((self._own(name), NOW - HOUR))

    def use_later(self, name: str, *, at: int) -> None:
        self.later.append((self._own(name), at))

    def _own(self, name: str) -> str:
        return name if name == SERVER_MADE else self.prefix + name

    def _next(self) -> int:
        self.offset += 1
        return self.offset


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known beside the records; scenarios with the same facts are judged together."""

    op_whole_since: tuple[tuple[int, int], ...] = ()
    """By shard."""
    op_kept_since: int = NOW
    half_kept_since: int | None = None
    provable_since: int = 0
    kept_since: int = NOW
    own_since: tuple[tuple[int, int], ...] = ()
    """By partition, if it is another time than `provable_since`."""
    last_of_keys: tuple[tuple[int, int | None], ...] | None = None
    topics: tuple[str, ...] = ("orders",)
    cut: int = NOW


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A small history and the verdicts that it must get, in the order of ids and their uses."""

    build: Callable[[History], None]
    expected: list[tuple[str, str]]
    facts: Facts


EVERYTHING_STANDS = Facts()
"""Nothing has been deleted."""
Build = Callable[[History], None]


def scenario(
    into: dict[str, Scenario], expected: list[tuple[str, str]], *, facts: Facts = EVERYTHING_STANDS
) -> Callable[[Build], Build]:
    """Take a function that writes a history, under its name, as a scenario with these verdicts."""

    def take(build: Build) -> Build:
        into[build.__name__] = Scenario(build=build, expected=expected, facts=facts)
        return build

    return take


def judge(engine: Engine, histories: Sequence[History], facts: Facts) -> list[dict[str, Any]]:
    frame = engine.table
    keys = None
    if facts.last_of_keys is not None:
        rows = [("orders", key(content), at) for content, at in facts.last_of_keys]
        keys = frame(rows, "topic string, key_hash string, last_at bigint")
    topics = [(name, facts.provable_since, facts.kept_since, keys is not None) for name in facts.topics]
    partitions = [("orders", number, since) for number, since in facts.own_since]
    ends, named = of_ops(engine, frame([row for each in histories for row in each.ops], OPS))
    evidence = Evidence(
        ops=ends,
        named=named,
        halves=frame([row for each in histories for row in each.halves], HALVES),
        parked=frame([row for each in histories for row in each.parked], HALVES),
        messages=frame([row for each in histories for row in each.counted_messages()], MESSAGES),
        unsettled=frame([row for each in histories for row in each.unsettled], TIMES),
        unreadable=frame([row for each in histories for row in each.unreadable], TIMES),
        later=frame([row for each in histories for row in each.later], TIMES),
        topics=frame(topics, "topic string, provable_since bigint, kept_since bigint, compacted boolean"),
        partitions=frame(partitions, "topic string, partition int, provable_since bigint"),
        latest_of_keys=keys,
    )
    limits = Limits(
        cut=facts.cut,
        op_whole_since=dict(facts.op_whole_since),
        op_kept_since=facts.op_kept_since,
        half_kept_since=facts.half_kept_since,
        horizon_ms=HORIZON,
        slack_ms=SLACK,
    )
    judged = verdicts(engine, evidence, limits)
    return sorted(engine.rows(judged), key=lambda row: (row["id"], row["life"]))


def verdicts_of(
    engine: Engine, scenarios: dict[str, Scenario], with_server_made_id: Callable[[Facts], str]
) -> dict[str, list[tuple[str, str]]]:
    """Judge every scenario, those with the same facts in one go."""
    histories = {name: History(prefix=f"{name}:") for name in scenarios}
    for name, history in histories.items():
        scenarios[name].build(history)
    found: dict[str, list[tuple[str, str]]] = {name: [] for name in scenarios}
    for facts in {each.facts for each in scenarios.values()}:
        together = [history for name, history in histories.items() if scenarios[name].facts == facts]
        for row in judge(engine, together, facts):
            name, _, transaction = row["id"].rpartition(":")
            found[name or with_server_made_id(facts)].append((transaction, row["verdict"]))
    return found
