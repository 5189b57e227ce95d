"""Transaction ids and the partitions that keys belong to."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfway.protocol.ids import ID, LEGAL_ID, IdMaker, birth_of, canonical, murmur2, partition_for_key, shard_of

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
MADE = "0199a000-0000-7000-8000-000000000001"
OLD = f"3-{MADE}"


def uuid7(millis: int, random: int) -> UUID:
    return UUID(int=millis << 80 | 0x7 << 76 | (random >> 62) << 64 | 0b10 << 62 | random & (2**62 - 1))


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


@given(st.integers(0, 2**48 - 1), st.integers(0, 2**74 - 1))
def test_an_id_tells_when_it_was_born(millis: int, random: int) -> None:
    made = str(uuid7(millis, random))
    assert ID.match(made)
    assert birth_of(made) == millis
    assert birth_of(f"3-{made}") == millis, "an id of the old form tells it too"
    assert LEGAL_ID.match(made), "every id is legal in a path"


@given(st.integers(0, 2**48 - 1), st.integers(1, 100), st.data())
def test_a_new_id_is_a_uuid7_of_its_shard(millis: int, shards: int, data: st.DataObject) -> None:
    shard = data.draw(st.integers(0, shards - 1))
    own = IdMaker(shards).make(millis, shard)
    assert ID.match(own)
    assert birth_of(own) == millis
    assert partition_for_key(own.encode(), shards) == shard == shard_of(own, shards)


def test_the_ids_of_one_millisecond_differ() -> None:
    """Also when there are more of them than its counter counts, and a reader of one cannot tell the next."""
    maker = IdMaker(2)
    made = [maker.make(1_760_000_000_123, number % 2) for number in range(10_000)]
    assert len(set(made)) == len(made)
    assert len({own[-8:] for own in made}) > len(made) - 50, "24 random bits: 3 are equal on average"


def test_an_id_is_made_for_more_shards_than_it_has_last_digits() -> None:
    own = IdMaker(100_000).make(1_760_000_000_123, 54_321)
    assert (ID.match(own) is not None, partition_for_key(own.encode(), 100_000)) == (True, 54_321)


@pytest.mark.parametrize(
    "own, shards, shard",
    [
        ("0199a000-0000-7000-8000-000000000001", 8, 5),
        ("0199a000-0000-7fff-bfff-ffffffffffff", 8, 2),
        ("0199cb34-e27b-7a65-91a5-b2c9d67e4f01", 8, 5),
        ("0199cb34-e27b-7a65-91a5-b2c9d67e4f01", 50, 29),
    ],
)
def test_the_shard_of_an_id_is_the_hash_of_its_text(own: str, shards: int, shard: int) -> None:
    assert shard_of(own, shards) == shard


@pytest.mark.parametrize(
    "given, own", [(MADE.upper(), MADE), (MADE, MADE), ("Order-1", "Order-1"), (OLD.upper(), OLD.upper())]
)
def test_an_id_in_any_case_is_one_id(given: str, own: str) -> None:
    """A text of another form is another id in another case."""
    assert canonical(given) == own


@pytest.mark.parametrize(
    "other",
    [
        "",
        "order-1",
        MADE.upper(),
        MADE + "\n",
        MADE[:-1],
        MADE.replace("-", ""),
        f"{{{MADE}}}",
        MADE.replace("-7000", "-4000"),
        MADE.replace("-8000", "-c000"),
        MADE.replace("0", "\u0660"),
        OLD,
    ],
)
def test_nothing_else_is_an_id(other: str) -> None:
    assert ID.match(other) is None


@pytest.mark.parametrize(
    "other", ["", "order-1", OLD[:-1], OLD.replace("3-", "03-", 1), OLD.replace("3-", "123456-", 1)]
)
def test_another_old_id_does_not_tell_when_it_was_born(other: str) -> None:
    assert birth_of(other) is None


def test_an_id_of_the_old_form_is_in_the_shard_that_it_names() -> None:
    assert shard_of(OLD, 4) == 3
    assert shard_of(OLD, 3) is None


@given(st.from_regex(LEGAL_ID), st.integers(1, 64))
def test_any_other_old_id_is_hashed_to_a_shard(brought: str, shards: int) -> None:
    assert shard_of(brought, shards) == partition_for_key(brought.encode(), shards)


@pytest.mark.parametrize("bad", ["", "a" * 129, "a b", "a/b", "ä", "a\n", "a\0"])
def test_an_illegal_id_is_seen(bad: str) -> None:
    assert LEGAL_ID.match(bad) is None
