"""The history of one transaction, from the log in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from halfway.domain.audit_trail import AuditEvent
from halfway.domain.errors import KafkaUnavailableError
from halfway.domain.records import Op
from halfway.memory.faults import Faults
from halfway.memory.log import MemoryLog
from halfway.memory.surroundings import MemoryAuditTrail
from halfway.service.ports import LoggedOp, OpsRead, PlacesRead


class MemoryHistory:
    """The port `service.ports.History`; it reads everything, without limits."""

    def __init__(self, log: MemoryLog, faults: Faults, audit_trail: MemoryAuditTrail) -> None:
        """Keep the log and the audit trail of this instance."""
        self._audit_trail = audit_trail
        self._log = log
        self._faults = faults

    async def ops(self, shard: int, transaction_id: str, *, starts: Sequence[int], deadline: float) -> OpsRead:
        """Read the op markers of an id."""
        await self._check_available(deadline)
        return OpsRead(
            ops=tuple(
                LoggedOp(offset=record.offset, timestamp=record.value.at, op=record.value)
                for record in self._log.shards[shard].op.since(0)
                if record.key == transaction_id
                and isinstance(record.value, Op)
                and record.value.at >= min(starts, default=0)
            ),
            complete=True,
        )

    async def places(self, transaction_id: str, topics: Sequence[str], *, at_ms: int, deadline: float) -> PlacesRead:
        """Find the messages of a commit."""
        await self._check_available(deadline)
        places = {}
        for name in dict.fromkeys(topics):
            topic = self._log.topics.get(name)
            for record in () if topic is None else topic.records:
                headers = dict(record.headers)
                if headers.get("halfway-transaction-id") == transaction_id.encode() and record.timestamp >= at_ms:
                    number = int((headers["halfway-message"] or b"").partition(b"/")[0])
                    places[number] = (record.partition, record.offset)
        lost = len(topics) - len(places)
        return PlacesRead(places=places, detail=f"{lost} messages were not found" if lost else None)

    async def acts(self, transaction_id: str, *, since_ms: int, deadline: float) -> Sequence[AuditEvent]:
        """Read the audit events of an id."""
        await self._check_available(deadline)
        return [event for event in self._audit_trail.events if event.subject == transaction_id and event.at >= since_ms]

    async def _check_available(self, deadline: float) -> None:
        await asyncio.sleep(0)
        if self._faults.unavailable or asyncio.get_running_loop().time() >= deadline:
            raise KafkaUnavailableError("Kafka did not answer in time")
