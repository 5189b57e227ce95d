"""Random logs whose verdicts are known by construction."""

import random
from uuid import UUID

from halfway.protocol.records import Message, OpKind
from tests.support.pipeline.log_writer import Writer
from tests.support.pipeline.logs import HORIZON, KINDS, PREFIX, SLACK, START, Log

REAL = ("orders", "mails")
Expected = dict[tuple[str, int], str]
"""By id and use, the verdict."""


class RandomLog:
    """A log of transactions that went well or wrong in every way; `expected` is by id and use.

    An audit of one log costs nearly as much as one of fifty: those of several seeds can be in the same topics, because
    no verdict depends on another id.
    """

    def __init__(self, *seeds: int, count: int = 60) -> None:
        self.log = Log()
        self.expected: Expected = {}
        self._writer = Writer(self.log)
        self._writer.lay_out(START)
        ways = [getattr(self, name) for name in dir(type(self)) if name.startswith("way_")]
        for seed in seeds:
            self.random = random.Random(seed)
            self._at = START
            for number in range(count):
                self._at += self.random.randrange(1, 20_000)
                # Each way at least once, where there is room for all.
                way = ways[number] if number < len(ways) else self.random.choice(ways)
                way(f"mine-{seed}-{number}" if self.random.random() < 0.5 else self._server_id())
        self.log.settle()
        self.end = max(record.at for record in self.log.records if record.at < START * 2)

    def _server_id(self) -> str:
        chance = self.random.getrandbits(62)
        return f"0-{UUID(int=self._at << 80 | 7 << 76 | 2 << 62 | chance)}"

    def _messages(self) -> list[Message]:
        count = self.random.randrange(1, 4)
        return [
            Message(
                topic=self.random.choice(REAL),
                key=self.random.choice((None, b"k", b"")),
                value=self.random.choice((None, b"v", self.random.randbytes(5))),
                headers=self.random.choice(((), (("h", b"1"),), (("h", None), ("h", b"")))),
            )
            for _ in range(count)
        ]

    def _prepared(self, name: str) -> tuple[list[Message], int, int]:
        messages, took = self._messages(), self.random.choice((3, 50, 4_000, 2 * HORIZON))
        self._writer.half(name, messages, self._at)
        return messages, self._at, self._at + took

    def way_committed(self, name: str) -> None:
        messages, prepared_at, at = self._prepared(name)
        self._writer.commit(name, messages, at, prepared_at)
        self.expected[name, 0] = "committed_ok"

    def way_rolled_back(self, name: str) -> None:
        _, prepared_at, at = self._prepared(name)
        self._writer.roll_back(name, at, prepared_at)
        self.expected[name, 0] = "rolled_back_ok"

    def way_pending(self, name: str) -> None:
        messages, prepared_at, at = self._prepared(name)
        if self.random.random() < 0.5:
            self._writer.half(name, messages, at, prepared_at=prepared_at)
        self.expected[name, 0] = "pending"

    def way_parked(self, name: str) -> None:
        messages, prepared_at, at = self._prepared(name)
        self._writer.park(name, messages, at, prepared_at)
        self.expected[name, 0] = "parked"

    def way_resumed(self, name: str) -> None:
        messages, prepared_at, at = self._prepared(name)
        self._writer.park(name, messages, at, prepared_at)
        again = at + self.random.choice((10, 2 * HORIZON))
        self._writer.half(name, messages, again, prepared_at=prepared_at)
        self._writer.write_tombstone("parked", name, again, "prepared")
        self.expected[name, 0] = "pending"
        if self.random.random() < 0.5:
            self._writer.commit(name, messages, again + 100, prepared_at)
            self.expected[name, 0] = "committed_ok"

    def way_leaked_while_pending(self, name: str) -> None:
        messages, prepared_at, at = self._prepared(name)
        self._writer.half(name, messages, at + 10, prepared_at=prepared_at)
        self._writer.message(name, messages[0], f"1/{len(messages)}", at, prepared_at)
        self.expected[name, 0] = "leaked"

    def way_leaked_though_rolled_back(self, name: str) -> None:
        messages, prepared_at, at = self._prepared(name)
        self._writer.message(name, messages[0], f"1/{len(messages)}", at, prepared_at)
        self._writer.roll_back(name, at, prepared_at)
        self.expected[name, 0] = "leaked"

    def way_forged(self, name: str) -> None:
        """Others can write anything into a header."""
        absurd = self.random.choice((9_223_372_036_854_775_807, -1, "soon", 10**30, ""))
        for _ in range(2):
            self._writer.message(name, self._messages()[0], "1/1", self._at, absurd, prefix=None)
        self.expected[name, 0] = "leaked"

    def way_lost(self, name: str) -> None:
        messages, prepared_at, at = self._prepared(name)
        self._writer.op(name, OpKind.COMMITTED, messages, at, prepared_at)
        self._writer.write_tombstone("half", name, at, "committed")
        self.expected[name, 0] = "lost"

    def way_gone(self, name: str) -> None:
        _, _, at = self._prepared(name)
        self._writer.write_tombstone("half", name, at, "committed")
        self.expected[name, 0] = "lost"

    def way_torn(self, name: str) -> None:
        messages, prepared_at, at = self._prepared(name)
        messages.append(messages[0])
        self._writer.message(name, messages[0], f"1/{len(messages)}", at, prepared_at)
        self._writer.op(name, OpKind.COMMITTED, messages, at, prepared_at)
        self._writer.write_tombstone("half", name, at, "committed")
        self.expected[name, 0] = "torn"

    def way_doubled(self, name: str) -> None:
        messages, prepared_at, at = self._prepared(name)
        self._writer.commit(name, messages, at, prepared_at)
        for _ in range(self.random.randrange(1, 30)):
            late = at + self.random.choice((0, 7, HORIZON // 2, 3 * HORIZON))
            self._writer.message(name, messages[0], f"1/{len(messages)}", late, prepared_at)
        self.expected[name, 0] = "doubled"

    def way_changed(self, name: str) -> None:
        messages, prepared_at, at = self._prepared(name)
        other = [Message(topic=each.topic, key=each.key, value=b"other") for each in messages]
        for number, message in enumerate(other, 1):
            self._writer.message(name, message, f"{number}/{len(other)}", at, prepared_at)
        self._writer.op(name, OpKind.COMMITTED, messages, at, prepared_at)
        self._writer.write_tombstone("half", name, at, "committed")
        self.expected[name, 0] = "payload_changed"

    def way_contradicted(self, name: str) -> None:
        messages, prepared_at, at = self._prepared(name)
        self._writer.commit(name, messages, at, prepared_at)
        self._writer.op(name, OpKind.ROLLED_BACK, (), at + 20, prepared_at)
        self.expected[name, 0] = "contradicted"

    def way_not_judged(self, name: str) -> None:
        messages, prepared_at, at = self._prepared(name)
        for number, message in enumerate(messages, 1):
            self._writer.message(name, message, f"{number}/{len(messages)}", at, prepared_at)
        self._writer.raw_op(name, b"\xc3\x01newer...and what it says", at, "committed")
        self._writer.write_tombstone("half", name, at, "committed")
        self.expected[name, 0] = "not_judged"

    def way_foreign(self, name: str) -> None:
        """Another deployment writes to the same topics, and may use the same ids."""
        messages, prepared_at, at = self._prepared(name)
        self._writer.commit(name, messages, at, prepared_at)
        self._writer.message(name, messages[0], "1/1", at + 5, at, prefix="other.")
        self._writer.message(f"theirs-{name}", messages[0], "1/1", at + 5, at, prefix="other.")
        self.expected[name, 0] = "committed_ok"

    def way_older(self, name: str) -> None:
        """An earlier deployment has written to the same topics. It continues, and can have used the same ids."""
        name = f"older-{name}"
        prefix = self.random.choice((None, PREFIX))
        late = self.random.choice((0, 10_000, 4 * HORIZON))
        self._writer.message(name, self._messages()[0], "1/1", self._at + late, START - 3 * HORIZON, prefix=prefix)
        if self.random.random() < 0.5:
            messages, prepared_at, at = self._prepared(name)
            self._writer.commit(name, messages, at, prepared_at)
            self.expected[name, 1] = "committed_ok"

    def way_leaked_beside_an_older_one(self, _: str) -> None:
        """Messages of this deployment are judged, even if older ones have the same id."""
        name = self._server_id()
        for prepared_at in (self._at, START - 3 * HORIZON):
            self._writer.message(name, self._messages()[0], "1/1", self._at, prepared_at)
        self.expected[name, 0] = "leaked"

    def way_forged_before_it_is_committed(self, _: str) -> None:
        """Whoever forges a message of an id that is made only later says when it was prepared."""
        at, self._at = self._at, self._at + 3_600_000
        name = self._server_id()
        messages, prepared_at, ended_at = self._prepared(name)
        self._writer.message(name, messages[0], f"1/{len(messages)}", at, self.random.choice((5, prepared_at)))
        self._writer.commit(name, messages, ended_at, prepared_at)
        self.expected[name, 0] = "doubled"

    def way_aborted(self, name: str) -> None:
        """Ids in a Kafka transaction that is aborted are unknown."""
        self.log.aborting = True
        self._writer.commit(name, self._messages(), self._at, self._at)
        self.log.aborting = False

    def way_used_again(self, name: str) -> None:
        """An id that a client brought is another transaction after the horizon."""
        name = f"again-{name}"
        for life in range(2):
            messages, prepared_at = self._messages(), self._at + life * 3 * HORIZON
            self._writer.half(name, messages, prepared_at)
            self._writer.commit(name, messages, prepared_at + 9, prepared_at)
            self.expected[name, life] = "committed_ok"

    def way_clock_set(self, name: str) -> None:
        """Between prepare and end a clock is set, right or wrong."""
        self.log.ahead, then = self.random.choice(((0, -3 * HORIZON), (0, -60_000), (60_000, 0), (3 * HORIZON, 0)))
        prepared_at = self._at + self.log.ahead
        messages, _, at = self._prepared(name)
        self.log.ahead = then
        self._writer.commit(name, messages, at, prepared_at)
        self.log.ahead = 0
        self.expected[name, 0] = "committed_ok"

    def way_used_again_by_another_clock(self, name: str) -> None:
        """Whoever prepares it has forgotten it, and is behind by as much as clocks may differ."""
        name = f"again-{name}"
        for life in range(2):
            self.log.ahead = -SLACK * life
            at = self._at + (HORIZON + 10) * life
            messages, prepared_at = self._messages(), at + self.log.ahead
            self._writer.half(name, messages, at)
            self._writer.commit(name, messages, at + 9, prepared_at)
            self.expected[name, life] = "committed_ok"
        self.log.ahead = 0

    def age(self, until: int) -> None:
        """Let retention remove about half of the real topics' records until a time, and in one log of four all of one.

        What stands first then was written by a clock that is right: no other would tell since when the rest is whole.
        """
        if self.random.random() < 0.25:
            topic = self.random.choice(REAL)
            self.log.kept_ms = self.random.choice((None, 1000 * HORIZON))
            self.log.trim(topic, sum(record.topic == topic and record.at <= until for record in self.log.records))
            return
        for topic in REAL:
            there = [record for record in self.log.records if record.topic == topic and record.at <= until]
            if firsts := [each for each in there if each.named and each.told_at == each.at and not each.aborted]:
                self.log.trim(topic, self.random.choice(firsts).offset)

    def compact(self) -> None:
        """Compact halfway's topics: the first use of an id loses its outcome, and contradictions one of theirs."""
        self.log.compacted = frozenset(PREFIX + kind for kind in KINDS)
        until = self.end + 1
        for kind in ("half", "op", "parked"):
            self.log.compact(PREFIX + kind, until)
        ops = {record.key for record in self.log.records if record.topic == PREFIX + "op" and not record.gone}
        assert ops
        for (name, life), verdict in [*self.expected.items()]:
            if name.startswith("again-") and life == 0:
                self.expected[name, life] = "expired_unknown"
            elif verdict == "contradicted":
                # The rollback is the last record in op now, and the messages are still there.
                self.expected[name, life] = "leaked"
            elif verdict == "lost" and not any(
                record.key == name.encode() and not record.gone
                for record in self.log.records
                if record.topic.startswith(PREFIX)
            ):
                del self.expected[name, life]  # fmt: skip
