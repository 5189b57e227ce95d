"""The models of requests and answers about keys."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from halfway.domain.policy import MAX_SECONDS, Seconds
from halfway.rest.requests.models import NewGroupName, Timestamp

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


class KeyRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key to create, or a client certificate to bind: for a group, or for an operator or reader of that name."""

    kind: Kind
    name: NewGroupName
    expires_in_s: Seconds | None = None
    certificate: Certificate | None = None


class RotateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
