"""The records in the internal topics, and the form that their messages and times have in JSON.

docs/protocol.md#topics has the topics, docs/api.md#prepare the JSON, docs/operating.md#the-action-log the events of
the audit trail; `schemas/` has the Avro schemas. Times are milliseconds since the epoch. Hashes are the first 16 bytes
of SHA-256.
"""

from __future__ import annotations

import re
from base64 import b64encode
from datetime import UTC, datetime
from enum import Enum, StrEnum
from functools import lru_cache
from hashlib import sha256
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta
from yarl import URL

from halfway.protocol.transactions import Cause

HASH_BYTES = 16
NO_BARRIER: Final = -1
"""The barrier of a half whose record names none: the lane wrote it, or a release that did not know the header."""
MAX_REMARK_BYTES: Final = 1024
MAX_TOPICS: Final = 1000
"""The limit of a group's topics."""
_ENCODER: Final = msgspec.msgpack.Encoder()


def digest(data: bytes | None) -> bytes | None:
    """Return the hash that is stored of a key or a value, None for None."""
    return None if data is None else sha256(data).digest()[:HASH_BYTES]


def key_digest(key: bytes | None) -> bytes | None:
    """Return the hash that is stored of a key. Short ones are cached: a key is hashed at the prepare and at the end."""
    return digest(key) if key is None or len(key) > _SHORT_KEY else _digest_of_short(key)


_SHORT_KEY: Final = 64
_digest_of_short: Final = lru_cache(maxsize=1024)(digest)


def headers_digest(headers: tuple[tuple[str, bytes | None], ...]) -> bytes:
    """Return the hash that is stored of headers (docs/protocol.md#topics)."""
    if not headers:
        return _NO_HEADERS
    text = ",".join([f"{name.encode().hex()}={'-' if value is None else value.hex()}" for name, value in headers])
    return sha256(text.encode()).digest()[:HASH_BYTES]


_NO_HEADERS: Final = sha256(b"").digest()[:HASH_BYTES]


class Message(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One message of a transaction, as it will be written to its real topic."""

    topic: str
    key: bytes | None = None
    value: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    partition: int | None = None

    @property
    def size(self) -> int:
        """The number of bytes of key, value, header names and header values, as Kafka stores them."""
        size = len(self.key or b"") + len(self.value or b"")
        if not self.headers:
            return size
        for name, value in self.headers:
            size += (len(name) if name.isascii() else len(name.encode())) + len(value or b"")
        return size

    def __repr__(self) -> str:
        """Leave the payload out, because a repr may end up in a log."""
        return f"Message(topic={self.topic!r}, partition={self.partition}, {self.size} bytes)"


def size_of(messages: tuple[Message, ...]) -> int:
    """Return the total number of bytes of messages. Most transactions have one message."""
    return messages[0].size if len(messages) == 1 else sum([message.size for message in messages])


class Origin(StrEnum):
    """The writer of a half: a first prepare, or the lane (resume, re-anchor, correction), whose record wins."""

    PREPARE = "prepare"
    LANE = "lane"


class Half(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A half message: one transaction's messages, invisible until it is committed."""

    id: str
    group: str
    messages: tuple[Message, ...]
    prepared_at: int
    since: int
    """The time from which checks and age are counted: the prepare, or the last resume."""
    fingerprint: bytes
    check_after_ms: int | None = None
    origin: Origin = Origin.PREPARE
    checks: int = 0
    checked_at: int | None = None
    commit_verdict: bool = False
    remark: str | None = None
    barrier: int = NO_BARRIER
    """The offset of its writer's barrier record in half[s], which a first prepare carries in a header. Of two prepares
    of an id with different content, the one with the later barrier counts."""

    @property
    def size(self) -> int:
        """The number of bytes of all messages."""
        return size_of(self.messages)


def fingerprint(group: str, messages: tuple[Message, ...], check_after_ms: int | None) -> bytes:
    """Return the 16-byte hash of a prepare's content: equal for the same content at any time."""
    content = _ENCODER.encode((group, check_after_ms, messages))
    return sha256(content).digest()[:HASH_BYTES]


class Foreign(Enum):
    """A placeholder for a record under a transaction's id that halfway did not write."""

    FOREIGN = "foreign"


FOREIGN: Final = Foreign.FOREIGN


class MessageDigest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The part of a message that an op marker keeps: enough for an audit after the half is compacted away."""

    topic: str
    key_hash: bytes | None
    value_hash: bytes | None
    size: int
    headers_hash: bytes | None = None
    """Of the producer's own headers; None in markers of earlier releases."""
    partition: int | None = None
    """The partition that the producer chose, None for none."""

    @classmethod
    def of(cls, message: Message) -> MessageDigest:
        return cls(
            topic=message.topic,
            key_hash=key_digest(message.key),
            value_hash=digest(message.value),
            size=message.size,
            headers_hash=headers_digest(message.headers),
            partition=message.partition,
        )


class OpKind(StrEnum):
    """The event that an op marker records."""

    COMMITTED = "COMMITTED"
    ROLLED_BACK = "ROLLED_BACK"
    CHECKED = "CHECKED"
    VERDICT = "VERDICT"
    PARKED = "PARKED"
    RESUMED = "RESUMED"

    def __init__(self, kind: str) -> None:
        """Set `final`: whether it is an outcome."""
        self.final = kind in {"COMMITTED", "ROLLED_BACK"}


class Op(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An op marker. `checks`, `checked_at` and `commit_verdict` are totals: the last op of an id is enough."""

    kind: OpKind
    id: str
    group: str
    half_offset: int
    cause: Cause
    prepared_at: int
    at: int
    fingerprint: bytes = b""
    """The fingerprint of the half, so that the same prepare is recognised after the end."""
    checks: int = 0
    checked_at: int | None = None
    commit_verdict: bool = False
    remark: str | None = None
    messages: tuple[MessageDigest, ...] = ()


class Parked(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A transaction that halfway no longer checks. It is kept until it is ended or resumed."""

    half: Half
    reason: str
    parked_at: int
    checks: int


class OnExhausted(StrEnum):
    """What happens to a transaction when its checks are exhausted."""

    PARK = "park"
    ROLLBACK = "rollback"


MAX_SECONDS: Final = 31_536_000
Seconds = Annotated[
    float, Meta(gt=0, le=MAX_SECONDS, description=f"a number of seconds above 0 and at most {MAX_SECONDS}")
]
Checks = Annotated[int, Meta(ge=1, le=10_000, description="a whole number from 1 to 10000")]


class PolicyOverrides(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The parts of the policy that a group sets itself. Times are in seconds."""

    first_check_after_s: Seconds | None = None
    check_interval_s: Seconds | None = None
    max_interval_s: Seconds | None = None
    max_checks: Checks | None = None
    max_age_s: Seconds | None = None
    on_exhausted: OnExhausted | None = None

    def with_overrides(self, overrides: PolicyOverrides) -> PolicyOverrides:
        """Return these overrides with other ones applied."""
        return msgspec.structs.replace(self, **overrides.chosen())

    def chosen(self) -> dict[str, object]:
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}


Count = Annotated[int, Meta(ge=1, le=1_000_000_000, description="a whole number from 1 to 1000000000")]
Rate = Annotated[float, Meta(gt=0, le=1_000_000, description="a number above 0 and at most 1000000")]


class LimitOverrides(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The limits that an operator gives a group, in place of those in the settings."""

    pending: Count | None = None
    """Pending and parked transactions over all instances."""
    prepares_per_s: Rate | None = None
    """Prepares per second at one instance."""
    bytes_in_flight: Count | None = None
    """Bytes of payload that one instance is storing."""


class CheckPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The policy in force for a group. Times are in seconds."""

    first_check_after_s: Seconds = 6.0
    check_interval_s: Seconds = 30.0
    max_interval_s: Seconds = 300.0
    max_checks: Checks = 15
    max_age_s: Seconds = 43_200.0
    on_exhausted: OnExhausted = OnExhausted.PARK

    def with_overrides(self, overrides: PolicyOverrides) -> CheckPolicy:
        """Return this policy with a group's overrides applied."""
        return msgspec.structs.replace(self, **overrides.chosen())

    def contradiction(self) -> tuple[str, str] | None:
        """Return the field that contradicts another one, and the remedy; None if the times fit together."""
        if self.max_interval_s < self.check_interval_s:
            return "max_interval_s", (
                f"max_interval_s {self.max_interval_s:g} is below check_interval_s {self.check_interval_s:g}: "
                "raise the first or lower the second"
            )
        if self.first_check_after_s >= self.max_age_s:
            return "first_check_after_s", (
                f"first_check_after_s {self.first_check_after_s:g} is not below max_age_s {self.max_age_s:g}: "
                "no check would ever be sent"
            )
        return None

    def with_min_interval(self, interval_s: float) -> CheckPolicy:
        """Return this policy with at least `interval_s` between two checks of a transaction, before jitter."""
        if self.check_interval_s >= interval_s and self.max_interval_s >= interval_s:
            return self
        return msgspec.structs.replace(
            self,
            check_interval_s=max(self.check_interval_s, interval_s),
            max_interval_s=max(self.max_interval_s, interval_s),
        )


class CheckMode(StrEnum):
    """How a group gets its checks: by HTTP request, or by long poll."""

    PUSH = "push"
    PULL = "pull"


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A producer group: its check endpoints, topics, policy and limits."""

    name: str
    mode: CheckMode
    urls: tuple[str, ...]
    topics: tuple[str, ...]
    policy: PolicyOverrides
    created_at: int
    updated_at: int
    limits: LimitOverrides = LimitOverrides()
    reject_prepares: bool = False
    """Whether an operator has its new transactions refused. This and the limits are in a header of the record."""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The owner of a shard (docs/protocol.md#ownership)."""

    shard: int
    incarnation: str
    lane_ids: tuple[str, ...]
    url: str
    acquired_at: int


class Barrier(msgspec.Struct, frozen=True, kw_only=True):
    """A record that a new owner writes to each partition of its shard. Everything before it is settled."""

    incarnation: str
    at: int


_CONTROLS: Final = bytes(code for code in range(0x20) if code not in b"\t\n\r")


def is_plain(data: bytes) -> bool:
    """Return whether data has no control characters other than tabs and line breaks."""
    return len(data.translate(None, _CONTROLS)) == len(data)


def as_text(data: bytes) -> str | None:
    """Return data as text, None if it is not UTF-8 or has control characters other than tabs and line breaks.

    In JSON, a control character takes six times its size.
    """
    if not is_plain(data):
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


class BinaryData(msgspec.Struct, frozen=True, gc=False):
    """Bytes that are not text."""

    data: str
    type: Literal["BINARY"] = "BINARY"


ShownData = str | BinaryData | None


class ShownHeader(msgspec.Struct, frozen=True, kw_only=True):
    """A header of a prepared message."""

    name: str
    value: ShownData


class ShownMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A prepared message. Text is shown as a plain string, anything else as BINARY."""

    topic: str
    key: ShownData
    value: ShownData
    headers: list[ShownHeader]
    partition: int | None

    def __repr__(self) -> str:
        """Leave the payload out, because a repr may end up in a log."""
        return f"ShownMessage(topic={self.topic!r})"


def shown_message(message: Message) -> ShownMessage:
    return ShownMessage(
        topic=message.topic,
        key=shown_data(message.key),
        value=shown_data(message.value),
        headers=[ShownHeader(name=name, value=shown_data(value)) for name, value in message.headers],
        partition=message.partition,
    )


def shown_data(data: bytes | None) -> ShownData:
    """Return the JSON form of a key or a value: a plain string if it is text."""
    if data is None:
        return None
    text = as_text(data)
    return BinaryData(data=b64encode(data).decode()) if text is None else text


@lru_cache(maxsize=1024)
def rfc3339(ms: int) -> str:
    """Return milliseconds since the epoch as `2026-01-31T12:00:00.000Z`. Cached: many come within a millisecond."""
    return f"{_to_the_second(ms // 1000)}.{ms % 1000:03d}Z"


_LAST_S: Final = 253_402_300_799
"""The last second whose year has four digits. An id can name a time 8,000 years later, and is refused with this one."""


@lru_cache(maxsize=256)
def _to_the_second(seconds: int) -> str:
    """Return a time without its milliseconds. Cached, since it is the same for all prepares of one second."""
    return f"{datetime.fromtimestamp(min(seconds, _LAST_S), UTC):%Y-%m-%dT%H:%M:%S}"


class Audited(StrEnum):
    """The actions on record: manual changes of transactions, and what is done to groups and keys."""

    REGISTER_GROUP = "register_group"
    CHANGE_GROUP = "change_group"
    DELETE_GROUP = "delete_group"
    END_BY_HAND = "end_by_hand"
    RESUME = "resume"
    CHECK_NOW = "check_now"
    CREATE_KEY = "create_key"
    ROTATE_KEY = "rotate_key"
    REVOKE_KEY = "revoke_key"
    READ_CHECK_SECRETS = "read_check_secrets"


class AuditEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One action that a caller took or attempted. It holds no key, no secret and no payload."""

    id: str
    """The id of this event. A reader that finds it twice counts it once."""
    at: int
    """Milliseconds since the epoch."""
    action: str
    actor_kind: str
    actor: str
    """The name of the group, operator or reader; empty for the other kinds."""
    key_id: str | None
    """The public id of the key or certificate that the caller presented."""
    subject: str
    """The object of the action: the id of a transaction, the name of a group, the public id of a key."""
    group: str | None
    """The group that the action concerns, if it is known."""
    detail: str | None
    """The change, in words."""
    remark: str | None
    """The caller's remark."""
    result: str
    """`done`, an error code, or `interrupted` if the caller did not wait for the result."""
    instance: str
    """The instance that received the call."""


_NOT_PRINTED: Final = re.compile(r"[\x00-\x20\x7f]")
_HOST: Final = re.compile(r"[A-Za-z0-9._-]+|\[[A-Za-z0-9:.%_-]+\]")


def url_refusal(text: str) -> str | None:
    """Return why a URL cannot be called, None if it can. The reason is shown to users and holds no secret."""
    if _NOT_PRINTED.search(text) is not None:
        return "a URL must not have spaces or control characters"
    try:
        url = URL(text)
        port = url.port
    except ValueError:
        return "the URL cannot be read"
    if url.scheme not in ("http", "https"):
        return f"the URL's scheme is {url.scheme!r}, not http or https"
    if url.user is not None or url.password is not None:
        return "the URL has a user name or password in it"
    if not url.host or not port:
        return "the URL has no host, or port 0"
    # A proxy may decode any other host, and call one that was not checked.
    return None if _HOST.fullmatch(url.host_subcomponent or "") else "the URL's host is neither a name nor an address"


def base_url_refusal(text: str) -> str | None:
    """Return why paths cannot be appended to a URL, None if they can."""
    refusal = url_refusal(text)
    if refusal is None and (URL(text).raw_query_string or URL(text).raw_fragment):
        return "the URL has a query or a fragment"
    return refusal


def proxy_refusal(text: str) -> str | None:
    """Return why a URL cannot be that of an HTTP proxy, None if it can. It may have a user name and a password."""
    try:
        anonymous = str(URL(text).with_user(None))
    except ValueError:
        return "it cannot be read"
    return base_url_refusal(anonymous)
