"""`halfway audit-log`: prints who changed what, from the topic of the audit trail."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import msgspec

from halfway.domain.errors import HalfwayError
from halfway.kafka.log.audit_trail import read_events
from halfway.runtime.terminal import complain, json_line, say, say_rows

if TYPE_CHECKING:
    from halfway.domain.audit_trail import AuditEvent
    from halfway.runtime.settings import Settings

COLUMNS: Final = ("at", "actor", "key", "action", "subject", "group", "result", "detail", "remark")


def show(settings: Settings, *, since_s: float, group: str | None, actor: str | None, as_json: bool) -> int:
    """Print the events of the last `since_s` seconds, of one group or actor if given; return the exit status."""
    since_ms = max(0, round((time.time() - since_s) * 1000))
    rows: list[tuple[object, ...]] = []
    try:
        for event in read_events(settings.kafka_config(""), since_ms=since_ms):
            if (group is not None and event.group != group) or (actor is not None and event.actor != actor):
                continue
            if as_json:
                say(json_line(msgspec.structs.asdict(event)))
            else:
                rows.append(_row(event))
    except HalfwayError as error:
        complain(error.detail)
        return 1
    if not as_json:
        say_rows(COLUMNS, rows)
    return 0


def _row(event: AuditEvent) -> tuple[object, ...]:
    at = datetime.fromtimestamp(event.at / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    actor = f"{event.actor_kind} {event.actor}".strip()
    return (at, actor, event.key_id, event.action, event.subject, event.group, event.result, event.detail, event.remark)
