"""The measured figures of starts and of a takeover: times, memory, and the calls served in the meantime."""

from __future__ import annotations

import msgspec

from bench.system.instance import CallResults


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """One start. Seconds count from the start of the process."""

    cell: str
    pending: int
    ended: int
    reanchored: int
    ready_s: float
    get_s: float | None
    """Until a GET of the last prepared pending transaction was answered 200."""
    commit_s: float
    """Until a new transaction was prepared and committed."""
    acquire_s: float
    """The part for acquiring the shards: fencing, and reading the log."""
    records: int
    """The number of records that it read."""
    records_per_s: float
    cpu_s: float
    """CPU time until it was ready."""
    rss_mib: float
    """Memory when it was ready."""
    peak_mib: float
    """Peak memory, including the time afterwards."""
    bytes_each: float | None
    """Resident memory per pending transaction when it was ready, beyond that of a start without pending ones."""
    health: CallResults
    """`/health/live`, from the opening of the port until it was ready."""
    health_after: CallResults
    prepare_after: CallResults
    """Prepares of one caller, which commits each, in the time afterwards."""
    incarnations: int
    """The number of incarnations; more than one means that the session or a lane was lost."""


class Takeover(msgspec.Struct, frozen=True, kw_only=True):
    """A second instance joins, then the first is killed."""

    pending: int
    joined_s: float
    """From the start of the second instance until it had its share of the shards."""
    join_away_s: float
    """How long a shard was unserved in the meantime, on average."""
    taken_s: float
    """From the kill until the second instance served every shard, including the session time-out of the first."""
    session_s: float
    rss_mib: float
    peak_mib: float
    prepare: CallResults
    """Prepares at the second instance from the kill on, without those for a shard of the first."""


class AllDue(msgspec.Struct, frozen=True, kw_only=True):
    """A start with everything due at once, and an endpoint that answers unknown."""

    pending: int
    ready_s: float
    watched_s: float
    checks_per_s: float
    rss_mib: float
    peak_mib: float
    health_after: CallResults
    prepare_after: CallResults


class RecoveryResult(msgspec.Struct, kw_only=True):
    """All figures of a run."""

    shards: int
    value_bytes: int
    rate_per_s: float
    starts: list[Recovery] = []
    takeover: Takeover | None = None
    all_due: AllDue | None = None

    @property
    def clean(self) -> bool:
        """Whether nothing was lost: no session, no request, no answer of the health port."""
        return all(
            start.incarnations == 1
            and not (start.health.failed or start.health_after.failed or start.prepare_after.failed)
            for start in self.starts
        )
