"""The models of requests and answers: transactions, groups, histories, keys. OpenAPI is made from them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from halfway.http.requests.bodies import Data
from halfway.protocol.policy import MAX_SECONDS, CheckPolicy, PolicyOverrides, Seconds
from halfway.protocol.records import MAX_REMARK_BYTES, MAX_TOPICS, ShownMessage
from halfway.protocol.transactions import Cause, Outcome, State

# `$(?!\n)`: Python's `$` alone also matches before a final line feed.
_END = r"$(?!\n)"
MAX_URLS = 10


def _formatted(name: str) -> dict[str, Any]:
    return {"format": name}


TransactionId = Annotated[
    str, Meta(pattern=rf"^[A-Za-z0-9._~-]{{1,128}}{_END}", description="1 to 128 letters, digits and . _ ~ -")
]
GroupName = Annotated[
    str, Meta(pattern=rf"^[A-Za-z0-9._-]{{1,100}}{_END}", description="1 to 100 letters, digits and . _ -")
]
# A client that normalises paths cannot address `.` and `..`, so new ids exclude them. Existing ones can still be ended.
_NO_DOTS = r"^(?!\.{1,2}(?:$(?!\n)))"
NewTransactionId = Annotated[
    str,
    Meta(
        pattern=rf"{_NO_DOTS}[A-Za-z0-9._~-]{{1,128}}{_END}",
        description="1 to 128 letters, digits and . _ ~ -, but not . or ..",
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
        extra_json_schema=_formatted("topic"),
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
    str, Meta(max_length=MAX_REMARK_BYTES, description="at most 1024 bytes", extra_json_schema=_formatted("remark"))
]
CheckId = Annotated[str, Meta(min_length=1, max_length=256, description="the check_id of a fetched check")]
CheckUrl = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=2048,
        description="an http or https URL with a host and without user name and password",
        extra_json_schema=_formatted("check-url"),
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
Timestamp = Annotated[str, Meta(description="RFC 3339 in UTC with milliseconds", examples=["2026-01-02T03:04:05.678Z"])]


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A header of a message."""

    name: HeaderName
    value: Data = None


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A message to prepare. A null value is a tombstone."""

    topic: TopicName
    value: Data
    key: Data = None
    headers: list[Header] = []
    partition: (
        Annotated[int, Meta(ge=0, le=2_147_483_647, description="a partition number, from 0 to 2147483647")] | None
    ) = None

    def __repr__(self) -> str:
        """Show no payload, because the result may be logged."""
        return f"Message(topic={self.topic!r})"


class PrepareRequest(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, gc=False
):
    """A transaction to prepare, with all its messages."""

    group: GroupName
    messages: Annotated[list[Message], Meta(min_length=1, description="at least one message")]
    id: NewTransactionId | None = None
    check_after_s: Seconds | None = None
    """When the first check is due, instead of the group's `first_check_after_s`."""


class EndRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """The outcome of the local transaction."""

    outcome: Outcome
    remark: Remark | None = None
    check_id: CheckId | None = None


class BatchEnd(EndRequest, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """One end of a batch."""

    id: TransactionId


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Independent prepares and ends. They are done concurrently, in no particular order."""

    prepare: list[msgspec.Raw] = []
    end: list[msgspec.Raw] = []


class WholeBatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A batch with its items decoded, if all of them are valid."""

    prepare: list[PrepareRequest] = []
    end: list[BatchEnd] = []


class StreamPrepare(
    PrepareRequest, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, gc=False
):
    """A prepare with its number."""

    n: Number


class StreamEnd(BatchEnd, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """An end with its number."""

    n: Number
    confirm: bool | None = None
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

    prepare: list[StreamPrepare] = []
    end: list[StreamEnd] = []
    checks: list[StreamChecks] = []


class CheckBy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How checks reach a group: by HTTP at its `urls`, or the group fetches them (`"mode": "pull"`)."""

    urls: (
        Annotated[list[CheckUrl], Meta(max_length=MAX_URLS, description="1 to 10 URLs; none with mode pull")] | None
    ) = None
    mode: Literal["push", "pull"] | None = None


class GroupRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A producer group."""

    check: CheckBy
    topics: Annotated[list[TopicName], Meta(min_length=1, max_length=MAX_TOPICS, description="1 to 1000 topics")]
    policy: PolicyOverrides | None = None


class GroupAdditions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a service needs of its producer group. Topics are added; a part that is left out stays as it is."""

    topics: Annotated[list[TopicName], Meta(min_length=1, max_length=MAX_TOPICS, description="1 to 1000 topics")]
    check: CheckBy | None = None
    """If it is left out, a new group fetches its checks."""
    policy: PolicyOverrides | None = None


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


class PollParameters(msgspec.Struct, frozen=True, kw_only=True):
    """How long to wait for the first check, and how many to fetch at most."""

    wait_s: Annotated[float, Meta(ge=0, le=60, description="a number of seconds from 0 to 60")] = 0.0
    max: Annotated[int, Meta(ge=1, le=1000, description="a whole number from 1 to 1000")] = 10


class PreparedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A transaction that is durably prepared."""

    id: str
    state: State
    group: str
    prepared_at: Timestamp
    next_check_at: Timestamp | None


class EndResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The state now, and whether this call changed it."""

    id: str
    state: State
    changed: bool


class TransactionSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A transaction, without its payload."""

    id: str
    state: State
    group: str
    prepared_at: Timestamp
    topics: list[str]
    checks: int
    size: int | None
    """Bytes of all its messages; null once it has ended."""
    next_check_at: Timestamp | None
    last_check_at: Timestamp | None
    last_error: str | None
    commit_verdict: bool
    """A check answered commit, but the commit is not written yet. Policy never rolls such a transaction back."""
    parked_at: Timestamp | None
    reason: str | None
    """Why it was parked."""
    ended_at: Timestamp | None
    cause: Cause | None
    """What ended it."""
    remark: str | None


class TransactionResponse(TransactionSummary, frozen=True, kw_only=True):
    """A transaction with its payload. `messages` is null once it has ended."""

    messages: list[ShownMessage] | None


class TransactionList(msgspec.Struct, frozen=True, kw_only=True):
    """A page, oldest prepare first."""

    transactions: list[TransactionSummary]
    next: str | None


class GroupCheck(msgspec.Struct, frozen=True, kw_only=True):
    """How checks reach a group."""

    mode: Literal["push", "pull"]
    urls: list[str]


class GroupResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A group, with its policy in force."""

    group: str
    check: GroupCheck
    topics: list[str]
    policy: CheckPolicy
    created_at: Timestamp
    updated_at: Timestamp


class CheckSecretsResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The secrets that a group's checks are signed with, newest first; during a rotation the previous one is valid."""

    group: str
    secrets: list[str]
    """In the format of Standard Webhooks libraries; empty if the operator has set no master secret."""

    def __repr__(self) -> str:
        """Show no secret."""
        return f"CheckSecretsResponse(group={self.group!r}, secrets={len(self.secrets)})"


class GroupList(msgspec.Struct, frozen=True, kw_only=True):
    """A page, by name."""

    groups: list[GroupResponse]
    next: str | None


class FetchedCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A check. Answer it before `lease_until` with an end that contains its `check_id`."""

    check_id: str
    id: str
    group: str
    prepared_at: Timestamp
    attempt: int
    lease_until: Timestamp
    messages: list[ShownMessage]
    type: Literal["transaction.check"] = "transaction.check"


class CheckList(msgspec.Struct, frozen=True, kw_only=True):
    """Due checks; empty if none came due in time."""

    checks: list[FetchedCheck]


class HistoryEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event. A field that does not apply, or is not known, is null."""

    at: Timestamp
    event: str
    """`prepared`, `check`, `unknown`, `verdict_recorded`, `parked`, `resumed`, `reanchored`, `committed` or
    `rolled_back`.
    """
    attempt: int | None
    verdict: str | None
    """`commit`, `rollback`, `unknown`, or `none` if no verdict came."""
    sent: bool | None
    host: str | None
    status: int | None
    excerpt: str | None
    """The beginning of the answer; only callers that may read payloads see it."""
    duration_s: float | None
    detail: str | None
    cause: str | None
    by: str | None
    """The caller that did it manually, if its instance still knows it; the audit trail always has it."""
    remark: str | None


class MessagePlace(msgspec.Struct, frozen=True, kw_only=True):
    """A message, and its place in Kafka once it is committed."""

    message: int
    topic: str
    size: int | None
    partition: int | None
    offset: int | None


class HistoryResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The history of a transaction."""

    id: str
    group: str
    state: State
    prepared_at: Timestamp
    complete: bool
    """False if something is not known; `missing` says what."""
    missing: list[str]
    events: list[HistoryEvent]
    """Oldest first; at most the last 500."""
    messages: list[MessagePlace]
    messages_detail: str | None
    """Why some places are null."""


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
    created_at: Timestamp
    expires_at: Timestamp | None
    certificate: str | None


class NewKeyResponse(KeyResponse, frozen=True, kw_only=True):
    """A key that was just created."""

    key: str | None
    """The key itself, shown only in this answer: its holder must store it. Null for a certificate."""


class KeyList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of keys."""

    keys: list[KeyResponse]
    next: str | None
