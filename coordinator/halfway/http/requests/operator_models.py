"""The models of requests and answers about statistics (docs/rest.md#statistics)."""

from __future__ import annotations

import msgspec

from halfway.http.requests.models import GroupName


class StatisticsParameters(msgspec.Struct, frozen=True, kw_only=True):
    """The group to show; all groups if it is left out."""

    group: GroupName | None = None
