"""Sizes, hashes, fingerprints and texts of records."""

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfway.protocol.records import Message, MessageDigest, as_text, digest, fingerprint

optional_bytes = st.none() | st.binary(max_size=4)
messages = st.builds(
    Message,
    topic=st.sampled_from(["a", "b"]),
    key=optional_bytes,
    value=optional_bytes,
    headers=st.lists(st.tuples(st.sampled_from(["x", "y"]), optional_bytes), max_size=2).map(tuple),
    partition=st.none() | st.integers(0, 2),
)
prepares = st.tuples(
    st.sampled_from(["g", "h"]), st.lists(messages, max_size=2).map(tuple), st.none() | st.integers(0, 2)
)
Prepare = tuple[str, tuple[Message, ...], int | None]


@given(prepares, prepares)
def test_a_fingerprint_is_equal_exactly_for_the_same_content(one: Prepare, other: Prepare) -> None:
    assert (fingerprint(*one) == fingerprint(*other)) == (one == other)


@pytest.mark.parametrize(
    "other",
    [
        Message(topic="a", key=None, value=b""),
        Message(topic="a", key=b"", value=None),
        Message(topic="a", headers=(("", None),)),
        Message(topic="a", partition=0),
    ],
)
def test_null_empty_and_absent_differ(other: Message) -> None:
    assert fingerprint("g", (Message(topic="a"),), None) != fingerprint("g", (other,), None)


def test_a_fingerprint_is_the_same_for_ever() -> None:
    """It is written to the log: a change of the hash would turn every repeat of an older prepare into a conflict."""
    message = Message(topic="orders", key=b"k", value=b"v", headers=(("h", b"1"),), partition=2)
    assert fingerprint("shop", (message,), 500).hex() == "18632f50a924cc45cd7d09f8cc038ab8"


def test_sizes() -> None:
    message = Message(topic="orders", key=b"key", value=b"value", headers=(("h", b"12"), ("n", None)))
    assert message.size == 3 + 5 + 1 + 2 + 1
    assert Message(topic="orders").size == 0
    assert Message(topic="orders", headers=(("\u00e9\U0001f600", None),)).size == 2 + 4, "names are counted in bytes"


@given(st.binary(max_size=20))
def test_a_digest_is_the_beginning_of_sha_256(data: bytes) -> None:
    assert digest(data) == sha256(data).digest()[:16]


def test_a_null_value_has_no_hash_and_an_empty_one_has() -> None:
    assert MessageDigest.of(Message(topic="a", value=None)).value_hash is None
    assert MessageDigest.of(Message(topic="a", value=b"")).value_hash is not None


@pytest.mark.parametrize("text", ["", "v", "ä€\u202e", "a\tb\r\nc", '{"a": "\\u0001"}', "\x7f\x9b"])
def test_utf_8_without_control_characters_is_text(text: str) -> None:
    assert as_text(text.encode()) == text


@pytest.mark.parametrize("data", [b"\xff", b"\xed\xa0\x80", b"a\x00", b"\x1b[31m", b"\x01" * 1000, b"a\x0bb"])
def test_anything_else_is_not(data: bytes) -> None:
    """For example escape sequences of a terminal: such data would be six times as large in JSON."""
    assert as_text(data) is None
