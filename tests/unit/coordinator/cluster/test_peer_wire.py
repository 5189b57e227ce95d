"""The calls between instances, byte by byte, and across releases."""

import json
from pathlib import Path

import msgspec
import pytest

from halfway.coordinator import records as peer_calls
from halfway.coordinator.cluster.peers import (
    AnswerReader,
    decode_call,
    decode_request,
    decode_result,
    encode_answer,
    encode_call,
    encode_request,
)
from halfway.coordinator.records import (
    ANSWERS,
    CheckCall,
    CountCall,
    DueCall,
    DueResult,
    EndCall,
    Endpoint,
    FailingTopic,
    FiguresCall,
    GetCall,
    GroupCounts,
    GroupFigures,
    InstanceFigures,
    LaneFailure,
    LeaseCall,
    LeaseResult,
    ListCall,
    ListResult,
    PeerCall,
    PrepareCall,
    Quarantined,
    RefusedWrite,
    ResumeCall,
    SearchCall,
    ShardFigures,
    Skipped,
    Totals,
)
from halfway.coordinator.requests import (
    End,
    EndResult,
    LeasedCheck,
    ListQuery,
    Moment,
    Prepare,
    Prepared,
    TransactionView,
)
from halfway.protocol import errors
from halfway.protocol.errors import (
    AlreadyEndedError,
    GroupInUseError,
    HalfwayError,
    OverloadedError,
    RetryableError,
    ShardUnavailableError,
)
from halfway.protocol.principal import ANYBODY, PEER, Principal, PrincipalKind
from halfway.protocol.records import Message
from halfway.protocol.transactions import Cause, Outcome, State

M = Moment
MESSAGE = Message(topic="orders", key=b"\x00k", value=None, headers=(("h", b"v"),), partition=2)
VIEW = TransactionView(
    id="one", state=State.PARKED, group="shop", prepared_at=M(5), topics=("orders",), checks=3, messages=(MESSAGE,)
)
CHECK = LeasedCheck(
    check_id="one:4", id="one", group="shop", prepared_at=M(5), attempt=4, messages=(MESSAGE,), lease_until=M(9)
)
CALLS: list[tuple[PeerCall, msgspec.Struct]] = [
    (
        PrepareCall(request=Prepare(group="shop", messages=(MESSAGE,), id="one", check_after_ms=7)),
        Prepared(id="one", state=State.PREPARED, group="shop", prepared_at=M(5), next_check_at=None, created=True),
    ),
    (
        EndCall(request=End(id="one", outcome=Outcome.COMMIT, remark="r", check_id="one:1", cause=Cause.OPERATOR)),
        EndResult(id="one", state=State.COMMITTED, changed=True),
    ),
    (GetCall(id="one"), VIEW),
    (CheckCall(id="one"), VIEW),
    (ResumeCall(id="one"), VIEW),
    (
        ListCall(query=ListQuery(state=State.PARKED, group="shop", key=b"k", limit=5, cursor="c"), shards=(0, 3)),
        ListResult(transactions=(VIEW,), more=True),
    ),
    (CountCall(group="shop", shards=(1,), hold_s=2.5), GroupCounts(pending=1, parked=2)),
    (DueCall(group="shop", wait_s=1.5), DueResult(due=True)),
    (LeaseCall(group="shop", at_most=3), LeaseResult(checks=(CHECK,))),
]
"""The calls that the first release knows."""
SEARCH = ListQuery(id="o", prepared_from=1, prepared_until=9, cause=Cause.CHECK, error="502")
ENDPOINT = Endpoint(host="http://a:1", well=False, status=502, detail="no", at=M(7), duration_s=0.5)
FIGURES = InstanceFigures(
    url="http://a",
    since=M(4),
    shards=(
        ShardFigures(
            shard=0, pending=1, parked=2, remembered=3, oldest_pending_s=4.5, half_lag=5, op_lag=6, due=7, strays=8
        ),
    ),
    counted=Totals(at=M(6), commits=3, lane_s=0.5),
    samples=(Totals(at=M(5), commits=2),),
    groups=(
        GroupFigures(
            group="shop",
            pending=1,
            parked=2,
            checks_in_flight=3,
            checks_due=4,
            breaker_until=M(5),
            endpoints=(ENDPOINT,),
        ),
    ),
    last_failure=LaneFailure(at=M(3), reason="fenced"),
    topics=(
        FailingTopic(topic="t", error_code="c", detail="d", refused=1, first_at=M(2), last_at=M(3), retry_at=None),
    ),
    writes=(RefusedWrite(id="one", topic="t", error_code="c", detail="d", last_at=M(3), retry_at=M(4)),),
    quarantined=(Quarantined(topic="t", id=None, state="watched", since=M(5), until=M(6), min_bytes=7),),
    skipped=(Skipped(topic="t", reason="r", count=1, last_at=M(2)),),
)
LATER: list[tuple[PeerCall, msgspec.Struct]] = [
    (SearchCall(query=SEARCH, shards=(0, 3)), ListResult(transactions=(VIEW,), more=False)),
    (FiguresCall(group="shop"), FIGURES),
    (LeaseCall(group="shop", at_most=0, settles=True, settled=("one:4",), taken=True), LeaseResult(checks=())),
]
ALL = CALLS + LATER
SHOP = Principal(kind=PrincipalKind.GROUP, name="shop", key_id="k")
FIRST_RELEASE = Path(__file__).with_name("peer_v1.json")


def test_every_call_and_its_answer_come_back_as_they_were() -> None:
    assert {type(call) for call, _ in ALL} == set(ANSWERS)
    frames = decode_request(encode_request([encode_call(call, within_ms=9, principal=SHOP) for call, _ in ALL]))
    assert [decode_call(frame.call) for frame in frames] == [call for call, _ in ALL]
    assert {(frame.within_ms, frame.caller) for frame in frames} == {(9, SHOP)}
    stream = b"".join(encode_answer(number, answer) for number, (_, answer) in enumerate(ALL))
    for size in (1, 7, len(stream)):
        reader = AnswerReader(10_000)
        answers = [frame for at in range(0, len(stream), size) for frame in reader.feed(stream[at : at + size])]
        assert [frame.index for frame in answers] == list(range(len(ALL)))
        assert [decode_result(call, frame) for (call, _), frame in zip(ALL, answers, strict=True)] == [
            answer for _, answer in ALL
        ]


def test_what_the_first_release_sends_is_understood() -> None:
    """These bytes are recorded: a change that cannot read them breaks a rolling upgrade."""
    recorded = json.loads(FIRST_RELEASE.read_text(encoding="utf-8"))
    assert peer_calls.VERSION == 1
    for (call, answer), (asked, told) in zip(CALLS, recorded, strict=True):
        [frame] = decode_request(bytes.fromhex(asked))
        assert decode_call(frame.call) == call
        assert frame.caller == PEER
        [said] = AnswerReader(10_000).feed(bytes.fromhex(told))
        assert decode_result(call, said) == answer


def test_what_this_release_sends_has_every_field_that_the_first_one_needs() -> None:
    """Older readers need the names that they know, and ignore others."""
    recorded = json.loads(FIRST_RELEASE.read_text(encoding="utf-8"))
    for (call, answer), (asked, told) in zip(CALLS, recorded, strict=True):
        before = msgspec.msgpack.decode(bytes.fromhex(asked))
        del before["calls"][0]["credential"]  # not needed: the caller is passed on, never its credential
        now = msgspec.msgpack.decode(encode_request([encode_call(call, within_ms=9, principal=SHOP)]))
        assert _contains(now, before)
        assert _contains(
            msgspec.msgpack.decode(encode_answer(0, answer)[4:]), msgspec.msgpack.decode(bytes.fromhex(told)[4:])
        )


def _contains(now: object, before: object) -> bool:
    if isinstance(before, dict):
        return isinstance(now, dict) and all(name in now and _contains(now[name], before[name]) for name in before)
    if isinstance(before, list):
        return isinstance(now, list) and all(map(_contains, now, before)) and len(now) == len(before)
    return now == before


def test_fields_of_a_newer_release_are_ignored() -> None:
    for call, answer in ALL:
        request = msgspec.msgpack.decode(encode_request([encode_call(call, within_ms=9, principal=ANYBODY)]))
        request["trace"] = "t"
        request["calls"][0]["priority"] = 3
        request["calls"][0]["call"]["newer"] = {"deep": [1]}
        [frame] = decode_request(msgspec.msgpack.encode(request))
        assert decode_call(frame.call) == call
        told = msgspec.msgpack.decode(encode_answer(0, answer)[4:])
        told["took_ms"] = 4
        told["result"]["newer"] = "field"
        body = msgspec.msgpack.encode(told)
        [said] = AnswerReader(10_000).feed(len(body).to_bytes(4, "big") + body)
        assert decode_result(call, said) == answer


def test_a_call_that_is_not_known_is_refused_as_what_can_be_tried_again() -> None:
    [frame] = decode_request(
        msgspec.msgpack.encode({"calls": [{"within_ms": 1, "call": {"type": "teleport", "id": "one"}}]})
    )
    with pytest.raises(ShardUnavailableError):
        decode_call(frame.call)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"not msgpack at all", msgspec.msgpack.encode({"calls": 3})])
def test_what_is_no_request_is_a_value_error(body: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decode_request(body)


@pytest.mark.parametrize(
    "error",
    [
        AlreadyEndedError("one", state="committed"),
        GroupInUseError("shop", pending=1, parked=2),
        OverloadedError("too much", limit=3),
        errors.NotServedError("moving", shard=2),
        errors.InvalidRequestError("wrong", field="messages[0].topic"),
        errors.MessageTooLargeError("large", errors=[{"field": "f", "detail": "d"}]),
    ],
)
def test_an_error_is_told_to_the_caller_as_its_owner_told_it(error: HalfwayError) -> None:
    if isinstance(error, RetryableError):
        error.retry_after_s = 4.0
    [frame] = AnswerReader(10_000).feed(encode_answer(0, error))
    with pytest.raises(HalfwayError) as caught:
        decode_result(GetCall(id="one"), frame)
    again = caught.value
    assert (again.code, again.detail, again.fields) == (error.code, error.detail, error.fields)
    assert getattr(again, "retry_after_s", None) == getattr(error, "retry_after_s", None)
    assert not isinstance(again, errors.NotServedError), "it would be forwarded once more"


def test_an_error_that_this_release_does_not_know_can_be_tried_again() -> None:
    body = msgspec.msgpack.encode({"index": 0, "error": {"code": "quota", "detail": "d"}})
    [frame] = AnswerReader(10_000).feed(len(body).to_bytes(4, "big") + body)
    with pytest.raises(ShardUnavailableError, match="quota"):
        decode_result(GetCall(id="one"), frame)


def test_an_answer_that_is_too_large_or_none_is_refused() -> None:
    with pytest.raises(ValueError, match="larger"):
        list(AnswerReader(100).feed((101).to_bytes(4, "big")))
    with pytest.raises(ValueError, match="cannot be read"):
        list(AnswerReader(100).feed(b"\0\0\0\1\xc1"))
    body = msgspec.msgpack.encode({"index": 0})
    [frame] = AnswerReader(100).feed(len(body).to_bytes(4, "big") + body)
    with pytest.raises(ValueError, match="neither"):
        decode_result(GetCall(id="one"), frame)
