"""Requests of Kafka's protocol on their way to a broker: where one ends, its kind, and its handling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final

_LENGTH: Final = 4
_KEY: Final = slice(_LENGTH, _LENGTH + 2)


class Api(IntEnum):
    """Kinds of request: their keys in the protocol."""

    FETCH = 1
    JOIN_GROUP = 11
    INIT_PRODUCER_ID = 22
    ADD_PARTITIONS_TO_TXN = 24
    END_TXN = 26


class Fate(StrEnum):
    """The handling of a request."""

    DELAY = "delay"
    """It arrives later, with everything behind it on its connection."""
    HANG = "hang"
    """It arrives when it is released, with everything behind it on its connection."""
    LOSE = "lose"
    """It never arrives: its connection breaks."""
    LOSE_ANSWER = "lose_answer"
    """It arrives, and its connection breaks instead of the answer."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """The handling of requests of one kind."""

    api: Api
    fate: Fate
    seconds: float = 0.0
    """The delay."""
    share: float = 1.0
    """The share of them that is affected."""
    times: int = 1_000_000
    """The most requests that are affected."""
    containing: bytes = b""
    """Only requests that contain these bytes."""

    def is_of(self, frame: bytes) -> bool:
        """Return whether a request, with its length, is of this kind."""
        return key_of(frame) == self.api and self.containing in frame

    def line(self) -> str:
        """Return it as the words of a line."""
        return f"{self.api.value} {self.fate} {self.seconds} {self.share} {self.times} {self.containing.hex() or '-'}"

    @classmethod
    def of_words(cls, api: str, fate: str, seconds: str, share: str, times: str, containing: str) -> Meeting:
        """Parse the result of `line`."""
        return cls(
            api=Api(int(api)),
            fate=Fate(fate),
            seconds=float(seconds),
            share=float(share),
            times=int(times),
            containing=b"" if containing == "-" else bytes.fromhex(containing),
        )


def key_of(frame: bytes) -> int:
    """Return the key of the kind of a request, with its length before it."""
    return int.from_bytes(frame[_KEY])


class Frames:
    """Splits a stream of bytes into whole requests, each with its length before it."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add received bytes, and return the requests that are complete now."""
        self._rest += data
        while len(self._rest) >= _LENGTH:
            end = _LENGTH + int.from_bytes(self._rest[:_LENGTH])
            if len(self._rest) < end:
                return
            frame = bytes(self._rest[:end])
            del self._rest[:end]
            yield frame
