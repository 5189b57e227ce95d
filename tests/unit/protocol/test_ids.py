"""Transaction ids and the partitions that keys belong to."""

from uuid import UUID

import pytest
import uuid_utils
from hypothesis import given
from hypothesis import strategies as st

from halfway.protocol.transactions import CLIENT_ID, murmur2, parse_server_id, partition_for_key, server_id, shard_of

JAVA_VECTORS = [
    (b"21", -973932308),
    (b"foobar", -790332482),
    (b"a-little-bit-long-string", -985981536),
    (b"a-little-bit-longer-string", -1486304829),
    (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
    (b"abc", 479470107),
    (b"", 275646681),
    (b"a", -1563381124),
    (b"ab", 316155434),
    (b"abcd", -1323649548),
    (b"order-1", 1221710326),
    ("注文-42".encode(), -787707910),
    ("🚀".encode(), 761778625),
    (b"\x00", 375494588),
    (b"\xff\x80\x00\x7f\xfe", 768357719),
    (bytes(range(256)), -1948347274),
    (b"\x80\x80\x80", -1134684817),
]
"""From UtilsTest of Apache Kafka, and computed by `Utils.murmur2` of kafka-clients 4.3.1."""
MADE = "3-0199a000-0000-7000-8000-000000000001"


@pytest.mark.parametrize("data, expected", JAVA_VECTORS)
def test_murmur2_is_the_one_of_java_clients(data: bytes, expected: int) -> None:
    assert murmur2(data) == expected & 0xFFFFFFFF


@pytest.mark.parametrize("data, expected", JAVA_VECTORS)
def test_a_key_goes_where_a_java_client_puts_it(data: bytes, expected: int) -> None:
    """`Utils.toPositive(Utils.murmur2(key)) % numPartitions`."""
    for partitions in (1, 3, 8, 50):
        assert partition_for_key(data, partitions) == (expected & 0x7FFFFFFF) % partitions


@given(st.binary(max_size=40), st.integers(1, 1000))
def test_every_key_has_a_partition(key: bytes, partitions: int) -> None:
    assert 0 <= murmur2(key) < 2**32
    assert 0 <= partition_for_key(key, partitions) < partitions


@given(st.integers(0, 99_999), st.integers(0, 2**48 // 1000 - 1), st.integers(0, 2**74 - 1))
def test_a_server_made_id_tells_its_shard_and_its_time(shard: int, seconds: int, random: int) -> None:
    millis = seconds * 1000 + 7
    uuid7 = UUID(int=millis << 80 | 0x7 << 76 | (random >> 62) << 64 | 0b10 << 62 | random & (2**62 - 1))
    made = server_id(shard, uuid7)
    assert parse_server_id(made) == (shard, millis)
    assert shard_of(made, 100_000) == shard
    assert CLIENT_ID.match(made), "every id is legal in a path"


def test_a_uuid7_as_it_is_made() -> None:
    made = uuid_utils.uuid7(timestamp=1_760_000_000, nanos=123_000_000)
    assert parse_server_id(server_id(0, UUID(int=made.int))) == (0, 1_760_000_000_123)


@pytest.mark.parametrize(
    "other",
    [
        "",
        "order-1",
        MADE.upper(),
        MADE + "\n",
        MADE[:-1],
        MADE.replace("3-", "03-", 1),
        MADE.replace("3-", "-", 1),
        MADE.replace("3-", "123456-", 1),
        MADE.replace("-7000", "-4000"),
        MADE.replace("-8000", "-c000"),
    ],
)
def test_nothing_else_is_taken_for_a_server_made_id(other: str) -> None:
    assert parse_server_id(other) is None


def test_a_server_made_id_of_a_shard_that_is_not_there_has_no_shard() -> None:
    assert shard_of(MADE, 4) == 3
    assert shard_of(MADE, 3) is None


@given(st.from_regex(CLIENT_ID), st.integers(1, 64))
def test_a_client_brought_id_is_hashed_to_a_shard(brought: str, shards: int) -> None:
    expected = (
        partition_for_key(brought.encode(), shards) if parse_server_id(brought) is None else shard_of(brought, shards)
    )
    assert shard_of(brought, shards) == expected


@pytest.mark.parametrize("bad", ["", "a" * 129, "a b", "a/b", "ä", "a\n", "a\0"])
def test_an_illegal_id_is_seen(bad: str) -> None:
    assert CLIENT_ID.match(bad) is None
