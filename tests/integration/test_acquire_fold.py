"""The fold of an acquisition on a real broker: written records, releases, and outcomes back to the horizon."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import pytest

import halfway.kafka.ownership.acquisition as acquire_module
from halfway.coordinator.ports import Cursors
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.reader import Place, Reader
from halfway.kafka.clients.transactional_producer import initialised
from halfway.kafka.log.cursors import KafkaCursors
from halfway.kafka.records.codec import KIND_HALF, KIND_OP, KIND_OWNER, encode_op, record_headers
from halfway.protocol.outcomes import EndCounts
from halfway.protocol.transactions import State
from tests.support.contract.backend import prepare
from tests.support.domain.states import state_of
from tests.support.ownership.acquisitions import GivenCursors, acquire
from tests.support.ownership.cluster_harness import PATIENCE_S, commit_of, half, in_shard, produce, running


def test_a_cursor_past_the_end_has_everything_read(config: KafkaConfig) -> None:
    """Otherwise nothing would be read, and pending transactions would be unknown."""
    skipped, pending = list[tuple[str, str]](), in_shard(0, "pending")
    prepare(config, 0, half(pending))
    far = GivenCursors({0: Cursors(half=1_000_000, op=1_000_000)})
    [acquired] = acquire(config, "one", [0], cursors=far, skipped=lambda *told: skipped.append(told))
    assert state_of(acquired.state, pending) is State.PREPARED
    assert skipped == [(config.cursors_group, "beyond_end")]


async def test_the_fold_starts_at_the_cursors_but_reads_outcomes_back_to_the_horizon(config: KafkaConfig) -> None:
    """Recovery reads half from its cursor, op from the lower of its cursor and the horizon, and knows its outcomes."""
    before, after, ended = (in_shard(0, name) for name in ("before", "after", "ended"))
    first, second = prepare(config, 0, half(before), half(after))
    async with running(config) as instance:
        written = await instance.write(commit_of(0, half(ended), 0))
        assert written.op is not None
        cursors = KafkaCursors(config, instance.observer)
        await cursors.start()
        await cursors.commit({0: Cursors(half=second, op=written.op + 2)})
        await cursors.stop()
    assert second > first
    async with running(config) as instance:
        state = instance.service.states[0]
        assert state.complete_from == 0, "op was read from its beginning"
        assert state_of(state, before) is None
        assert state_of(state, after) is State.PREPARED
        assert state_of(state, ended) is State.COMMITTED


async def test_only_the_ends_behind_those_that_were_counted_are_added(config: KafkaConfig) -> None:
    """The former owner has counted what is before a position of op; its owner record, and barriers, are no ends."""
    first, second = (in_shard(0, name) for name in ("first", "second"))
    async with running(config) as instance:
        at = [await instance.write(commit_of(0, half(name), offset)) for offset, name in enumerate((first, second))]
    position = at[1].op
    assert position is not None
    known = EndCounts(position=position, since=1, committed={"check": 5}, rolled_back={"policy": 2})
    for ends, committed in ((known, {"check": 5, "producer": 1}), (None, {"producer": 2})):
        stored = GivenCursors({0: Cursors(half=0, op=0, ends=ends)})
        [acquired] = await asyncio.to_thread(acquire, config, f"from {ends}", [0], cursors=stored)
        assert acquired.state.ends.committed == committed


async def test_an_outcome_whose_marker_comes_late_is_folded_behind_the_cursor_too(config: KafkaConfig) -> None:
    """Kafka finds nothing after the LSO when it looks up the horizon: the fold begins at the LSO.

    The writer of the outcome is not fenced, because it had released the shard. Its commit was accepted, and the broker
    writes the marker after the next owner has looked up the horizon.
    """
    produce(config, config.owners_topic, 0, b"0", None, record_headers(KIND_OWNER, "", "released"))
    ended = in_shard(0, "ended")
    [at] = prepare(config, 0, half(ended))
    [lane] = initialised(config, [config.prefix + "released.0"], time.monotonic() + PATIENCE_S)
    write = commit_of(0, half(ended), at)
    assert write.op is not None
    offsets: list[int | None] = []
    lane.begin()
    lane.produce(
        config.op_topic,
        encode_op(write.op),
        ended.encode(),
        0,
        headers=record_headers(KIND_OP, "orders", "committed"),
        on_delivery=lambda _error, message: offsets.append(message.offset()),
    )
    lane.produce(config.half_topic, None, ended.encode(), 0, headers=record_headers(KIND_HALF, "orders", "committed"))
    assert lane.flush(time.monotonic() + PATIENCE_S, lambda: False)
    [op] = offsets
    assert op is not None

    class Meanwhile(Reader):
        """Write the marker as soon as the start offset is known."""

        def add(self, starts: Mapping[Place, int]) -> None:
            if (config.parked_topic, 0) in starts:
                lane.commit(PATIENCE_S)
            super().add(starts)

    cursors = GivenCursors({0: Cursors(half=at + 1, op=op + 1)})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(acquire_module, "Reader", Meanwhile)
        [acquired] = await asyncio.to_thread(acquire, config, "next", [0], cursors=cursors)
    lane.abandon()
    assert state_of(acquired.state, ended) is State.COMMITTED
