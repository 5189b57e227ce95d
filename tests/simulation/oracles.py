"""What must be true of a run: the rules of `checker`, what was visible when, and the fold against its slow twin."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from confluent_kafka import Message

from checker import dump
from checker.judge import judge
from checker.records import AnyRecord, Op, Real
from halfway.simulated.log import Record
from tests.simulation.instances import PREFIX
from tests.simulation.machine import EPOCH_S
from tests.simulation.run import Simulation
from tests.simulation.story import TOPICS

KINDS = ("half", "op", "parked")


def records(simulation: Simulation) -> Iterator[tuple[AnyRecord, Record]]:
    """Yield the committed records of a run's topics as the checker reads them, each with the broker's."""
    for name, topic in simulation.kafka.topics.items():
        kind = name.removeprefix(PREFIX)
        if name not in TOPICS and kind not in KINDS:
            continue
        for number, partition in enumerate(topic.partitions):
            for one in partition.records:
                if one.control is not None or one.aborted or one.offset >= partition.stable:
                    continue
                message = Message(
                    topic=name, partition=number, offset=one.offset, key=one.key, value=one.value,
                    headers=[*one.headers] or None, timestamp=(1, one.timestamp),
                )  # fmt: skip
                read = dump._real(message) if name in TOPICS else dump._internal(kind, message)
                if read is not None:
                    yield read, one


def problems(simulation: Simulation) -> list[str]:
    """Return all that is wrong with a run."""
    found = list(simulation.problems)
    both = list(records(simulation))
    verdict = judge(simulation.events, [read for read, _ in both])
    simulation.committed = verdict.committed
    found += [f"{one.rule}: {one.id} {' | '.join(one.evidence)}" for one in verdict.findings]
    if not verdict.complete:
        found.append("incomplete: the run did not come to its end")
    found += visible_early(simulation, both)
    found += unasked(simulation, both)
    return found


def visible_early(simulation: Simulation, both: list[tuple[AnyRecord, Record]]) -> Iterator[str]:
    """A message is not even written before somebody said that its transaction is committed."""
    seen: defaultdict[str, list[float]] = defaultdict(list)
    for read, record in both:
        if isinstance(read, Real):
            seen[read.id].append(record.appended_at / 1000 - EPOCH_S)
    for name, times in seen.items():
        said_at = simulation.said_at.get(name)
        if said_at is None or min(times) < said_at - 0.001:
            yield f"visible_early: {name} written at {min(times):.3f}, committed at {said_at}"


def unasked(simulation: Simulation, both: list[tuple[AnyRecord, Record]]) -> Iterator[str]:
    """After all clocks were set ahead, policy rolls nothing back before it has asked again."""
    for read, record in both:
        if isinstance(read, Op) and read.cause == "policy" and read.kind == "ROLLED_BACK":
            at = record.appended_at / 1000 - EPOCH_S
            for jump, step_s in simulation.jumps:
                # An op has the time of its instance: it says whether it was decided after the jump.
                is_later = jump < at and read.at / 1000 - EPOCH_S >= jump + 0.9 * step_s
                if is_later and not any(jump < asked < at for asked in simulation.asked_at.get(read.id, ())):
                    yield f"unasked: {read.id} rolled back at {at:.3f}, not asked since the jump at {jump:.3f}"
