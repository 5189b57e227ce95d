"""The table of scenarios, and the runner that measures any of them in turn: `python -m bench`.

A caller prepares, commits, and begins again when its commit is confirmed. All rows of a run take turns, because the
speed of a machine changes within minutes; their figures are medians over the turns. Each coordinator starts with the
first turn that needs it, on one broker. After each turn the checker judges what the load was told.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from http import HTTPStatus
from pathlib import Path
from statistics import median
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from bench.audit import Audit
from bench.figures import Record, Row, Say
from bench.load.wire import Batches, items_in, payloads, split
from bench.plan import GROUP, SHARDS, LoadPlan, LoadResult, Phase, RawPlan, RawResult, Shape, Window
from bench.system import Broker, Rig, RigError
from halfway.embedded.broker import HOST

BEFORE: Final = ", before"
FLEET_SHARDS: Final = 6
_FAR: Final = {"first_check_after_s": 259_200.0, "max_age_s": 345_600.0}
"""No transaction is due during the measurement."""
_READ: Final = 65_536
_LANE: Final = ("halfway_lane_batch_ends_count", "halfway_lane_batch_ends_sum", "halfway_lane_failures_total")


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """What starts, what it is loaded with, and what it is compared with.

    With `aim` the callers choose the ids and so know the owners. They call the owner, or the instances in turn, or the
    other one: then all transactions are of the second instance, and the first is called.
    """

    name: str
    callers: int = 64
    shape: Shape = "single"
    groups: int = 1
    """Groups, whose transactions come in turn."""
    pending: bool = False
    """Whether `Options.pending` transactions are pending beside it."""
    instances: int = 1
    workers: int = 1
    streams: int = 1
    """The streams, or clients, that the callers share."""
    aim: Literal["owner", "turn", "direct", "other"] | None = None
    against: str = ""
    """The row whose CPU its own is divided by."""
    raw: bool = False
    """Whether the limit of librdkafka is measured beside it."""


SETS: Final[dict[str, tuple[Scenario, ...]]] = {
    "main": (
        Scenario(name="single-1", callers=1, raw=True),
        Scenario(name="single-64", raw=True),
        Scenario(name="batch-100", callers=8, shape="batch", raw=True),
        Scenario(name="stream-256", callers=256, shape="stream", raw=True),
    ),
    "more": (
        Scenario(name="single-16", callers=16, raw=True),
        Scenario(name="stream-64", shape="stream", raw=True),
        Scenario(name="stream-64-oneway", shape="oneway", raw=True),
        Scenario(name="stream-1024", callers=1024, shape="stream", raw=True),
    ),
    "client": (
        Scenario(name="rest-1", callers=1),
        Scenario(name="client-1", callers=1, shape="client", against="rest-1"),
        Scenario(name="rest-64"),
        Scenario(name="tasks-64-rest", shape="client-rest", against="rest-64"),
        Scenario(name="tasks-64", shape="client", against="tasks-64-rest"),
        Scenario(name="threads-64-rest", shape="threads-rest"),
        Scenario(name="threads-64", shape="threads", against="threads-64-rest"),
    ),
    "beside": (
        Scenario(name="alone-64"),
        Scenario(name="groups-64", groups=1_000, against="alone-64"),
        Scenario(name="pending-64", pending=True, against="alone-64"),
        Scenario(name="alone-batch", callers=8, shape="batch"),
        Scenario(name="groups-batch", callers=8, shape="batch", groups=1_000, against="alone-batch"),
        Scenario(name="pending-batch", callers=8, shape="batch", pending=True, against="alone-batch"),
    ),
    "instances": (
        Scenario(name="1 owner", aim="owner"),
        Scenario(name="2 owner", instances=2, aim="owner", against="1 owner"),
        Scenario(name="2 in turn", instances=2, aim="turn", against="2 owner"),
        Scenario(name="2 direct", instances=2, aim="direct"),
        Scenario(name="2 forwarded", instances=2, aim="other", against="2 direct"),
        Scenario(name="3 owner", instances=3, aim="owner", against="1 owner"),
        Scenario(name="3 in turn", instances=3, aim="turn", against="3 owner"),
    ),
    "workers": tuple(
        msgspec.structs.replace(
            one, name=f"{workers} {one.name}", workers=workers, against=f"1 {one.name}" if workers > 1 else ""
        )
        for one in (
            Scenario(name="single-64"),
            Scenario(name="batch-100", callers=8, shape="batch"),
            Scenario(name="stream-256", callers=256, shape="stream", streams=4),
            Scenario(name="client-256", callers=256, shape="client", streams=4),
        )
        for workers in (1, 2)
    ),
}
ALL: Final = {scenario.name: scenario for scenarios in SETS.values() for scenario in scenarios}


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of a run, and the lengths of its parts in seconds."""

    only: Annotated[tuple[str, ...], Meta(description="rows by name, from any set")] = ()
    warm_up: Annotated[float, Meta(description="seconds, once: the broker's JVM needs them")] = 40.0
    lead: Annotated[float, Meta(description="seconds before counting, each turn")] = 1.0
    seconds: Annotated[float, Meta(description="measured seconds of each row, over its turns")] = 12.0
    raw_seconds: Annotated[float, Meta(description="of librdkafka alone beside each row; 0 leaves it out")] = 4.5
    turns: Annotated[int, Meta(description="turns of each row")] = 3
    pending: Annotated[int, Meta(description="transactions that are pending beside the rows that say so")] = 1_000_000
    before: Annotated[str, Meta(description="an interpreter, whose environment has the version to compare with")] = ""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a row."""

    window: Window
    result: LoadResult
    audit: Audit
    raw_per_s: float
    kafka_transactions: float
    ends: float
    lanes_lost: float
    log_bytes: Mapping[str, float]
    forwarded: float
    instances: int

    @property
    def rate(self) -> float:
        return self.window.transactions / self.window.seconds

    def cpu_us(self, process: str) -> float | None:
        """Return the CPU time per transaction of a process, or of all brokers."""
        used = [us for name, us in self.window.cpu_us.items() if name.partition(" ")[0] == process]
        return sum(used) / max(1, self.window.transactions) if used else None

    @property
    def calls(self) -> int:
        """The requests, or the operations of streams: a prepare and an end for each transaction."""
        return max(1, self.result.requests or 2 * self.audit.transactions)

    @property
    def each_us(self) -> list[float]:
        """The CPU time of each coordinator per transaction."""
        return [self.cpu_us(str(number)) or 0.0 for number in range(self.instances)]


class Rigs(ExitStack):
    """The coordinators of a run by what they need, each started when it is needed first."""

    def __init__(self, kafka: Broker, options: Options, say: Say, name: str = "bench") -> None:
        """Keep the options; nothing starts yet."""
        super().__init__()
        self._kafka = kafka
        self._options = options
        self._say = say
        self._name = name
        self._rigs: dict[str, Rig] = {}

    def of(self, scenario: Scenario, *, before: bool = False) -> Rig:
        """Return the coordinators of a scenario."""
        fleet = f"-{scenario.instances}" if scenario.aim else ""
        groups = f"-{scenario.groups}" if scenario.groups > 1 else ""
        name = f"{self._name}{fleet}{groups}{'-pending' * scenario.pending}{'-before' * before}"
        name += f"-workers-{scenario.workers}" if scenario.workers > 1 else ""
        if name not in self._rigs:
            self._say(f"{name} starts")
            python = Path(self._options.before).absolute() if before else Path(sys.executable)
            shards = FLEET_SHARDS if scenario.aim else SHARDS
            rig = Rig(
                self._kafka,
                name,
                settings={"HALFWAY_WORKERS": str(scenario.workers)} if scenario.workers > 1 else {},
                instances=scenario.instances,
                shards=shards,
                python=python,
            )
            self._rigs[name] = self.enter_context(rig)
            for group in groups_of(scenario)[1:]:
                rig.first.register(rig.topic, group)
            if scenario.pending:
                rig.first.register(rig.topic, "waiting", policy=_FAR)
                fill(rig, "waiting", self._options.pending)
        return self._rigs[name]


def groups_of(scenario: Scenario) -> tuple[str, ...]:
    """Return the groups of a scenario's transactions."""
    return (GROUP, *(f"{GROUP}-{number}" for number in range(1, scenario.groups)))


def plan_of(rig: Rig, scenario: Scenario, *phases: Phase) -> LoadPlan:
    """Return the plan of a scenario's load."""
    ports = tuple(instance.port for instance in rig.instances)
    plan = LoadPlan(
        ports=ports,
        topic=rig.topic,
        callers=scenario.callers,
        shape=scenario.shape,
        streams=scenario.streams,
        groups=groups_of(scenario),
        phases=tuple(phase for phase in phases if phase.seconds),
        pids=rig.pids,
        journal_path=str(rig.directory / "load.journal"),
    )
    if scenario.aim is None:
        return plan
    owners = [instance.port for instance in rig.owners()]
    of_second = scenario.aim in {"direct", "other"}
    return msgspec.structs.replace(
        plan,
        ports=ports[:1] if scenario.aim == "other" else ports,
        owners=tuple(owners),
        shards=tuple(number for number, port in enumerate(owners) if not of_second or port == ports[1]),
        to_owner=scenario.aim in {"owner", "direct"},
    )


def fill(rig: Rig, group: str, number: int) -> None:
    """Prepare at least so many transactions of a group in batches, and leave them pending."""
    plan = msgspec.structs.replace(plan_of(rig, ALL["batch-100"]), groups=(group,))
    asyncio.run(_fill(plan, -(-number // plan.batch)))


async def _fill(plan: LoadPlan, batches: int) -> None:
    requests, left = Batches(plan), iter(range(batches))

    async def caller() -> None:
        reader, writer = await asyncio.open_connection(HOST, plan.ports[0])
        try:
            for _ in left:
                writer.write(requests.next().request)
                received = b""
                while (answer := split(received)) is None:
                    if not (more := await reader.read(_READ)):
                        raise RigError("a connection was closed")
                    received += more
                statuses = {status for status, _ in items_in(answer[1])[0]} if answer[0] == HTTPStatus.OK else set()
                if statuses != {HTTPStatus.CREATED}:
                    raise RigError(f"a batch of prepares was answered {answer[0]}: {answer[1][:300]!r}")
        finally:
            writer.close()

    async with asyncio.TaskGroup() as callers:
        for _ in range(plan.callers):
            callers.create_task(caller())


def load(rig: Rig, plan: LoadPlan) -> LoadResult:
    """Run a load."""
    return rig.run("bench.load", plan, LoadResult, within_s=sum(phase.seconds for phase in plan.phases))


def audited(rig: Rig, plan: LoadPlan) -> tuple[LoadResult, Audit]:
    """Run a load, and judge what it was told."""
    auditor, journal = rig.auditor(), Path(plan.journal_path)
    result = load(rig, plan)
    audit = auditor.audit([journal], payloads())
    journal.unlink()
    return result, audit


def warm_up(warmed: Sequence[Rig], seconds: float, say: Say) -> None:
    """Load the broker's JVM until its speed is steady; 0 skips this.

    All versions that are compared get the same load, since outcomes that a coordinator keeps cost it a little for each
    later transaction.
    """
    for scenario in (ALL["single-64"], ALL["batch-100"]) if seconds else ():
        for rig in warmed:
            say(f"warm-up: {scenario.name}")
            load(rig, plan_of(rig, scenario, Phase(name="warm-up", seconds=seconds / 2 / len(warmed))))


def run(kafka: Broker, options: Options, say: Say, *, rows: str = "main") -> Record:
    """Measure the rows of a set, or those that the options name."""
    with Rigs(kafka, options, say) as rigs:
        return measure(rigs, [ALL[name] for name in options.only] or SETS[rows], options, say)


def measure(rigs: Rigs, scenarios: Sequence[Scenario], options: Options, say: Say) -> Record:
    """Warm up, measure all rows in turn, with `before` each beside that version, and sum them up."""
    jobs: dict[str, tuple[Scenario, bool]] = {}
    for scenario in scenarios:
        if options.before:
            jobs[scenario.name + BEFORE] = (scenario, True)
        jobs[scenario.name] = (scenario, False)
    versions = {bool(options.before), False}
    warm_up([rigs.of(ALL["single-64"], before=before) for before in versions], options.warm_up, say)
    turns: dict[str, list[Turn]] = {name: [] for name in jobs}
    for number in range(options.turns):
        for name in list(jobs)[:: -1 if number % 2 else 1]:
            scenario, before = jobs[name]
            say(f"turn {number + 1} of {options.turns}: {name}")
            turns[name].append(turn(rigs.of(scenario, before=before), scenario, options, raw=not before))
    rows = []
    for name, (scenario, before) in jobs.items():
        against = name + BEFORE if name + BEFORE in turns else scenario.against
        rows.append(row_of(name, scenario, turns[name], [] if before else turns.get(against, [])))
    notes = []
    for name, one in [(name, one) for name, of_row in turns.items() for one in of_row]:
        notes += [f"{name}: the first that failed: {text}" for text in [one.result.first_failure] if text]
        notes += [f"{name}: the checker's first finding: {text}" for text in one.audit.first[:1]]
        notes += [f"{name}: the coordinator lost its lane"] * (one.lanes_lost > 0)
    return Record(
        title="prepare to commit confirmed; CPU in µs a transaction; ratios are medians of the turns",
        rows=rows,
        notes=notes,
        clean=not notes,
    )


def turn(rig: Rig, scenario: Scenario, options: Options, *, raw: bool = True) -> Turn:
    """Measure and audit a row once, then librdkafka alone with Kafka transactions of the same size."""
    before, logs = rig.metrics(*_LANE, "halfway_forwarded_total"), rig.broker.log_bytes()
    seconds = options.seconds / options.turns
    plan = plan_of(rig, scenario, Phase(name="lead", seconds=options.lead), Phase(name="run", seconds=seconds))
    result, audit = audited(rig, plan)
    after, log_bytes = rig.metrics(*_LANE, "halfway_forwarded_total"), rig.broker.log_bytes() - logs
    count, ends, lost, forwarded = (now - then for now, then in zip(after, before, strict=True))
    raw_per_s, raw_s = 0.0, options.raw_seconds / options.turns
    if raw and scenario.raw and raw_s:
        raw_plan = RawPlan(
            bootstrap_servers=rig.broker.bootstrap_servers,
            topic=f"{rig.topic}.raw",
            ends=max(1, round(ends / max(1, count))),
            ahead=scenario.callers > 1,
            lead_s=min(0.5, raw_s / 2),
            run_s=raw_s,
        )
        raw_per_s = rig.run("bench.load.raw", raw_plan, RawResult, within_s=raw_s).tx_per_s
    return Turn(
        window=result.of("run")[-1],
        result=result,
        audit=audit,
        raw_per_s=raw_per_s,
        kafka_transactions=count,
        ends=ends,
        lanes_lost=lost,
        log_bytes={name: size / max(1, audit.transactions) for name, size in log_bytes.items()},
        forwarded=forwarded,
        instances=len(rig.instances),
    )


def row_of(name: str, scenario: Scenario, turns: Sequence[Turn], against: Sequence[Turn]) -> Row:
    """Sum up the turns of a row: medians, and the lowest and highest rate and ratio."""
    rates = [one.rate for one in turns]
    raw = [one.rate / one.raw_per_s for one in turns if one.raw_per_s]
    audit = Audit.sum([one.audit for one in turns])
    each = [median(column) for column in zip(*(one.each_us for one in turns), strict=True)]
    return {
        "scenario": name,
        "tx/s": median(rates),
        "from": min(rates),
        "to": max(rates),
        "p50 ms": median(one.window.p50_ms for one in turns),
        "p99 ms": median(one.window.p99_ms for one in turns),
        "coordinator": sum(each),
        "of each": each if scenario.aim else None,
        "broker": _median(turns, lambda one: one.cpu_us("broker")),
        "load": _median(turns, lambda one: one.cpu_us("load")),
        "load ratio": _ratio(turns, against, lambda one: one.cpu_us("load")),
        "coordinator ratio": _ratio(turns, against, lambda one: sum(one.each_us)),
        "broker ratio": _ratio(turns, against, lambda one: one.cpu_us("broker")),
        "tx/s ratio": _ratio(turns, against, lambda one: one.rate),
        "raw tx/s": median(one.raw_per_s for one in turns) if raw else None,
        "of raw": median(raw) if raw else None,
        "raw from": min(raw) if raw else None,
        "raw to": max(raw) if raw else None,
        "ends/Kafka tx": median(one.ends / max(1, one.kafka_transactions) for one in turns),
        "log bytes": {name: median(one.log_bytes.get(name, 0.0) for one in turns) for name in turns[0].log_bytes},
        "forwarded": median(one.forwarded / one.calls for one in turns)
        if scenario.aim or scenario.workers > 1
        else None,
        "transactions": sum(one.window.transactions for one in turns),
        "audited": audit.transactions,
        **audit.found,
        "failed": sum(one.result.failed for one in turns),
        "lanes lost": round(sum(one.lanes_lost for one in turns)),
    }


def _median(turns: Sequence[Turn], figure: Callable[[Turn], float | None]) -> float | None:
    found = [value for one in turns if (value := figure(one)) is not None]
    return median(found) if found else None


def _ratio(turns: Sequence[Turn], against: Sequence[Turn], figure: Callable[[Turn], float | None]) -> float | None:
    """Return the median of the ratios to another row in the same turn."""
    pairs = [(figure(one), figure(other)) for one, other in zip(turns, against, strict=False)]
    found = [one / other for one, other in pairs if one is not None and other]
    return median(found) if found else None
