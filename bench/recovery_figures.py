"""What was measured of starts, and of a takeover: how long each took, how much memory, and who was served meanwhile."""

from __future__ import annotations

import msgspec

from bench.instance import Meanwhile


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """One start. Seconds count from the start of the process."""

    cell: str
    pending: int
    ended: int
    reanchored: int
    ready_s: float
    get_s: float | None
    """Until a GET of the pending transaction that was prepared last was answered 200."""
    commit_s: float
    """Until a new transaction was prepared and committed."""
    acquire_s: float
    """Of them, what acquiring the shards took: fencing, and reading the log."""
    records: int
    """What it read."""
    records_per_s: float
    cpu_s: float
    """Until it was ready."""
    rss_mib: float
    """When it was ready."""
    peak_mib: float
    """At most, the time after it included."""
    bytes_each: float | None
    """Resident memory for each pending transaction when it was ready, over that of a start with nothing pending."""
    health: Meanwhile
    """`/health/live`, from the moment the port was open until it was ready."""
    health_after: Meanwhile
    prepare_after: Meanwhile
    """Prepares of one caller that commits each, in the time after."""
    incarnations: int
    """How many it took: more than one says that the session or a lane was lost."""


class Takeover(msgspec.Struct, frozen=True, kw_only=True):
    """A second instance joins, then the first is killed."""

    pending: int
    joined_s: float
    """From the start of the second until it had its share of the shards."""
    join_away_s: float
    """How long a shard was served by nobody meanwhile, on average."""
    taken_s: float
    """From the kill until the second served every shard; the session of the dead one is part of it."""
    session_s: float
    rss_mib: float
    peak_mib: float
    prepare: Meanwhile
    """Prepares at the second one from the kill on; those for a shard of the dead one are not asked."""


class AllDue(msgspec.Struct, frozen=True, kw_only=True):
    """A start with everything due at once, and an endpoint that answers unknown."""

    pending: int
    ready_s: float
    watched_s: float
    checks_per_s: float
    rss_mib: float
    peak_mib: float
    health_after: Meanwhile
    prepare_after: Meanwhile


class Found(msgspec.Struct, kw_only=True):
    """All that a run found."""

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
            one.incarnations == 1 and not (one.health.failed or one.health_after.failed or one.prepare_after.failed)
            for one in self.starts
        )
