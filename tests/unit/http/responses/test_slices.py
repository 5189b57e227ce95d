"""Large payloads are encoded in slices, to the same JSON as small ones."""

import random

import msgspec
import pytest

from halfway.http import responses
from halfway.http.responses import ENCODER, is_large, with_messages
from halfway.protocol.records import Message, ShownMessage, shown_message

KINDS = [b"", b"plain", "é\U0001f600".encode(), b'"\\\n\t', b"\x00\x01", b"\xff\xfe", b"a\xc3"]


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    messages: list[ShownMessage]
    type: str


def payload(chosen: random.Random) -> bytes | None:
    kind = chosen.choice([None, *KINDS])
    return None if kind is None else kind * chosen.choice([1, 2, 5, 40])


def messages(chosen: random.Random) -> tuple[Message, ...]:
    return tuple(
        Message(
            topic=chosen.choice(["orders", "coupons"]),
            key=payload(chosen),
            value=payload(chosen),
            headers=tuple((f"h{number}", payload(chosen)) for number in range(chosen.randrange(4))),
            partition=chosen.choice([None, 3]),
        )
        for _ in range(chosen.randrange(1, 6))
    )


@pytest.mark.parametrize("seed", range(5))
async def test_slices_make_the_same_json(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of 6 bytes: they cut characters, escapes and groups of base64."""
    monkeypatch.setattr(responses, "SLICE_BYTES", 6)
    monkeypatch.setattr(responses, "_PART_BYTES", 1)
    chosen = random.Random(seed)

    async def give_way() -> None:
        return

    for _ in range(200):
        given = messages(chosen)
        whole = ENCODER.encode(Shown(id='"messages":[]', messages=[shown_message(one) for one in given], type="t"))
        pieces = await with_messages(Shown(id='"messages":[]', messages=[], type="t"), given, give_way)
        assert b"".join(pieces) == whole


async def test_the_loop_gets_a_turn_for_each_slice_of_a_large_payload() -> None:
    turns = 0

    async def give_way() -> None:
        nonlocal turns
        turns += 1

    given = (Message(topic="orders", value=b"x" * (4 * 1024 * 1024)),)
    assert is_large(given)
    pieces = await with_messages(Shown(id="a", messages=[], type="t"), given, give_way)
    assert turns >= 2 * len(given[0].value or b"") // responses.SLICE_BYTES
    assert max(map(len, pieces)) <= 2 * responses.SLICE_BYTES


def test_many_small_headers_are_large_together() -> None:
    headers = tuple((f"h{number}", b"v") for number in range(30))
    assert is_large([Message(topic="orders", value=b"v", headers=headers)] * 1000)
    assert not is_large([Message(topic="orders", value=b"v", headers=headers)])
    assert not is_large(None)
