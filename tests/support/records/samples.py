"""One record of each kind, as the committed bytes in records.json hold it."""

from halfway.kafka.records.codec import Layout
from halfway.protocol.keys import Key
from halfway.protocol.principal import PrincipalKind
from halfway.protocol.records import (
    AuditEvent,
    Barrier,
    CheckMode,
    Group,
    Half,
    Message,
    MessageDigest,
    OnExhausted,
    Op,
    OpKind,
    Origin,
    Owner,
    Parked,
    PolicyOverrides,
)
from halfway.protocol.transactions import Cause

HALF = Half(
    id="3-0198b0a0-0000-7000-8000-000000000001",
    group="orders",
    messages=(
        Message(topic="coupon", key=b"order-1", value=b"\x00\xff", headers=(("trace", b"1"), ("empty", None))),
        Message(topic="cart", key=b"order-1", value=None, partition=2),
        Message(topic="points", key=None, value=b""),
    ),
    prepared_at=1_755_000_000_000,
    since=1_755_000_001_000,
    fingerprint=bytes(range(16)),
    check_after_ms=1_500,
    origin=Origin.LANE,
    checks=4,
    checked_at=1_755_000_002_000,
    commit_verdict=True,
    remark="bezahlt für €5",
)
OP = Op(
    kind=OpKind.ROLLED_BACK,
    id=HALF.id,
    group="orders",
    half_offset=1 << 40,
    cause=Cause.OPERATOR,
    prepared_at=HALF.prepared_at,
    at=1_755_000_003_000,
    fingerprint=HALF.fingerprint,
    checks=4,
    checked_at=1_755_000_002_000,
    commit_verdict=False,
    remark="gave up",
    messages=tuple(MessageDigest.of(message) for message in HALF.messages),
)
AUDIT_EVENT = AuditEvent(
    id="0123456789abcdef0123456789abcdef",
    at=1_755_000_005_000,
    action="end_by_hand",
    actor_kind="operator",
    actor="anna",
    key_id="3fK9",
    subject=HALF.id,
    group="orders",
    detail="commit",
    remark="bezahlt für €5",
    result="done",
    instance="http://halfway-0:8080",
)
RECORDS = {
    "half": HALF,
    "op": OP,
    "parked": Parked(half=HALF, reason="15 checks", parked_at=1_755_000_004_000, checks=15),
    "group": Group(
        name="orders",
        mode=CheckMode.PUSH,
        urls=("http://orders:9000/check",),
        topics=("coupon", "cart"),
        policy=PolicyOverrides(max_checks=3, first_check_after_s=0.5, on_exhausted=OnExhausted.ROLLBACK),
        created_at=1_755_000_000_000,
        updated_at=1_755_000_005_000,
    ),
    "key": Key(
        id="0123456789AB",
        kind=PrincipalKind.GROUP,
        name="orders",
        created_at=1_755_000_000_000,
        expires_at=1_755_000_009_000,
        digest=bytes(range(32)),
        certificate="DNS:orders.svc",
        seal=bytes(range(32, 64)),
    ),
    "audit": AUDIT_EVENT,
    "owner": Owner(
        shard=3,
        incarnation="a1b2",
        lane_ids=("_halfway.a1b2.0", "_halfway.a1b2.1", "_halfway.a1b2.q"),
        url="http://halfway-0:8080",
        acquired_at=1_755_000_000_000,
    ),
    "barrier": Barrier(incarnation="a1b2", at=1_755_000_000_000),
    "layout": Layout(shards=8, created_at=1_755_000_000_000),
}
