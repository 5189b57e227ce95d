"""The folds of the instances, compared with a slow one over the same records."""

from __future__ import annotations

from collections.abc import Iterator

from halfway.kafka.records.codec import barrier_of, decode_half, decode_op, decode_parked, kind_of
from halfway.simulated import SimulatedKafka
from halfway.simulated.log import Record
from tests.simulation.instances import PREFIX, World
from tests.simulation.story import GONE, GROUPS
from tests.support.domain.histories import expected, known_by
from tests.support.domain.naive_fold import Logs


def _read(kafka: SimulatedKafka, kind: str, shard: int) -> Iterator[tuple[str, Record]]:
    """Yield the committed records of a shard, without barriers."""
    partition = kafka.topics[f"{PREFIX}{kind}"].partitions[shard]
    for one in partition.records:
        if one.control is None and not one.aborted and one.offset < partition.stable and kind_of(one.headers) == kind:
            yield (one.key or b"").decode(), one


def _logs(kafka: SimulatedKafka, shard: int) -> Logs:
    logs = Logs()
    for name, one in _read(kafka, "half", shard):
        half = None if one.value is None else decode_half(one.value, barrier_of(one.headers))
        logs.half.append((one.offset, name, half))
    logs.op = [(one.offset, decode_op(one.value)) for _, one in _read(kafka, "op", shard)]
    for name, one in _read(kafka, "parked", shard):
        logs.parked.append((one.offset, name, None if one.value is None else decode_parked(one.value)))
    return logs


def differences(world: World) -> Iterator[str]:
    """Yield where a fold that is served differs. It may have forgotten outcomes, and not what is pending or parked."""
    for instance in world.instances:
        for shard in () if instance.coordinator is None else instance.coordinator.shards.all():
            slow, held = expected(_logs(world.kafka, shard.number)), known_by(shard.state)
            wrong = {name for name, one in held.items() if slow.get(name) != one}
            wrong |= {name for name, one in slow.items() if not one.state.ended and name not in held}
            for name in sorted(wrong):
                yield f"fold: {name} of {instance.process.name} is {held.get(name)}, not {slow.get(name)}"


def other_groups(world: World) -> Iterator[str]:
    """Yield where an instance has a group that the topic has not, or has not one that the topic has."""
    records = world.kafka.topics[f"{PREFIX}groups"].partitions[0].records
    last = {(one.key or b"").decode(): one.value for one in records if one.control is None and not one.aborted}
    for instance in world.instances:
        if (coordinator := instance.coordinator) is None:
            continue
        for name in (*GROUPS, GONE):
            if coordinator.is_registered(name) != (last.get(name) is not None):
                yield f"groups: {name} at {instance.process.name} is not as in the topic"
