"""The table of fault points: for every numbered step the method that carries it out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

When = Literal["before", "after"]
WHENS: tuple[When, ...] = ("before", "after")

_LANE = "halfway.kafka.lane.transaction"
_THREAD = "halfway.kafka.lane.lane"
_QUEUE = "halfway.kafka.lane.queue"
_SUSPECTS = "halfway.kafka.lane.suspect_lane"
_ACQUIRE = "halfway.kafka.ownership.acquisition"
_FORMER_OWNERS = "halfway.kafka.ownership.former_owners"
_MEMBERSHIP = "halfway.kafka.ownership.membership"
_GIVING_BACK = "halfway.kafka.ownership.incarnation"
_SCAN = "halfway.coordinator.checkback.scan"
_CHECKS = "halfway.coordinator.checkback.dispatcher"
_VERDICTS = "halfway.coordinator.commit_verdicts"
_ENDING = "halfway.coordinator.ending"
_SHARDS = "halfway.coordinator.shards.shard_table"
_STREAM = "halfway.http.stream.stream"
_OPERATIONS = "halfway.http.stream.operations"

STEPS: Mapping[str, tuple[str, str]] = {
    # docs/protocol.md#end-the-lane; the suspects' lane takes steps 1 to 5 too, on the thread halfway-suspects.
    "lane.submit": (_QUEUE, "LaneQueue.put_all"),
    "lane.admit": (_THREAD, "LaneThread._admitted"),
    "lane.write": (_THREAD, "write_transaction"),
    "lane.1.begin": (_LANE, "LaneTransaction.begin"),
    "lane.2.messages": (_LANE, "LaneTransaction.produce_messages"),
    "lane.3.op_markers": (_LANE, "LaneTransaction.produce_op_markers"),
    "lane.4.tombstones": (_LANE, "LaneTransaction.produce_tombstones"),
    "lane.5.commit": (_LANE, "LaneTransaction.commit"),
    "lane.suspect": (_THREAD, "LaneThread._suspect"),
    "lane.answer": (_LANE, "_answer"),
    "suspects.rehearse": (_SUSPECTS, "SuspectLane._rehearse"),
    "suspects.commit": (_SUSPECTS, "SuspectLane._commit"),
    "ending.apply": (_SHARDS, "ShardTable.apply"),
    # docs/protocol.md#ownership.
    "acquire.initialise_lane": (_MEMBERSHIP, "lane_producers"),
    "acquire.1.fence_acquirers": (_ACQUIRE, "Acquisition._fence_acquirers"),
    "acquire.2.read_owners": (_FORMER_OWNERS, "FormerOwners._read"),
    "acquire.3.fence": (_FORMER_OWNERS, "fence"),
    "acquire.3.fence_owners": (_FORMER_OWNERS, "FormerOwners.fence"),
    "acquire.4.claim": (_ACQUIRE, "Acquisition._claim"),
    "acquire.4.produce_claim": (_ACQUIRE, "Acquisition._produce_claim"),
    "acquire.5.fold": (_ACQUIRE, "Acquisition._fold"),
    "acquire.6.serve": (_MEMBERSHIP, "KafkaMembership.serve"),
    "release.finish": (_GIVING_BACK, "finish"),
    "release.commit": (_THREAD, "LaneThread._release"),
    "release.produce": (_THREAD, "LaneThread._produce_releases"),
    "release.give_back": (_MEMBERSHIP, "KafkaMembership._give_back"),
    # docs/protocol.md#scan-and-check-back.
    "scan.1.correct_strays": (_SCAN, "Scan._correct_strays"),
    "scan.2.record_verdicts": (_VERDICTS, "CommitVerdicts.record"),
    "scan.3.due": (_SCAN, "Scan._process_due"),
    "scan.4.behind": (_SCAN, "Scan._reanchor_oldest"),
    "scan.5.forget": (_SCAN, "Scan._forget"),
    "scan.6.commit_cursors": (_SCAN, "Scan._commit_cursors"),
    "scan.carry_out": (_SCAN, "Scan._run"),
    "scan.give_up": (_SCAN, "Scan._give_up"),
    "scan.write_again": (_SCAN, "Scan._write_again"),
    "check.ask": (_CHECKS, "CheckDispatcher._send"),
    "check.judge": (_CHECKS, "CheckDispatcher._apply_reply"),
    "check.note": (_CHECKS, "CheckDispatcher.record_check"),
    "check.record_verdict": (_ENDING, "Ending.record_verdict"),
    # docs/api.md.
    "stream.hand_over": (_OPERATIONS, "StreamOperations._begin"),
    "stream.accept": (_OPERATIONS, "StreamOperations._accept"),
    "stream.answer": (_STREAM, "Stream.answer"),
}
"""For each step its module and its qualified name there."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A place where something can be done: before or after a call of `qualified_name` in `module`."""

    module: str
    qualified_name: str
    when: When


POINTS: Mapping[str, Point] = {
    f"{step}.{when}": Point(module=module, qualified_name=qualified_name, when=when)
    for step, (module, qualified_name) in STEPS.items()
    for when in WHENS
}
