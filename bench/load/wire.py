"""The part of HTTP/1.1 that the load needs: requests built in advance, answers split by Content-Length.

A client library would use as much CPU as the coordinator on the same cores, and halve the measured throughput.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from itertools import cycle, islice
from typing import Final, NamedTuple

import msgspec

from bench.audit import SentTransaction
from bench.plan import GROUP, KEYS, VALUE_BYTES, LoadPlan
from halfway.client import Message
from halfway.client.ids import NewIds
from halfway.embedded.broker import HOST
from halfway.protocol.ids import shard_of

_END_OF_HEAD: Final = b"\r\n\r\n"
_LENGTH: Final = b"\r\ncontent-length:"
_ID: Final = b'{"id":"'
_ONE_COMMIT: Final = b'{"outcome":"commit"}'
_BATCHES: Final = 16
_PLACEHOLDER: Final = "i" * len(NewIds().new_id())
"""The placeholder of an id in a prepared request."""
_SHOWN: Final = 300

Contents = Sequence[int]
"""For each transaction in a request, the index of its message in `payloads()`."""


class WireError(Exception):
    """The load did not get the answer that it expects."""


def split(received: bytes) -> tuple[int, bytes, bytes] | None:
    """Return the status and body of the first answer, and the rest; None if it has not arrived in full.

    Raises:
        WireError: it is not an answer with a Content-Length.

    """
    end = received.find(_END_OF_HEAD)
    if end < 0:
        return None
    head = received[:end].lower()
    at = head.find(_LENGTH)
    if at < 0 or not head.startswith(b"http/1.1 "):
        raise WireError(f"not an answer with a Content-Length: {received[:200]!r}")
    start = end + len(_END_OF_HEAD)
    until = start + int(head[at + len(_LENGTH) :].partition(b"\r\n")[0])
    if len(received) < until:
        return None
    return int(head[9:12]), received[start:until], received[until:]


def retry_after(answer: bytes) -> float | None:
    """Return the seconds of a refusal's Retry-After; None if it has none."""
    _, is_present, rest = answer.partition(b"\r\nRetry-After: ")
    return float(rest.partition(b"\r\n")[0]) if is_present else None


def id_in(body: bytes) -> bytes:
    """Return the id in the answer to a prepare; it is the first member."""
    if not body.startswith(_ID):
        raise WireError(f"no id in {body[:200]!r}")
    return body[len(_ID) : body.index(b'"', len(_ID))]


class _Identified(msgspec.Struct, frozen=True, gc=False):
    id: str = ""


class _Item(msgspec.Struct, frozen=True, gc=False):
    status: int
    body: _Identified = _Identified()


class _Batch(msgspec.Struct, frozen=True, gc=False):
    prepare: list[_Item]
    end: list[_Item]


Items = list[tuple[int, bytes]]
_BATCH: Final = msgspec.json.Decoder(_Batch)


def items_in(body: bytes) -> tuple[Items, Items]:
    """Return status and id of each prepare and end in the answer to a batch; the id is empty if it was refused."""
    answer = _BATCH.decode(body)
    prepares, ends = (
        [(item.status, item.body.id.encode()) for item in items] for items in (answer.prepare, answer.end)
    )
    return prepares, ends


def payloads() -> list[tuple[str, str]]:
    """Return key and value of every message of the load; only letters, so that nothing is escaped."""
    letters = random.Random(7)  # the same bytes in every run
    return [
        (f"key-{number:05d}", "".join(letters.choices(string.ascii_letters, k=VALUE_BYTES))) for number in range(KEYS)
    ]


def messages(topic: str) -> Iterator[tuple[int, Message]]:
    """Yield the messages for the Python client in turn, each with its index in `payloads()`."""
    return cycle(
        [(number, Message(topic=topic, key=key, value=value)) for number, (key, value) in enumerate(payloads())]
    )


def post(host: str, path: bytes, body: bytes) -> bytes:
    """Return a request."""
    return b"POST %b HTTP/1.1\r\nHost: %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        path,
        host.encode(),
        len(body),
        body,
    )


def _prepares(topic: str, groups: Sequence[str], **fields: str) -> list[tuple[int, bytes]]:
    """Return the bodies of prepares for `payloads()` and the groups in turn, each with the index of its message."""
    contents = list(enumerate(payloads()))
    in_turn = zip(cycle(contents), cycle(groups), strict=False)
    return [
        (
            number,
            msgspec.json.encode({**fields, "group": group, "messages": [{"topic": topic, "key": key, "value": value}]}),
        )
        for (number, (key, value)), group in islice(in_turn, max(len(contents), len(groups)))
    ]


class Work(NamedTuple):
    """A request to prepare one transaction or several; with an id if the caller chooses it, and then its shard."""

    contents: Contents
    request: bytes
    chosen: bytes = b""
    shard: int = 0


class Singles:
    """Requests of one transaction each, which lack at most the id."""

    def __init__(self, plan: LoadPlan, host: str = HOST) -> None:
        """Build them. Callers choose ids if an answer may fail to come, or if they must know the owner."""
        self._chosen = plan.patience_s is not None or bool(plan.owners)
        fields = {"id": _PLACEHOLDER} if self._chosen else {}
        ready = [
            (number, post(host, b"/v1/transactions", body).split(_PLACEHOLDER.encode()))
            for number, body in _prepares(plan.topic, plan.groups, **fields)
        ]
        self._ready = cycle(ready)
        self._shards, self._count = frozenset(plan.shards), len(plan.owners)
        self._end_before, self._end_after = post(host, b"/v1/transactions/\0/end", _ONE_COMMIT).split(b"\0")

    def next(self) -> Work:
        """Return the next prepare."""
        number, parts = next(self._ready)
        if not self._chosen:
            return Work((number,), parts[0])
        while True:
            name, shard = NewIds().new_id(), 0
            if not self._count or (shard := shard_of(name, self._count) or 0) in self._shards:
                return Work((number,), name.encode().join(parts), name.encode(), shard)

    def prepared(self, work: Work, status: int, body: bytes) -> list[SentTransaction]:
        """Return the transactions that an answer says are prepared, or raise WireError."""
        if status != HTTPStatus.CREATED:
            raise WireError(f"a prepare was answered {status}: {body[:_SHOWN]!r}")
        return [(work.contents[0], id_in(body))]

    def end(self, sent: Sequence[SentTransaction]) -> bytes:
        """Return the commit."""
        return b"%b%b%b" % (self._end_before, sent[0][1], self._end_after)

    def require_ended(self, sent: Sequence[SentTransaction], status: int, body: bytes) -> None:  # noqa: ARG002 - one
        """Raise WireError if an answer does not confirm the commit."""
        if status != HTTPStatus.OK or b'"committed"' not in body:
            raise WireError(f"a commit was answered {status}: {body[:_SHOWN]!r}")


class Batches:
    """Requests of many transactions each."""

    def __init__(self, plan: LoadPlan, host: str = HOST) -> None:
        """Build `_BATCHES` of them."""
        self._host = host
        following = cycle(_prepares(plan.topic, plan.groups))
        ready = []
        for _ in range(_BATCHES):
            several = list(islice(following, plan.batch))
            body = b'{"prepare":[%b]}' % b",".join(prepare for _, prepare in several)
            ready.append(Work([number for number, _ in several], post(host, b"/v1/batch", body)))
        self.next: Callable[[], Work] = cycle(ready).__next__

    def prepared(self, work: Work, status: int, body: bytes) -> list[SentTransaction]:
        """Return the transactions that an answer says are prepared, or raise WireError."""
        if status != HTTPStatus.OK:
            raise WireError(f"a batch of prepares was answered {status}: {body[:_SHOWN]!r}")
        answers = zip(work.contents, items_in(body)[0], strict=True)
        return [(content, name) for content, (code, name) in answers if code == HTTPStatus.CREATED]

    def end(self, sent: Sequence[SentTransaction]) -> bytes:
        """Return a batch of commits."""
        ids = b'","outcome":"commit"},{"id":"'.join([name for _, name in sent])
        return post(self._host, b"/v1/batch", b'{"end":[{"id":"%b","outcome":"commit"}]}' % ids)

    def require_ended(self, sent: Sequence[SentTransaction], status: int, body: bytes) -> None:
        """Raise WireError if an answer does not confirm the commits."""
        ends = items_in(body)[1] if status == HTTPStatus.OK else []
        if [name for code, name in ends if code == HTTPStatus.OK] != [name for _, name in sent]:
            raise WireError(f"a batch of commits was answered {status}: {body[:_SHOWN]!r}")


class Operations:
    """The operations of a stream without their numbers: complete prepares, and ends that lack only the id."""

    def __init__(self, topic: str, *, confirm: bool) -> None:
        """Build them; `confirm`: an end is done once it is written, otherwise once it is accepted."""
        self.next_prepare: Callable[[], tuple[int, bytes]] = cycle(_prepares(topic, [GROUP])).__next__
        self._end_after = b'","outcome":"commit"}' if confirm else b'","outcome":"commit","confirm":false}'
        self.ended: Final = HTTPStatus.OK if confirm else HTTPStatus.ACCEPTED

    def end(self, transaction_id: bytes) -> bytes:
        """Return the commit of a transaction."""
        return b'{"id":"%b%b' % (transaction_id, self._end_after)
