"""The requests to the service and its answers: plain records, without HTTP or Kafka.

Answers are what callers get, and what OpenAPI describes. `Internal` fields are for this instance and others only: they
are UNSET in the answer to a caller.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, UnsetType
from pydantic import Field

from halfway.protocol.records import MAX_SECONDS, CheckMode, CheckPolicy, LimitOverrides, Message, PolicyOverrides
from halfway.protocol.transactions import Cause, Outcome, State

INTERNAL: Final = "x-internal"
T = TypeVar("T")
if TYPE_CHECKING:
    Internal = Annotated[T, INTERNAL]
else:
    Internal = Annotated[T, Meta(extra_json_schema={INTERNAL: True})] | UnsetType


class Moment(int):
    """A time in ms since the epoch in an answer: callers see RFC 3339, and other instances the number."""

    __slots__ = ()


def moment(ms: int | None) -> Moment | None:
    """Return a time as a `Moment`, None for None."""
    return None if ms is None else Moment(ms)


class TraceContext(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The caller's position in a trace (W3C Trace Context)."""

    traceparent: str
    tracestate: str = ""
    shared: bool = False
    """Whether it is that of a request with many transactions."""


class Prepare(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A prepare: all messages of one transaction. `id` is None if the server is to choose it."""

    group: str
    messages: tuple[Message, ...]
    id: str | None = None
    check_after_ms: int | None = None
    trace: TraceContext | None = None


class Prepared(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A transaction that is durably prepared."""

    id: str
    state: State
    group: str
    prepared_at: Moment
    next_check_at: Moment | None
    created: Internal[bool]
    """False if the prepare was a repeat."""


class End(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An end. `cause` is PRODUCER or OPERATOR; with the `check_id` of a leased check it becomes CHECK."""

    id: str
    outcome: Outcome
    remark: str | None = None
    check_id: str | None = None
    cause: Cause = Cause.PRODUCER
    trace: TraceContext | None = None


class EndResult(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The state now, and whether this call changed it."""

    id: str
    state: State
    changed: bool


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a PUT of a group, or of a PATCH."""

    name: str
    mode: CheckMode
    urls: tuple[str, ...]
    topics: tuple[str, ...]
    policy: PolicyOverrides = PolicyOverrides()
    limits: LimitOverrides | None = None
    """None if they stay as they are, in a PUT too: a service that replaces its group must not lift its limits."""
    reject_prepares: bool | None = None
    """None if this stays as it is."""
    adds: bool = False
    """A PATCH: add the topics, and replace only the given parts of the policy."""
    keeps_checks: bool = False
    """A PATCH without `check`: a registered group keeps its mode and URLs."""
    validate_only: bool = False
    """Change nothing, and say what would be."""


class GroupCheck(msgspec.Struct, frozen=True, kw_only=True):
    """How checks reach a group."""

    mode: Literal["push", "pull"]
    urls: tuple[str, ...]


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """A group, with its policy in force."""

    group: str
    check: GroupCheck
    topics: tuple[str, ...]
    policy: CheckPolicy
    policy_overrides: PolicyOverrides
    """What the group sets itself of its policy."""
    limits: LimitOverrides
    """The group's own limits; the settings have the others."""
    reject_prepares: bool
    """Whether its new transactions are refused."""
    created_at: Moment
    updated_at: Moment
    created: Internal[bool] = False
    """Whether this call registered it."""


class GroupPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page, by name."""

    groups: tuple[GroupView, ...]
    next: str | None
    """The last group's name if there are more."""


class TransactionView(msgspec.Struct, frozen=True, kw_only=True):
    """A transaction, without its payload."""

    id: str
    state: State
    group: str
    prepared_at: Moment
    topics: tuple[str, ...]
    """The topic of each message in order, in every state."""
    checks: int
    size: int | None = None
    """Bytes of all its messages; null once it has ended."""
    next_check_at: Moment | None = None
    last_check_at: Moment | None = None
    last_error: str | None = None
    waits: str | None = None
    """What the change under way waits for: `turn`, `owner`, `tail`, `payload` or `lane`; null if there is none."""
    commit_verdict: bool = False
    """A check answered commit, but the commit is not written yet. Policy never rolls such a transaction back."""
    parked_at: Moment | None = None
    reason: str | None = None
    """Why it was parked."""
    ended_at: Moment | None = None
    cause: Cause | None = None
    """What ended it."""
    remark: str | None = None
    messages: Internal[tuple[Message, ...] | None] = None
    """The payload of a prepared or parked transaction, if it was requested and the caller may read it."""
    changed: Internal[bool] = True
    """Whether the call that this answers changed the transaction."""


class ListQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The transactions to list; None matches everything. `cursor` comes from the previous page."""

    state: State | None = None
    group: str | None = None
    topic: str | None = None
    key: bytes | None = None
    limit: int = 100
    cursor: str | None = None
    id: str | None = None
    """The beginning of the id."""
    prepared_from: int | None = None
    """Milliseconds since the epoch."""
    prepared_until: int | None = None
    """Milliseconds since the epoch."""
    cause: Cause | None = None
    """The cause of the end."""
    error: str | None = None
    """A part of the last error of a prepared transaction, or of the reason of a parked one."""


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """A page, oldest prepare first."""

    transactions: tuple[TransactionView, ...]
    next: str | None
    count: int | None
    """How many match, from this page on; null while an instance of an older release runs."""


class LeasedCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A check. Answer it before `lease_until` with an end that contains its `check_id`."""

    check_id: str
    id: str
    group: str
    prepared_at: Moment
    attempt: int
    lease_until: Moment
    messages: tuple[Message, ...]


Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]


@dataclass(frozen=True, kw_only=True)
class SharedSettings:
    """The settings that the service and the Kafka adapter both use."""

    shards: Annotated[int, Field(ge=1, le=10_000)] = 8
    """The number of shards; stored at the first start, it never changes. Topics are created for at most 512."""
    outcome_horizon_s: Seconds = 900.0
    """How long outcomes are remembered; the same on all instances."""
    op_retention_ms: Annotated[int, Field(ge=1)] = 7 * 24 * 3_600_000
    """The retention of the op topic, in milliseconds."""
    payload_cache_bytes: Count = 256 * 1024 * 1024
    """Memory for payloads; others are read back from Kafka."""
    max_prepare_bytes: Count = 4 * 1024 * 1024
    """The largest payload of a prepare: keys, values and headers of its messages. A body may have twice as much."""

    @property
    def max_messages(self) -> int:
        """The most messages in one prepare: one for each 4 KiB of its payload, but at least 1,000."""
        return max(1000, self.max_prepare_bytes // 4096)

    @property
    def max_age_limit_s(self) -> float:
        """The largest `max_age_s` of a policy: six sevenths of the op retention, a day less than the default 7 days."""
        return self.op_retention_ms / 1000 * 6 / 7


@dataclass(frozen=True, kw_only=True)
class ServiceSettings(SharedSettings):
    """The settings that only the service uses."""

    max_outcomes_per_shard: Count = 1_000_000
    """Outcomes that a shard holds in memory; more shorten the horizon."""
    max_pending: Count = 2_000_000
    """Pending and parked transactions of one instance; above it prepares get 429."""
    min_check_interval_s: Seconds = 1.0
    """The lower bound of every group's `check_interval_s`; a lower value is raised to it."""
    check_concurrency: Count = 16
    """Checks in flight for one group."""
    lease_s: Seconds = 30.0
    """How long a fetched check is leased."""
    reject_prepares: bool = False
    """Whether new transactions of all groups are refused, also of those that are registered later."""


@dataclass(frozen=True, kw_only=True)
class ServiceLimits(ServiceSettings):
    """The limits of the service: the settings, and what nobody sets."""

    default_policy: CheckPolicy = field(default_factory=CheckPolicy)
    default_limits: LimitOverrides = field(default_factory=LimitOverrides)
    max_groups: int = 4000
    checks_per_place: int = 64
    max_waiting_polls: int = 100
    scan_batch: int = 2000
    breaker_failures: int = 5
    check_bytes: int = 64 * 1024 * 1024
    """Bytes of payload of the checks in flight for all groups. Each group may have one check in flight beyond it."""
    checks_in_flight: int = 768
    """For all groups, and one of each group beyond it: the caller has 1,024 connections."""

    @property
    def check_queue(self) -> int:
        """Due checks of one group that wait to be sent. The rest are left to a later scan."""
        return self.checks_per_place * self.check_concurrency

    @property
    def check_host_rate(self) -> int:
        """Checks per second to one host, from all groups. Each group can always send one check per second."""
        return self.check_queue

    @property
    def reanchor_after(self) -> int:
        """Records that a pending half may lie behind the end of its shard: a start reads about as many."""
        return max(1, self.max_outcomes_per_shard // 20)
