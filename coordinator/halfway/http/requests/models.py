"""The bodies and parameters of requests about transactions, groups and keys, and answers that only REST has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from halfway.coordinator.requests import LeasedCheck, Moment, TransactionView
from halfway.coordinator.shards.shard_table import ShardTable
from halfway.http.responses import GiveWay, with_messages
from halfway.protocol.records import (
    MAX_REMARK_BYTES,
    MAX_SECONDS,
    MAX_TOPICS,
    LimitOverrides,
    PolicyOverrides,
    Seconds,
    ShownMessage,
    shown_message,
)
from halfway.protocol.transactions import Cause, Outcome, State

# `$(?!\n)`: Python's `$` alone also matches before a final line feed.
_END = r"$(?!\n)"
MAX_URLS = 10


TransactionId = Annotated[
    str, Meta(pattern=rf"^[A-Za-z0-9._~-]{{1,128}}{_END}", description="1 to 128 letters, digits and . _ ~ -")
]
GroupName = Annotated[
    str, Meta(pattern=rf"^[A-Za-z0-9._-]{{1,100}}{_END}", description="1 to 100 letters, digits and . _ -")
]
# A client that normalises paths cannot address `.` and `..`, so new names exclude them.
_NO_DOTS = r"^(?!\.{1,2}(?:$(?!\n)))"
NewTransactionId = Annotated[
    str,
    Meta(
        pattern=rf"^[0-9A-Fa-f]{{8}}-[0-9A-Fa-f]{{4}}-7[0-9A-Fa-f]{{3}}-[89ABab][0-9A-Fa-f]{{3}}-[0-9A-Fa-f]{{12}}{_END}",
        description="a UUIDv7 of the coordinator's time, or leave it out",
    ),
]
NewGroupName = Annotated[
    str,
    Meta(
        pattern=rf"{_NO_DOTS}[A-Za-z0-9._-]{{1,100}}{_END}",
        description="1 to 100 letters, digits and . _ -, but not . or ..",
    ),
]
TopicName = Annotated[
    str,
    Meta(
        pattern=rf"^[a-zA-Z0-9._-]{{1,249}}{_END}",
        description="a legal topic: 1 to 249 letters, digits and . _ -, but not . or .., nor a topic of halfway's own",
        extra_json_schema={"format": "topic"},
    ),
]
HeaderName = Annotated[
    str,
    Meta(
        pattern=rf"^(?!halfway-)[^\x00-\x1f\x7f]{{1,255}}{_END}",
        description="1 to 255 characters without control characters, and not starting with halfway-",
    ),
]
Remark = Annotated[
    str, Meta(max_length=MAX_REMARK_BYTES, description="at most 1024 bytes", extra_json_schema={"format": "remark"})
]
CheckId = Annotated[str, Meta(min_length=1, max_length=256, description="the check_id of a fetched check")]
TraceParent = Annotated[str, Meta(min_length=1, max_length=256, description="a traceparent of W3C Trace Context")]
CheckUrl = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=2048,
        description="an http or https URL with a host and without user name and password",
        extra_json_schema={"format": "check-url"},
    ),
]
Number = Annotated[int, Meta(ge=0, le=2**53 - 1, description="a whole number from 0 to 9007199254740991")]
PageSize = Annotated[int, Meta(ge=1, le=1000, description="a whole number from 1 to 1000")]
IdStart = Annotated[str, Meta(pattern=rf"^[A-Za-z0-9._~-]{{1,128}}{_END}", description="the beginning of an id")]
MessageKey = Annotated[str, Meta(max_length=4096, description="a message's key as text, at most 4096 characters")]
Age = Annotated[float, Meta(ge=0, le=MAX_SECONDS, description=f"a number of seconds from 0 to {MAX_SECONDS}")]
ErrorPart = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=256,
        description="a part of last_error (prepared) or reason (parked), at most 256 characters",
    ),
]


class TypedData(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A key or a value with its type, as in Confluent's REST v3."""

    type: Literal["STRING", "JSON", "BINARY"]
    data: msgspec.Raw
    """STRING: a string. JSON: any JSON; its bytes are kept unchanged. BINARY: a string of base64."""


Data = str | TypedData | None


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A header of a message."""

    name: HeaderName
    value: Data | UnsetType = UNSET


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A message to prepare. A null value is a tombstone."""

    topic: TopicName
    value: Data
    key: Data | UnsetType = UNSET
    headers: list[Header] | UnsetType = UNSET
    partition: (
        Annotated[int, Meta(ge=0, le=2_147_483_647, description="a partition number, from 0 to 2147483647")]
        | UnsetType
        | None
    ) = UNSET

    def __repr__(self) -> str:
        """Show no payload, because the result may be logged."""
        return f"Message(topic={self.topic!r})"


class PrepareRequest(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, gc=False
):
    """A transaction to prepare, with all its messages."""

    group: GroupName
    messages: Annotated[list[Message], Meta(min_length=1, description="a list of at least one message")]
    id: NewTransactionId | UnsetType | None = UNSET
    check_after_s: Seconds | UnsetType | None = UNSET
    """When the first check is due, instead of the group's `first_check_after_s`."""


class EndRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """The outcome of the local transaction."""

    outcome: Outcome
    remark: Remark | UnsetType | None = UNSET
    check_id: CheckId | UnsetType | None = UNSET


class BatchEnd(EndRequest, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """One end of a batch."""

    id: TransactionId


class ActionRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A check or a resume of one transaction."""

    remark: Remark | UnsetType | None = UNSET
    """Why; in the audit trail, and kept as the remark of a transaction that is resumed."""


class BatchAction(ActionRequest, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One transaction of a batch that is checked or resumed."""

    id: TransactionId


class Shards(msgspec.Struct, frozen=True, kw_only=True):
    """Which shards are served where a request or stream arrives. A call for an id of another shard is forwarded."""

    count: int
    """The number of shards of all instances together."""
    here: list[int]

    @classmethod
    def of(cls, shards: ShardTable) -> Shards:
        return cls(count=shards.count, here=shards.accepting)


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Independent operations. They are done concurrently, in no particular order."""

    prepare: list[msgspec.Raw] = []
    end: list[msgspec.Raw] = []
    check: list[msgspec.Raw] = []
    resume: list[msgspec.Raw] = []


class WholeBatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A batch with its items decoded, if all of them are valid."""

    prepare: list[PrepareRequest] | UnsetType = UNSET
    end: list[BatchEnd] | UnsetType = UNSET
    check: list[BatchAction] | UnsetType = UNSET
    resume: list[BatchAction] | UnsetType = UNSET


class StreamPrepare(
    PrepareRequest, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, gc=False
):
    """A prepare with its number."""

    n: Number
    traceparent: TraceParent | UnsetType | None = UNSET


class StreamEnd(BatchEnd, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """An end with its number."""

    n: Number
    traceparent: TraceParent | UnsetType | None = UNSET
    confirm: bool | UnsetType | None = UNSET
    """If false, the answer does not wait until the end is written."""


class StreamChecks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A subscription to the checks of a group."""

    n: Number
    group: GroupName
    max: Annotated[int, Meta(ge=0, le=1000, description="a whole number from 0 to 1000")]


class StreamFrame(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Independent operations."""

    prepare: list[msgspec.Raw] = []
    end: list[msgspec.Raw] = []
    checks: list[msgspec.Raw] = []


class WholeStreamFrame(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A frame with its operations decoded, if all of them are valid."""

    prepare: list[StreamPrepare] | UnsetType = UNSET
    end: list[StreamEnd] | UnsetType = UNSET
    checks: list[StreamChecks] | UnsetType = UNSET


class CheckBy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How checks reach a group: by HTTP at its `urls`, or the group fetches them (`"mode": "pull"`)."""

    urls: (
        Annotated[list[CheckUrl], Meta(max_length=MAX_URLS, description="a list of 1 to 10 URLs; none with mode pull")]
        | None
    ) = None
    mode: Literal["push", "pull"] | None = None


Topics = Annotated[list[TopicName], Meta(min_length=1, max_length=MAX_TOPICS, description="a list of 1 to 1000 topics")]


class GroupRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A producer group."""

    check: CheckBy
    topics: Topics
    policy: PolicyOverrides | None = None
    limits: LimitOverrides | None = None
    """All limits of the group's own, from an operator. If it is left out, they stay as they are."""
    reject_prepares: bool | None = None
    """Whether new transactions are refused, from an operator. If it is left out, it stays as it is."""
    validate_only: bool = False
    """Whether nothing is changed: the answer is 200 with what would be, or the refusal."""


class GroupAdditions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a service needs of its producer group. Topics are added; a part that is left out stays as it is."""

    topics: Topics | None = None
    """A new group needs one."""
    check: CheckBy | None = None
    """If it is left out, a new group fetches its checks."""
    policy: PolicyOverrides | None = None
    limits: LimitOverrides | None = None
    """All limits of the group's own, from an operator."""
    reject_prepares: bool | None = None
    """Whether new transactions are refused, from an operator."""
    validate_only: bool = False
    """Whether nothing is changed: the answer is 200 with what would be, or the refusal."""


class ListParameters(msgspec.Struct, frozen=True, kw_only=True):
    """The transactions to list. A parameter that is left out does not restrict them."""

    state: State | None = None
    group: GroupName | None = None
    topic: TopicName | None = None
    key: MessageKey | None = None
    id: IdStart | None = None
    older_than_s: Age | None = None
    """Prepared at least this long ago."""
    younger_than_s: Age | None = None
    """Prepared at most this long ago."""
    cause: Cause | None = None
    error: ErrorPart | None = None
    limit: PageSize = 100
    cursor: Annotated[str, Meta(min_length=1, max_length=1024, description="`next` of the previous page")] | None = None


class GroupParameters(msgspec.Struct, frozen=True, kw_only=True):
    """The groups to list."""

    limit: PageSize = 1000
    cursor: Annotated[GroupName, Meta(description="`next` of the previous page")] | None = None


class StatisticsParameters(msgspec.Struct, frozen=True, kw_only=True):
    """The group to show, all groups if it is left out; and whether to show the samples of the last 15 minutes."""

    group: GroupName | None = None
    samples: bool = False


class PollParameters(msgspec.Struct, frozen=True, kw_only=True):
    """How long to wait for the first check, and how many to fetch at most."""

    wait_s: Annotated[float, Meta(ge=0, le=60, description="a number of seconds from 0 to 60")] = 0.0
    max: Annotated[int, Meta(ge=1, le=1000, description="a whole number from 1 to 1000")] = 10


class TransactionResponse(TransactionView, frozen=True, kw_only=True):
    """A transaction with its payload. `messages` is null once it has ended."""

    messages: list[ShownMessage] | None  # type: ignore[assignment]


class CheckSecretsResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The secrets that a group's checks are signed with, newest first; during a rotation the previous one is valid."""

    group: str
    secrets: list[str]
    """In the format of Standard Webhooks libraries; empty if the operator has set no master secret."""

    def __repr__(self) -> str:
        return f"CheckSecretsResponse(group={self.group!r}, secrets={len(self.secrets)})"


class FetchedCheck(LeasedCheck, frozen=True, kw_only=True):
    """A check. Answer it before `lease_until` with an end that contains its `check_id`."""

    messages: list[ShownMessage]  # type: ignore[assignment]
    type: Literal["transaction.check"] = "transaction.check"


class CheckQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """A check, as halfway sends it to a URL of the group."""

    type: Literal["transaction.check"]
    nonce: str
    id: str
    group: str
    prepared_at: Moment
    attempt: int
    messages: list[ShownMessage]


class CheckAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the local transaction, with the nonce of the question."""

    outcome: Outcome
    nonce: str
    remark: Remark | None = None


class CheckList(msgspec.Struct, frozen=True, kw_only=True):
    """Due checks; empty if none came due in time."""

    checks: list[FetchedCheck]


Kind = Literal["group", "operator", "reader"]
KeyId = Annotated[
    str, Meta(pattern=r"^[0-9A-Za-z]{12}$(?!\n)", description="the public id of a key: 12 letters and digits")
]
Certificate = Annotated[
    str,
    Meta(
        pattern=r"^(subject|DNS|URI|email):[^\x00-\x1f\x7f]{1,1000}$(?!\n)",
        description="subject: and what openssl x509 -subject -nameopt RFC2253 prints, or DNS:, URI:, email: and a name",
    ),
]


class KeyRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A key to create, or a client certificate to bind: for a group, or for an operator or reader of that name."""

    kind: Kind
    name: NewGroupName
    expires_in_s: Seconds | None = None
    certificate: Certificate | None = None


class RotateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How long the old key stays valid beside the new one, and how long the new one is valid (default: for ever)."""

    keep_s: Annotated[float, Meta(ge=0, le=MAX_SECONDS, description=f"a number of seconds from 0 to {MAX_SECONDS}")] = (
        86_400.0
    )
    expires_in_s: Seconds | None = None


class KeyParameters(msgspec.Struct, frozen=True, kw_only=True):
    """The keys to list."""

    name: NewGroupName | None = None
    limit: Annotated[int, Meta(ge=1, le=1000, description="a whole number from 1 to 1000")] = 1000
    cursor: Annotated[KeyId, Meta(description="`next` of the previous page")] | None = None


class KeyResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A key, without its secret."""

    id: str
    kind: Kind
    name: str
    created_at: Moment
    expires_at: Moment | None
    certificate: str | None
    valid: bool
    """False if it has expired, or was made under a master secret that is no longer set."""


class NewKeyResponse(KeyResponse, frozen=True, kw_only=True):
    """A key that was just created."""

    key: str | None
    """The key itself, shown only in this answer: its holder must store it. Null for a certificate."""


class KeyList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of keys."""

    keys: list[KeyResponse]
    next: str | None


# --- what callers see of the service's answers: without internal fields, and with messages as JSON


def summary(view: TransactionView) -> TransactionView:
    return msgspec.structs.replace(view, messages=UNSET, changed=UNSET)


def transaction(view: TransactionView) -> TransactionResponse:
    messages = None if view.messages is None else [shown_message(message) for message in view.messages]
    return TransactionResponse(**{**msgspec.structs.asdict(view), "messages": messages, "changed": UNSET})


def fetched(check: LeasedCheck) -> FetchedCheck:
    messages = [shown_message(message) for message in check.messages]
    return FetchedCheck(**{**msgspec.structs.asdict(check), "messages": messages})


async def fetched_in_pieces(checks: Sequence[LeasedCheck], give_way: GiveWay) -> list[bytes]:
    """Return the JSON of a list of checks with large payloads in pieces."""
    pieces = [b'{"checks":[']
    for number, check in enumerate(checks):
        if number:
            pieces.append(b",")
        without = fetched(msgspec.structs.replace(check, messages=()))
        pieces += await with_messages(without, check.messages, give_way)
    return [*pieces, b"]}"]
