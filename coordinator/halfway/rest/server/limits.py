"""The limits of the interface for clients."""

from __future__ import annotations

from typing import Final

import msgspec

IDLE_S: Final = 75.0
"""How long a connection may be idle, or in the middle of its headers, unless a setting says otherwise."""


class ApiLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of the interface, in seconds, bytes and counts."""

    request_timeout_s: float = 15.0
    max_body_bytes: int = 8 * 1024 * 1024
    max_requests: int = 4096
    """Requests in flight; more are answered with 429."""
    prepare_wait_s: float = 1.0
    """How long a prepare may wait for a place under overload; after that it is answered with 429."""
    max_body_bytes_in_flight: int = 256 * 1024 * 1024
    max_batch_items: int = 1000
    max_streams: int = 1000
    max_stream_operations: int = 1024
    """Operations of one stream that are not answered yet."""
    stream_heartbeat_s: float | None = None
    """After this silence a client is pinged. Its answer may be delayed by the duration of one operation."""
