"""The models of requests and answers about statistics (docs/rest.md#statistics)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from halfway.http.requests.models import (
    GroupName,
)


class StatisticsParameters(msgspec.Struct, frozen=True, kw_only=True):
    """The group to show; all groups if it is left out."""

    group: GroupName | None = None


class EventParameters(msgspec.Struct, frozen=True, kw_only=True):
    """How many events to send; no limit if it is left out."""

    max: Annotated[int, Meta(ge=1, le=1_000_000, description="a whole number from 1 to 1000000")] | None = None
