"""The counters that are exported as 0 before their first event, so that `increase()` finds that event."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Final, get_args

from halfway.domain.errors import OverloadedError, PeerLostError, ShardUnavailableError
from halfway.kafka.clients.config import KINDS
from halfway.kafka.clients.transactional_producer import Step
from halfway.kafka.records.validation import SKIP_REASONS
from halfway.service.records.peer_calls import PeerCall

if TYPE_CHECKING:
    from halfway.kafka.clients.config import KafkaConfig
    from halfway.runtime.metrics.metrics import Metrics

_CURSOR_REASONS: Final = ("foreign_cursor", "beyond_end")
_FORWARDED: Final = ("done", PeerLostError.code, ShardUnavailableError.code, OverloadedError.code)
"""The results of a call whose answer did not arrive, and of one that succeeded."""


def export_zeros(metrics: Metrics, config: KafkaConfig, *, has_peers: bool) -> None:
    """Export 0 for lane failures, skipped records and, if there are peers, forwarded calls."""
    topics = [config.topic(kind) for kind in KINDS if kind != "audit"]  # `halfway audit-log` reads audit, not `serve`
    metrics.export_zeros(
        lane_failures=("fenced", *get_args(Step)),
        skipped=(*product(topics, SKIP_REASONS), *product([config.cursors_group], _CURSOR_REASONS)),
        forwarded=product([call.__struct_config__.tag for call in get_args(PeerCall)], _FORWARDED) if has_peers else (),
    )
