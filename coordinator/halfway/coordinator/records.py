"""What instances tell each other: calls, statistics and histories, with the field names of the wire format.

Callers get the same records: a field that has a default here is in every answer to a caller.

Instances of two releases run side by side during an upgrade. A reader ignores unknown fields, and an added field has a
default, so the version need not change. `VERSION` is raised only if that is not enough, one release after the release
that first supports the higher version. Durations are in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

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
from halfway.protocol.errors import HalfwayError, RetryableError, ShardUnavailableError
from halfway.protocol.principal import PEER, Principal, PrincipalKind
from halfway.protocol.transactions import State


class Away(msgspec.Struct, frozen=True, kw_only=True):
    """A shard that these figures do not include, and why."""

    shard: int | None = None
    """None for an instance that did not answer."""
    instance: str | None
    """The instance that should serve it; null if none does."""
    detail: str


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """What the metrics of an instance have counted since its start. A rate is the difference of two of these."""

    at: Moment = msgspec.field(default_factory=Moment)
    prepares: int = 0
    commits: int = 0
    """Transactions whose commit was written."""
    rollbacks: int = 0
    checks_commit: int = 0
    """Checks with this verdict."""
    checks_rollback: int = 0
    checks_unknown: int = 0
    checks_none: int = 0
    """Checks without a verdict."""
    lane_commits: int = 0
    """Kafka transactions of the lane, 0 in the figures of one group, as the other figures of the lane."""
    lane_ends: int = 0
    lane_s: float = 0.0
    """The time that these Kafka transactions took."""
    lane_failures: int = 0


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The last answer of a check endpoint."""

    host: str
    well: bool
    """Whether the answer was a verdict."""
    status: int | None
    """None if there was no answer."""
    detail: str | None
    at: Moment
    duration_s: float


class GroupFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One group, over all instances."""

    group: str
    pending: int
    parked: int
    checks_in_flight: int
    checks_due: int
    breaker: str = "closed"
    """`open` while no endpoint can be reached, otherwise `closed`."""
    breaker_until: Moment | None
    endpoints: tuple[Endpoint, ...]


class LaneFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why an incarnation ended."""

    at: Moment
    reason: str


class ShardFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one shard; ages in seconds, lags in records."""

    shard: int
    pending: int
    parked: int
    remembered: int = 0
    oldest_pending_s: float = 0.0
    half_lag: int = 0
    op_lag: int = 0
    due: int = 0
    """The transactions that a scan will look at some time: all pending ones."""
    strays: int = 0
    committed: dict[str, int] = {}
    rolled_back: dict[str, int] = {}
    counted_since: Moment | None = None


class FailingTopic(msgspec.Struct, frozen=True, kw_only=True):
    """A topic to which a write failed, until a write to it succeeds."""

    topic: str
    error_code: str
    detail: str
    refused: int
    first_at: Moment
    last_at: Moment
    retry_at: Moment | None
    first_error_code: str = ""
    first_detail: str = ""
    """The reason of the first refusal. Later ones may only say that it was tried again in vain."""


class RefusedWrite(msgspec.Struct, frozen=True, kw_only=True):
    """A transaction whose end could not be written, until it is written; the transaction is still pending."""

    id: str
    topic: str | None
    error_code: str
    detail: str
    last_at: Moment
    retry_at: Moment


class Quarantined(msgspec.Struct, frozen=True, kw_only=True):
    """A transaction or a topic in quarantine: a Kafka transaction with it failed, so the lane writes it separately."""

    instance: str = ""
    """The instance of the lane. Set when the figures of all instances are gathered."""
    topic: str | None
    """The topic itself; for a transaction, the topic that caused the failure, if it is known."""
    id: str | None
    """The id of the transaction; null for a topic."""
    state: Annotated[str, Meta(extra_json_schema={"enum": ["alone", "refused", "suspected", "watched"]})]
    """`suspected`: tried separately; `alone`: tried without any other write; `refused`: refused until `until`;
    `watched`: messages of at least `min_bytes` are tried separately until `until`."""
    since: Moment
    until: Moment | None = None
    min_bytes: int | None = None
    error_code: str | None = None
    detail: str | None = None
    """The failure when it was tried separately; null if it has not been tried yet."""


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    """Unusable records of an internal topic."""

    topic: str
    reason: str
    count: int
    last_at: Moment


class HealthWarning(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is unsafe on an instance, although it may serve calls."""

    check: str
    detail: str


class InstanceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one instance, of all groups or of one."""

    url: str
    since: Moment
    shards: tuple[ShardFigures, ...] = ()
    asked: bool = False
    """Whether this instance answers the request."""
    resolving: int = 0
    counted: Totals = Totals()
    samples: tuple[Totals, ...] = ()
    groups: tuple[GroupFigures, ...] = ()
    last_failure: LaneFailure | None = None
    topics: tuple[FailingTopic, ...] = ()
    writes: tuple[RefusedWrite, ...] = ()
    quarantined: tuple[Quarantined, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    warnings: tuple[HealthWarning, ...] = ()


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """What there is now in all shards that are included."""

    pending: int
    parked: int
    remembered: int
    """Outcomes in memory."""
    oldest_pending_s: float
    resolving: int
    """Transactions that wait for a lane, or are in one."""
    committed: dict[str, int]
    """All that were ever committed, by cause, counted in Kafka: no restart loses or doubles one. Empty in the
    figures of one group."""
    rolled_back: dict[str, int]
    counted_since: Moment | None
    """When the first of them ended."""


class InstanceState(msgspec.Struct, frozen=True, kw_only=True):
    """One instance."""

    url: str
    asked: bool
    """Whether this instance answered the request."""
    since: Moment
    shards: tuple[int, ...]
    resolving: int
    counted: Totals
    last_failure: LaneFailure | None
    warnings: tuple[HealthWarning, ...]


class ShardState(msgspec.Struct, frozen=True, kw_only=True):
    """One shard. Its figures are null if they are not included."""

    shard: int
    instance: str | None
    pending: int | None = None
    parked: int | None = None
    remembered: int | None = None
    oldest_pending_s: float | None = None
    half_lag: int | None = None
    op_lag: int | None = None
    due: int | None = None
    strays: int | None = None
    committed: dict[str, int] | None = None
    rolled_back: dict[str, int] | None = None
    counted_since: Moment | None = None


class Failures(msgspec.Struct, frozen=True, kw_only=True):
    """Failures that need attention: at most the latest 100 of each kind and instance."""

    topics: tuple[FailingTopic, ...] = ()
    refused: tuple[RefusedWrite, ...] = ()
    quarantined: tuple[Quarantined, ...] = ()
    skipped: tuple[Skipped, ...] = ()


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of all instances that answered, and the shards that are unavailable."""

    at: Moment
    complete: bool
    """False if a shard is in `away`: the figures do not include it."""
    away: tuple[Away, ...]
    totals: Counts
    counted: Totals
    """The sum over the instances."""
    counted_by: str
    """Changes when other instances are added up: the difference of two totals is meaningless then."""
    samples: tuple[Totals, ...]
    """`counted` as it was every five seconds of the last 15 minutes, if it was asked for; none for one group."""
    groups: tuple[GroupFigures, ...]
    """At most 100; the groups with the most parked and pending transactions come first."""
    groups_left_out: int
    instances: tuple[InstanceState, ...] = ()
    shards: tuple[ShardState, ...] = ()
    failures: Failures = Failures()


class HistoryEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event. A field that does not apply, or is not known, is null."""

    at: Moment
    event: str
    """`prepared`, `check`, `unknown`, `verdict_recorded`, `parked`, `resumed`, `committed` or `rolled_back`."""
    attempt: int | None = None
    """The number of a check."""
    verdict: str | None = None
    """`commit` or `rollback` of the check that decided; null for any other: op does not hold its answer."""
    detail: str | None = None
    cause: str | None = None
    remark: str | None = None


VERSION: Final = 2
SUPPORTED_VERSIONS: Final = frozenset({2})

PATH: Final = "/peer"
VERSION_HEADER: Final = "Halfway-Peer-Version"
CREDENTIAL_HEADER: Final = "Halfway-Peer-Credential"
TO_HEADER: Final = "Halfway-Peer-To"
"""The incarnation that the calls are for; any other at this address refuses them."""
MAX_ANSWER_BYTES: Final = 48 * 1024 * 1024
REFUSAL_HEADER: Final = "Halfway-Peer-Refusal"
"""Why an instance refuses a connection."""


class PrepareCall(msgspec.Struct, frozen=True, kw_only=True, tag="prepare"):
    """Prepare a transaction: at the owner of its id, or at any owner if it has no id."""

    request: Prepare


class EndCall(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """End a transaction."""

    request: End


class GetCall(msgspec.Struct, frozen=True, kw_only=True, tag="get"):
    """Return one transaction, with its payload if that is wanted, not too large, and the caller may read it."""

    id: str
    payload: bool = True
    at_most: int | None = None
    """Bytes. An instance that does not know it leaves nothing out."""


class CheckCall(msgspec.Struct, frozen=True, kw_only=True, tag="check"):
    """Check a transaction now."""

    id: str


class ResumeCall(msgspec.Struct, frozen=True, kw_only=True, tag="resume"):
    """Resume a parked transaction."""

    id: str
    remark: str | None = None


class ListCall(msgspec.Struct, frozen=True, kw_only=True, tag="list"):
    """List the transactions of these shards; an owner that does not serve all of them refuses."""

    query: ListQuery
    shards: tuple[int, ...]


class CountCall(msgspec.Struct, frozen=True, kw_only=True, tag="count"):
    """Count a group's transactions in these shards, and refuse its prepares for `hold_s` (below 0: accept them)."""

    group: str
    shards: tuple[int, ...]
    hold_s: float = 0.0


class DueCall(msgspec.Struct, frozen=True, kw_only=True, tag="due"):
    """Wait until a group has checks to fetch, or until the time has passed; return whether it has any."""

    group: str
    wait_s: float


class LeaseCall(msgspec.Struct, frozen=True, kw_only=True, tag="lease"):
    """Hand out up to `at_most` checks that are due now, and settle those of earlier calls."""

    group: str
    at_most: int
    settled: tuple[str, ...] = ()
    """The ids of checks that earlier calls have leased."""
    taken: bool = False
    """Whether the poll has taken these: count them. If not, it was lost: they are due again."""


class FiguresCall(msgspec.Struct, frozen=True, kw_only=True, tag="figures"):
    """Return figures: of everything, or of one group only; with the samples of everything if they are wanted."""

    group: str | None
    samples: bool = False


PeerCall = (
    PrepareCall | EndCall | GetCall | CheckCall | ResumeCall | ListCall | CountCall | DueCall | LeaseCall | FiguresCall
)
"""Each instance answers FiguresCall for itself, and the others from the shards that it serves."""


class MessagePlace(msgspec.Struct, frozen=True, kw_only=True):
    """A message, and its place in Kafka once it is committed."""

    message: int
    """The number of the message, from 1."""
    topic: str
    size: int | None = None
    partition: int | None = None
    offset: int | None = None


class HistoryView(msgspec.Struct, frozen=True, kw_only=True):
    """The history of a transaction."""

    id: str
    group: str
    state: State
    prepared_at: Moment
    complete: bool
    """False if something is not known; `missing` says what."""
    missing: tuple[str, ...]
    events: tuple[HistoryEvent, ...]
    """Oldest first; at most the last 500."""
    messages: tuple[MessagePlace, ...]
    messages_detail: str | None
    """Why some places are null."""


class ListResult(msgspec.Struct, frozen=True, kw_only=True):
    """The first transactions of a list in its order, and whether there are more."""

    transactions: tuple[TransactionView, ...]
    more: bool
    count: int | None = None
    """How many match, from the cursor on. An older release does not say it."""


class GroupCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a group's transactions."""

    pending: int
    parked: int


class DueResult(msgspec.Struct, frozen=True, kw_only=True):
    """Whether checks are due."""

    due: bool


class LeaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """Checks that were handed out."""

    checks: tuple[LeasedCheck, ...]


ANSWERS: Final[dict[type, Any]] = {
    PrepareCall: Prepared,
    EndCall: EndResult,
    GetCall: TransactionView,
    CheckCall: TransactionView,
    ResumeCall: TransactionView,
    ListCall: ListResult,
    FiguresCall: InstanceFigures,
    CountCall: GroupCounts,
    DueCall: DueResult,
    LeaseCall: LeaseResult,
}
"""The type of the answer to each call."""


# --- calls and answers as frames in MessagePack; a message of a connection has one or many


class CallFrame(msgspec.Struct, frozen=True, kw_only=True):
    """One call, with its caller and how long the caller waits."""

    number: int
    """The number of the call on its connection, for the answer."""
    within_ms: int
    principal: Principal
    """The caller, as the first instance authenticated it."""
    call: msgspec.Raw

    @property
    def caller(self) -> Principal:
        """The caller; PEER if the other instance has no access control, so that it can be turned on step by step."""
        return PEER if self.principal.kind is PrincipalKind.ANYBODY else self.principal


class ErrorFrame(msgspec.Struct, frozen=True, kw_only=True):
    """An error as callers get it."""

    code: str
    detail: str
    fields: dict[str, Any] = {}
    retry_after_s: float | None = None


class AnswerFrame(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to the call with this number."""

    number: int
    result: msgspec.Raw = msgspec.Raw()
    """Empty if there is an error."""
    error: ErrorFrame | None = None


def _encoded(value: object) -> int | str:
    return int(value) if isinstance(value, Moment) else str(value)


def _decoded(kind: type, value: Any) -> Moment:
    if kind is Moment and isinstance(value, int):
        return Moment(value)
    raise NotImplementedError(kind)


_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=_encoded)
_CALL: Final[msgspec.msgpack.Decoder[PeerCall]] = msgspec.msgpack.Decoder(PeerCall)
_CALLS: Final = msgspec.msgpack.Decoder(list[CallFrame])
_ANSWERS: Final = msgspec.msgpack.Decoder(list[AnswerFrame])
_RESULTS: Final[dict[type, msgspec.msgpack.Decoder[Any]]] = {
    call: msgspec.msgpack.Decoder(result, dec_hook=_decoded) for call, result in ANSWERS.items()
}

F = TypeVar("F")


def encode_message(frames: Iterable[bytes]) -> bytes:
    """Return the message with these encoded frames: all of calls, or all of answers."""
    return _ENCODER.encode([msgspec.Raw(frame) for frame in frames])


def encode_call(number: int, call: PeerCall, *, within_ms: int, principal: Principal) -> bytes:
    raw = msgspec.Raw(_ENCODER.encode(call))
    return _ENCODER.encode(CallFrame(number=number, within_ms=within_ms, principal=principal, call=raw))


def encode_answer(number: int, result: msgspec.Struct | HalfwayError) -> bytes:
    if isinstance(result, HalfwayError):
        wait = result.retry_after_s if isinstance(result, RetryableError) else None
        error = ErrorFrame(code=result.code, detail=result.detail, fields=result.fields, retry_after_s=wait)
        return _ENCODER.encode({"number": number, "error": error})
    return _ENCODER.encode({"number": number, "result": result})


def decode_calls(message: bytes) -> list[CallFrame]:
    """Return the calls of a message; raise ValueError if it is none of calls."""
    return _decode(_CALLS, message)


def decode_answers(message: bytes) -> list[AnswerFrame]:
    """Return the answers of a message; raise ValueError if it is none of answers."""
    return _decode(_ANSWERS, message)


def _decode(decoder: msgspec.msgpack.Decoder[F], message: bytes | msgspec.Raw) -> F:
    try:
        return decoder.decode(message)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"it cannot be read: {error}") from None


def decode_call(raw: msgspec.Raw) -> PeerCall:
    """Return a call; raise ShardUnavailableError if this release does not know it: nothing was done."""
    try:
        return _decode(_CALL, raw)
    except ValueError as error:
        raise ShardUnavailableError(f"the owner runs a release that does not know this call: {error}") from None


def decode_result(call: PeerCall, frame: AnswerFrame) -> Any:
    """Return the result of a call from its answer.

    Raises:
        HalfwayError: the error that the other instance answered with.
        ValueError: this release cannot read the result.
    """
    if frame.error is not None:
        raise _decode_error(frame.error)
    if not bytes(frame.result):
        raise ValueError("the answer has neither a result nor an error")
    return _decode(_RESULTS[type(call)], frame.result)


def _errors_by_code() -> Mapping[str, type[HalfwayError]]:
    """Return the errors that callers may get, by their codes; if several share a code, the most general one."""
    by_code: dict[str, type[HalfwayError]] = {}
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, HalfwayError) and kind is not errors.NotServedError:
            by_code.setdefault(kind.code, kind)
    return by_code


_ERRORS: Final = _errors_by_code()


def _decode_error(frame: ErrorFrame) -> HalfwayError:
    """Return the error that the other instance raised; one that only a newer release knows becomes retryable."""
    kind = _ERRORS.get(frame.code)
    if kind is None:
        return ShardUnavailableError(
            f"the owner answered with the error {frame.code!r}, which this release does not know"
        )
    error = kind.__new__(kind)
    HalfwayError.__init__(error, frame.detail, **frame.fields)
    if isinstance(error, RetryableError) and frame.retry_after_s is not None:
        error.retry_after_s = frame.retry_after_s
    return error
