"""The part of HTTP/1.1 that the load needs: requests built in advance, answers split by Content-Length.

A client library would use as much CPU as the coordinator on the same cores, and halve the measured throughput.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence
from itertools import count, cycle, islice
from typing import Final

import msgspec

from bench.plan import GROUP, KEYS, VALUE_BYTES

_END_OF_HEAD: Final = b"\r\n\r\n"
_LENGTH: Final = b"\r\ncontent-length:"
_ID: Final = b'{"id":"'
_ONE_COMMIT: Final = b'{"outcome":"commit"}'
_BATCHES: Final = 16


class WireError(Exception):
    """The load cannot read an answer."""


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


Contents = Sequence[int]
"""For each transaction in a request, the index of its message in `payloads()`."""


class Requests:
    """The requests of a load: complete ones, and ones that lack only the ids."""

    def __init__(self, *, host: str, topic: str, batch: int, groups: Sequence[str] = (GROUP,)) -> None:
        """Build prepares for `payloads()` and the groups in turn, or `_BATCHES` batches of them."""
        self._host = host
        contents = list(enumerate(payloads()))
        prepares = [
            (
                number,
                msgspec.json.encode({"group": group, "messages": [{"topic": topic, "key": key, "value": value}]}),
            )
            for (number, (key, value)), group in islice(
                zip(cycle(contents), cycle(groups), strict=False), max(len(contents), len(groups))
            )
        ]
        ready: list[tuple[Contents, bytes]] = [
            ((number,), post(self._host, b"/v1/transactions", body)) for number, body in prepares
        ]
        if batch:
            ready = []
            following = cycle(prepares)
            for _ in range(_BATCHES):
                several = list(islice(following, batch))
                body = b",".join(prepare for _, prepare in several)
                numbers = [number for number, _ in several]
                ready.append((numbers, post(self._host, b"/v1/batch", b'{"prepare":[%b]}' % body)))
        self.next_prepare: Callable[[], tuple[Contents, bytes]] = cycle(ready).__next__
        self._end_before, self._end_after = post(host, b"/v1/transactions/\0/end", _ONE_COMMIT).split(b"\0")

    def end(self, transaction_id: bytes) -> bytes:
        """Return the commit of one transaction."""
        return b"%b%b%b" % (self._end_before, transaction_id, self._end_after)

    def ends(self, transaction_ids: Sequence[bytes]) -> bytes:
        """Return a batch of commits."""
        ids = b'","outcome":"commit"},{"id":"'.join(transaction_ids)
        return post(self._host, b"/v1/batch", b'{"end":[{"id":"%b","outcome":"commit"}]}' % ids)


class Orders:
    """The requests of a crowd, whose callers choose their ids."""

    def __init__(self, *, host: str, topic: str, name: str) -> None:
        """Build one prepare for each of `payloads()`, without its id; ids begin with `name`."""
        self._name = name.encode()
        self._numbers = count()
        placeholder = "0" * len(self._id(0))
        prepares = []
        for number, (key, value) in enumerate(payloads()):
            body = {"id": placeholder, "group": GROUP, "messages": [{"topic": topic, "key": key, "value": value}]}
            before, after = post(host, b"/v1/transactions", msgspec.json.encode(body)).split(placeholder.encode())
            prepares.append((number, before, after))
        self._prepares = cycle(prepares)
        self._end_before, self._end_after = post(host, b"/v1/transactions/\0/end", _ONE_COMMIT).split(b"\0")

    def _id(self, number: int) -> bytes:
        return b"%b-%012d" % (self._name, number)

    def next_prepare(self) -> tuple[int, bytes, bytes]:
        """Return the index of its message in `payloads()`, its id, and the request."""
        number, before, after = next(self._prepares)
        transaction_id = self._id(next(self._numbers))
        return number, transaction_id, b"%b%b%b" % (before, transaction_id, after)

    def end(self, transaction_id: bytes) -> bytes:
        """Return the commit of one transaction."""
        return b"%b%b%b" % (self._end_before, transaction_id, self._end_after)


def post(host: str, path: bytes, body: bytes) -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        path,
        host.encode(),
        len(body),
        body,
    )
