"""The ports in memory, for tests of halfway and of its users.

`Memory(shards=8, topics={"orders": 3})` replaces Kafka and the ports on it. `memory.ports` are the ports for a
coordinator, `memory.records("orders")` returns the records that consumers see, `memory.faults` injects faults, and
`memory.clock` sets the time.
"""

from halfway.memory.cluster import Memory, Ports, topic
from halfway.memory.log import Faults, MemoryLog, Record
from halfway.memory.surroundings import (
    ManualClock,
    Observed,
    RecordingObserver,
    ScriptedCaller,
    no_verdict,
    unreachable,
    verdict,
)

__all__ = [
    "Faults",
    "ManualClock",
    "Memory",
    "MemoryLog",
    "Observed",
    "Ports",
    "Record",
    "RecordingObserver",
    "ScriptedCaller",
    "no_verdict",
    "topic",
    "unreachable",
    "verdict",
]
