"""What the load sends, and how it reads answers."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.wire import Batches, Singles, WireError, id_in, items_in, payloads, split
from bench.plan import KEYS, VALUE_BYTES, LoadPlan
from halfway.protocol.transactions import shard_of

ANSWER = b'HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nContent-Length: 9\r\nDate: x\r\n\r\n{"id":"a"'


PLAN = LoadPlan(ports=(1,), topic="t", callers=1, phases=(), pids={}, journal_path="")


def plan(**fields: Any) -> LoadPlan:
    return msgspec.structs.replace(PLAN, **fields)


def body_of(request: bytes) -> dict[str, object]:
    """Give the body of a request, which is as long as its head says."""
    head, _, body = request.partition(b"\r\n\r\n")
    assert b"\r\nContent-Length: %d" % len(body) in head
    read: dict[str, object] = json.loads(body)
    return read


@given(st.integers(0, len(ANSWER) - 1))
def test_an_answer_that_has_not_arrived_in_full_is_waited_for(arrived: int) -> None:
    """TCP may cut anywhere."""
    assert split(ANSWER[:arrived]) is None


def test_an_answer_is_split_from_what_follows_it() -> None:
    assert split(ANSWER + b"HTTP/1.1 200") == (201, b'{"id":"a"', b"HTTP/1.1 200")


def test_the_length_is_found_however_it_is_spelt() -> None:
    assert split(b"HTTP/1.1 204 No Content\r\ncontent-length:0\r\n\r\n") == (204, b"", b"")


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"SSH-2.0\r\n\r\n"])
def test_an_answer_of_unknown_length_is_an_error(answer: bytes) -> None:
    with pytest.raises(WireError):
        split(answer)


def test_the_id_of_a_prepare_is_read() -> None:
    assert id_in(b'{"id":"3-01a","state":"prepared"}') == b"3-01a"


def test_an_answer_without_an_id_is_an_error() -> None:
    with pytest.raises(WireError):
        id_in(b'{"type":"about:blank"}')


def test_a_refused_item_of_a_batch_has_no_id() -> None:
    body = b'{"prepare":[{"status":201,"body":{"id":"a"}},{"status":429,"problem":{"title":"x"}}],"end":[]}'
    assert items_in(body) == ([(201, b"a"), (429, b"")], [])


def test_prepares_go_round_over_the_messages() -> None:
    """Keys spread over the partitions; what was asked is told by its place."""
    made, sent = Singles(plan()), payloads()
    for number in [*range(len(sent)), 0, 1]:
        work = made.next()
        message = body_of(work.request)["messages"][0]  # type: ignore[index]
        assert work.contents == (number,)
        assert (message["key"], message["value"]) == sent[number]
    assert len({key for key, _ in sent}) == KEYS
    assert {len(value) for _, value in sent} == {VALUE_BYTES}


def test_a_batch_has_as_many_prepares_as_asked_for_and_tells_each() -> None:
    made, sent = Batches(plan(batch=5)), payloads()
    for _ in range(2):
        work = made.next()
        prepares = body_of(work.request)["prepare"]
        assert [one["messages"][0]["key"] for one in prepares] == [sent[number][0] for number in work.contents]  # type: ignore[attr-defined]
        assert len(work.contents) == 5


def test_commits_name_their_ids() -> None:
    one = Singles(plan()).end([(0, b"3-0f")])
    assert one.startswith(b"POST /v1/transactions/3-0f/end HTTP/1.1\r\n")
    assert body_of(one) == {"outcome": "commit"}
    many = body_of(Batches(plan(batch=2)).end([(0, b"a"), (1, b"b")]))
    assert many == {"end": [{"id": "a", "outcome": "commit"}, {"id": "b", "outcome": "commit"}]}


def test_callers_that_call_the_owner_choose_ids_of_the_shards_of_the_plan() -> None:
    made = Singles(plan(owners=(1, 2, 1), shards=(0, 2)))
    found = [made.next() for _ in range(20)]
    assert {work.shard for work in found} == {0, 2}
    for work in found:
        assert body_of(work.request)["id"] == work.chosen.decode()
        assert shard_of(work.chosen.decode(), 3) == work.shard


@pytest.mark.parametrize("batch", [0, 10])
def test_prepares_are_of_all_groups_in_turn(batch: int) -> None:
    """Each group has as many as the others, also where there are more groups than messages."""
    groups = tuple(f"group-{number}" for number in range(KEYS + 64))
    made = Batches(plan(batch=batch, groups=groups)) if batch else Singles(plan(groups=groups))
    found: list[object] = []
    while len(found) < len(groups) and (batch == 0 or len(found) < 160):
        body = body_of(made.next().request)
        prepares = msgspec.convert(body["prepare"] if batch else [body], list[dict[str, object]])
        found += [one["group"] for one in prepares]
    assert tuple(found) == groups[: len(found)]
