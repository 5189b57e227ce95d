"""What counts of the bytes that arrive on a WebSocket: the payload of messages, wherever the data is cut."""

import random

import pytest

from halfway.http.stream.operations import ArrivingPayload

TEXT, PING, CONTINUATION = 0x81, 0x89, 0x00


def frame(first: int, payload: bytes, *, masked: bool) -> bytes:
    size, mask = len(payload), 0x80 if masked else 0
    if size < 126:
        head = bytes([first, mask | size])
    elif size < 65_536:
        head = bytes([first, mask | 126]) + size.to_bytes(2)
    else:
        head = bytes([first, mask | 127]) + size.to_bytes(8)
    return head + (b"\0\0\0\0" if masked else b"") + payload


@pytest.mark.parametrize("seed", range(20))
def test_only_the_payload_of_messages_counts_wherever_the_data_is_cut(seed: int) -> None:
    chosen = random.Random(seed)
    for _ in range(10):
        data, expected = b"", 0
        for _ in range(chosen.randrange(1, 8)):
            first = chosen.choice([TEXT, PING, CONTINUATION])
            sizes = [0, 1, 125] if first == PING else [0, 1, 125, 126, 65_535, 65_536]
            size = chosen.choice(sizes)
            data += frame(first, b" " * size, masked=chosen.random() < 0.5)
            expected += 0 if first == PING else size
        arriving, found, at = ArrivingPayload(), 0, 0
        while at < len(data):
            taken = chosen.choice([1, 2, 3, 7, 1000, 100_000])
            found += arriving.size_in(data[at : at + taken])
            at += taken
        assert found == expected
