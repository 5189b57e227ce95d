"""`python -m bench instances`: the same load on one, two and three coordinators, and what a forwarded call costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from bench.copies import Auditor, Sent, judge
from bench.fleet import FleetRig, owners, summed
from bench.plan import PARTITIONS
from bench.spread import Aim, SpreadPlan, SpreadResult
from tests.support.coordinator.process import CoordinatorProcess

COUNTS: Final = (1, 2, 3)
CALLERS: Final = 64
ASKED: Final[Sequence[tuple[Aim, str]]] = (("owner", "the owner"), ("turn", "in turn"))
SPARE_S: Final = 90.0
"""What a process may take beyond its plan: start, connections, and what is under way at its end."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """How long each part takes; seconds. The warm-up is once, the others are for each line."""

    warm_up_s: float = 40.0
    lead_s: float = 3.0
    run_s: float = 15.0
    counts: tuple[int, ...] = COUNTS
    callers: int = CALLERS


class InstancesLine(msgspec.Struct, frozen=True, kw_only=True):
    """What is told of one load; microseconds of CPU are for one transaction, of each instance in turn and of all."""

    instances: int
    asked: str
    tx_per_s: float
    p50_ms: float
    p99_ms: float
    each_cpu_us: list[float]
    coordinators_cpu_us: float
    broker_cpu_us: float | None
    load_cpu_us: float
    forwarded_share: float
    ends_per_kafka_transaction: float
    transactions: int
    missing: int
    doubled: int
    extra: int
    failed: int
    first_failure: str

    @property
    def clean(self) -> bool:
        """Whether every transaction was answered, and stands exactly as it was."""
        return not (self.missing or self.doubled or self.extra or self.failed)


class Forwarded(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of CPU for one call, a prepare or an end: all of them for shards of one instance.

    `asker`: of the instance that forwards it. `owner`: of the one that does it. `direct`: of the one that does it where
    the caller asks it itself. `costs`: what is more where it is forwarded.
    """

    asker_cpu_us: float
    owner_cpu_us: float
    direct_cpu_us: float
    costs_cpu_us: float


class Instances(msgspec.Struct, frozen=True, kw_only=True):
    """What the run showed."""

    partitions: int = PARTITIONS
    callers: int
    lines: list[InstancesLine]
    forwarded: Forwarded | None

    @property
    def clean(self) -> bool:
        """Whether all was answered, and stands."""
        return all(line.clean for line in self.lines)


def measure_instances(rig: FleetRig, spread: Spread, *, say: Callable[[str], None]) -> Instances:
    """Measure each count of instances, then what goes to one of two for the other's shards."""
    lines: list[InstancesLine] = []
    forwarded = None
    with rig.fleet(spread.counts[0]) as fleet:
        members = fleet.members
        if spread.warm_up_s:
            say("warm-up")
            _load(rig, members, spread, "owner", lead_s=0, window_s=spread.warm_up_s)
        for count in spread.counts:
            if count > len(members):
                fleet.start(count - len(members))
            for aim, asked in ASKED[: 2 if count > 1 else 1]:
                say(f"{count} instances, asked: {asked}")
                lines.append(_line(rig, members, spread, aim, asked))
            if count == 2:  # noqa: PLR2004 - one that asks and one that is asked
                say("2 instances, transactions of one of them")
                direct = _line(rig, members, spread, "owner", "the one owner", of=members[1], at=members[1])
                via = _line(rig, members, spread, "turn", "the other one", of=members[1], at=members[0])
                lines += [direct, via]
                forwarded = _cost(direct, via)
    return Instances(callers=spread.callers, lines=lines, forwarded=forwarded)


def _cost(direct: InstancesLine, via: InstancesLine) -> Forwarded:
    """A transaction is two calls; what either instance does by itself is hardly anything, and left in."""
    asker, owner = (used / 2 for used in via.each_cpu_us)
    alone = sum(direct.each_cpu_us) / 2
    return Forwarded(
        asker_cpu_us=round(asker, 1),
        owner_cpu_us=round(owner, 1),
        direct_cpu_us=round(alone, 1),
        costs_cpu_us=round(asker + owner - alone, 1),
    )


def _load(
    rig: FleetRig,
    members: Sequence[CoordinatorProcess],
    spread: Spread,
    aim: Aim,
    *,
    lead_s: float,
    window_s: float,
    of: CoordinatorProcess | None = None,
    at: CoordinatorProcess | None = None,
) -> tuple[SpreadResult, Sent]:
    """Run the load with transactions of all shards, or those `of` one instance, asking all of them or one."""
    own = owners(members)
    plan = SpreadPlan(
        ports=[member.port for member in members] if at is None else [at.port],
        owners=[member.port for member in own],
        shards=[shard for shard, member in enumerate(own) if of is None or member is of],
        aim=aim,
        topic=rig.topic,
        callers=spread.callers,
        lead_s=lead_s,
        window_s=window_s,
        pids=rig.pids_of(members),
        sent_path=str(rig.directory / "spread.sent"),
    )
    result = rig.run("bench.spread", plan, SpreadResult, within_s=lead_s + window_s + SPARE_S)
    sent_path = Path(plan.sent_path)
    sent = Sent.read(sent_path)
    sent_path.unlink()
    return result, sent


def _line(
    rig: FleetRig,
    members: Sequence[CoordinatorProcess],
    spread: Spread,
    aim: Aim,
    asked: str,
    *,
    of: CoordinatorProcess | None = None,
    at: CoordinatorProcess | None = None,
) -> InstancesLine:
    auditor = Auditor(rig.bootstrap_servers, rig.topic)
    began, before = auditor.ends(), summed(members)
    result, sent = _load(rig, members, spread, aim, lead_s=spread.lead_s, window_s=spread.run_s, of=of, at=at)
    grown = summed(members)
    grown.subtract(before)
    verdict = judge(sent, auditor.copies(began))
    each = [round(result.cpu_us[str(number)] / max(1, result.transactions), 1) for number in range(len(members))]
    broker = result.cpu_us.get("broker")
    forwarded = sum(count for name, count in grown.items() if name.startswith("halfway_forwarded_total{"))
    return InstancesLine(
        instances=len(members),
        asked=asked,
        tx_per_s=round(result.transactions / result.seconds, 1),
        p50_ms=round(result.p50_ms, 2),
        p99_ms=round(result.p99_ms, 2),
        each_cpu_us=each,
        coordinators_cpu_us=round(sum(each), 1),
        broker_cpu_us=None if broker is None else round(broker / max(1, result.transactions), 1),
        load_cpu_us=round(result.cpu_us["load"] / max(1, result.transactions), 1),
        forwarded_share=round(forwarded / max(1, result.requests), 3),
        ends_per_kafka_transaction=round(
            grown["halfway_lane_batch_ends_sum"] / max(1, grown["halfway_lane_batch_ends_count"]), 1
        ),
        transactions=result.transactions,
        missing=verdict.missing,
        doubled=verdict.doubled,
        extra=verdict.extra,
        failed=result.failed,
        first_failure=result.first_failure,
    )
