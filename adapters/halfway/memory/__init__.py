"""The ports in memory, for tests of halfway and of its users.

`Memory(shards=8, topics={"orders": 3})` is a Kafka with everything over it; `memory.ports` are what a coordinator
needs, `memory.records("orders")` what consumers see, `memory.faults` what goes wrong next, `memory.clock` the time.
"""

from halfway.memory.cluster import Memory, Ports, topic
from halfway.memory.faults import Faults
from halfway.memory.log import MemoryLog, Record
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
