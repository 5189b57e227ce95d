"""The calls between instances, byte by byte, and across releases."""

import json
from pathlib import Path

import msgspec
import pytest

from halfway.coordinator import records as peer_calls
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
    ShardFigures,
    Skipped,
    Totals,
    decode_answers,
    decode_call,
    decode_calls,
    decode_result,
    encode_answer,
    encode_call,
    encode_message,
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
from halfway.protocol.principal import ANYBODY, Principal, PrincipalKind
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
ALL: list[tuple[PeerCall, msgspec.Struct]] = [
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
ALL += [
    (ListCall(query=SEARCH, shards=(0, 3)), ListResult(transactions=(VIEW,), more=False)),
    (FiguresCall(group="shop"), FIGURES),
    (LeaseCall(group="shop", at_most=0, settled=("one:4",), taken=True), LeaseResult(checks=())),
]
SHOP = Principal(kind=PrincipalKind.GROUP, name="shop", key_id="k")
RECORDED = Path(__file__).with_name("peer_v2.json")


def test_every_call_and_its_answer_come_back_as_they_were() -> None:
    assert {type(call) for call, _ in ALL} == set(ANSWERS)
    numbered = list(enumerate(ALL, 7))
    frames = decode_calls(
        encode_message(encode_call(number, call, within_ms=9, principal=SHOP) for number, (call, _) in numbered)
    )
    assert [decode_call(frame.call) for frame in frames] == [call for call, _ in ALL]
    assert {(frame.within_ms, frame.caller) for frame in frames} == {(9, SHOP)}
    answers = decode_answers(encode_message(encode_answer(number, answer) for number, (_, answer) in numbered))
    for told in (frames, answers):
        assert [frame.number for frame in told] == [number for number, _ in numbered]
    assert [decode_result(call, frame) for (call, _), frame in zip(ALL, answers, strict=True)] == [
        answer for _, answer in ALL
    ]


def test_what_the_first_release_with_this_version_sends_is_understood() -> None:
    """These bytes are recorded: a change that cannot read them breaks a rolling upgrade."""
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert peer_calls.VERSION == 2
    for (call, answer), (asked, told) in zip(ALL, recorded, strict=True):
        [frame] = decode_calls(bytes.fromhex(asked))
        assert decode_call(frame.call) == call
        assert (frame.number, frame.caller) == (1, SHOP)
        [said] = decode_answers(bytes.fromhex(told))
        assert decode_result(call, said) == answer


def test_what_this_release_sends_has_every_field_that_the_first_one_needs() -> None:
    """Older readers need the names that they know, and ignore others."""
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    for (call, answer), (asked, told) in zip(ALL, recorded, strict=True):
        now = encode_message([encode_call(1, call, within_ms=9, principal=SHOP)])
        assert _contains(msgspec.msgpack.decode(now), msgspec.msgpack.decode(bytes.fromhex(asked)))
        now = encode_message([encode_answer(1, answer)])
        assert _contains(msgspec.msgpack.decode(now), msgspec.msgpack.decode(bytes.fromhex(told)))


def _contains(now: object, before: object) -> bool:
    if isinstance(before, dict):
        return isinstance(now, dict) and all(name in now and _contains(now[name], before[name]) for name in before)
    if isinstance(before, list):
        return isinstance(now, list) and all(map(_contains, now, before)) and len(now) == len(before)
    return now == before


def test_fields_of_a_newer_release_are_ignored() -> None:
    for call, answer in ALL:
        [asked] = msgspec.msgpack.decode(encode_message([encode_call(1, call, within_ms=9, principal=ANYBODY)]))
        asked["priority"] = 3
        asked["call"]["newer"] = {"deep": [1]}
        [frame] = decode_calls(msgspec.msgpack.encode([asked]))
        assert decode_call(frame.call) == call
        [told] = msgspec.msgpack.decode(encode_message([encode_answer(1, answer)]))
        told["took_ms"] = 4
        told["result"]["newer"] = "field"
        [said] = decode_answers(msgspec.msgpack.encode([told]))
        assert decode_result(call, said) == answer


@pytest.mark.parametrize("body", [b"", b"\xc1", b"not msgpack at all", msgspec.msgpack.encode([{"number": "x"}])])
def test_what_is_no_message_is_a_value_error(body: bytes) -> None:
    for decode in (decode_calls, decode_answers):
        with pytest.raises(ValueError, match="cannot be read"):
            decode(body)


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
    [frame] = decode_answers(encode_message([encode_answer(0, error)]))
    with pytest.raises(HalfwayError) as caught:
        decode_result(GetCall(id="one"), frame)
    again = caught.value
    assert (again.code, again.detail, again.fields) == (error.code, error.detail, error.fields)
    assert getattr(again, "retry_after_s", None) == getattr(error, "retry_after_s", None)
    assert not isinstance(again, errors.NotServedError), "it would be forwarded once more"


def test_an_error_that_this_release_does_not_know_can_be_tried_again() -> None:
    [frame] = decode_answers(msgspec.msgpack.encode([{"number": 0, "error": {"code": "quota", "detail": "d"}}]))
    with pytest.raises(ShardUnavailableError, match="quota"):
        decode_result(GetCall(id="one"), frame)


def test_an_answer_that_is_none_is_refused() -> None:
    [frame] = decode_answers(msgspec.msgpack.encode([{"number": 0}]))
    with pytest.raises(ValueError, match="neither"):
        decode_result(GetCall(id="one"), frame)
