"""`python -m bench instances`: the same load on one, two and three coordinators, and the cost of forwarding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from bench.audit.copies import Auditor, Sent, judge
from bench.load.fleet_load import Aim, SpreadPlan, SpreadResult
from bench.plan import PARTITIONS
from bench.system.fleet import FleetRig, owners, summed
from tests.support.coordinator.process import CoordinatorProcess

COUNTS: Final = (1, 2, 3)
CALLERS: Final = 64
ASKED: Final[Sequence[tuple[Aim, str]]] = (("owner", "the owner"), ("turn", "in turn"))
SPARE_S: Final = 90.0
"""Time that a process may need besides its plan: start, connections, and the transactions under way at its end."""


class InstancesOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The lengths of the parts in seconds: the warm-up once, the others for each line."""

    warm_up_s: float = 40.0
    lead_s: float = 3.0
    run_s: float = 15.0
    counts: tuple[int, ...] = COUNTS
    callers: int = CALLERS


class InstancesLine(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one load; CPU is in microseconds per transaction, of each instance and of all."""

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
        """Whether every transaction was answered, and the topic contains exactly what was acknowledged."""
        return not (self.missing or self.doubled or self.extra or self.failed)


class Forwarded(msgspec.Struct, frozen=True, kw_only=True):
    """CPU in microseconds for one call, a prepare or an end, all for shards of one instance.

    `asker`: of the instance that forwards the call. `owner`: of the owner. `direct`: of the owner if the caller calls
    it directly. `costs`: the additional CPU of forwarding.
    """

    asker_cpu_us: float
    owner_cpu_us: float
    direct_cpu_us: float
    costs_cpu_us: float


class Instances(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the run."""

    partitions: int = PARTITIONS
    callers: int
    lines: list[InstancesLine]
    forwarded: Forwarded | None

    @property
    def clean(self) -> bool:
        """Whether all lines are clean."""
        return all(line.clean for line in self.lines)


def measure_instances(rig: FleetRig, options: InstancesOptions, *, say: Callable[[str], None]) -> Instances:
    """Measure each number of instances, then calls to one of two for the other's shards."""
    lines: list[InstancesLine] = []
    forwarded = None
    with rig.fleet(options.counts[0]) as fleet:
        members = fleet.members
        if options.warm_up_s:
            say("warm-up")
            _load(rig, members, options, "owner", lead_s=0, window_s=options.warm_up_s)
        for count in options.counts:
            if count > len(members):
                fleet.start(count - len(members))
            for aim, asked in ASKED[: 2 if count > 1 else 1]:
                say(f"{count} instances, called: {asked}")
                lines.append(_line(rig, members, options, aim, asked))
            if count == 2:  # noqa: PLR2004 - one that forwards, and the owner
                say("2 instances, transactions of one of them")
                direct = _line(rig, members, options, "owner", "the one owner", of=members[1], at=members[1])
                via = _line(rig, members, options, "turn", "the other one", of=members[1], at=members[0])
                lines += [direct, via]
                forwarded = _cost(direct, via)
    return Instances(callers=options.callers, lines=lines, forwarded=forwarded)


def _cost(direct: InstancesLine, via: InstancesLine) -> Forwarded:
    """Return the cost of forwarding. A transaction is two calls; the instances' small base load is not subtracted."""
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
    options: InstancesOptions,
    aim: Aim,
    *,
    lead_s: float,
    window_s: float,
    of: CoordinatorProcess | None = None,
    at: CoordinatorProcess | None = None,
) -> tuple[SpreadResult, Sent]:
    """Run the load for all shards, or those `of` one instance; call all instances, or the one `at`."""
    own = owners(members)
    plan = SpreadPlan(
        ports=[member.port for member in members] if at is None else [at.port],
        owners=[member.port for member in own],
        shards=[shard for shard, member in enumerate(own) if of is None or member is of],
        aim=aim,
        topic=rig.topic,
        callers=options.callers,
        lead_s=lead_s,
        window_s=window_s,
        pids=rig.pids_of(members),
        sent_path=str(rig.directory / "spread.sent"),
    )
    result = rig.run("bench.load.fleet_load", plan, SpreadResult, within_s=lead_s + window_s + SPARE_S)
    sent_path = Path(plan.sent_path)
    sent = Sent.read(sent_path)
    sent_path.unlink()
    return result, sent


def _line(
    rig: FleetRig,
    members: Sequence[CoordinatorProcess],
    options: InstancesOptions,
    aim: Aim,
    asked: str,
    *,
    of: CoordinatorProcess | None = None,
    at: CoordinatorProcess | None = None,
) -> InstancesLine:
    auditor = Auditor(rig.bootstrap_servers, rig.topic)
    start_offsets, before = auditor.ends(), summed(members)
    result, sent = _load(rig, members, options, aim, lead_s=options.lead_s, window_s=options.run_s, of=of, at=at)
    grown = summed(members)
    grown.subtract(before)
    verdict = judge(sent, auditor.copies(start_offsets))
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
