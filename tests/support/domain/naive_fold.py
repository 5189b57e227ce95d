"""The state of a shard, computed in a slow and simple way: every record is kept, and each id is computed from scratch.

This is docs/protocol.md#state-is-a-fold-over-the-log in as little code as possible. Tests compare `ShardState` with it.
"""

from dataclasses import dataclass, field

from halfway.protocol.records import Half, Op, Origin, Parked
from halfway.protocol.transactions import Cause, State


@dataclass
class Logs:
    """The records of one shard, in the order of their offsets."""

    half: list[tuple[int, str, Half | None]] = field(default_factory=list)
    op: list[tuple[int, Op]] = field(default_factory=list)
    parked: list[tuple[int, str, Parked | None]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Known:
    """The state of one id. A commit would use `half` and `half_offset`."""

    state: State
    content: bytes | None
    checks: int
    checked_at: int | None = None
    commit_verdict: bool = False
    remark: str | None = None
    cause: Cause | None = None
    reason: str | None = None
    at: int | None = None
    half: Half | None = None
    half_offset: int = -1


def known(logs: Logs, transaction_id: str) -> Known | None:
    """Return the state of an id, None if it is unknown."""
    ops = [op for _, op in logs.op if op.id == transaction_id]
    for op in ops:
        if op.kind.final:
            state = State.COMMITTED if op.kind == "COMMITTED" else State.ROLLED_BACK
            return Known(
                state=state,
                content=op.fingerprint,
                checks=op.checks,
                remark=op.remark,
                cause=op.cause,
                at=op.at,
                half_offset=op.half_offset,
            )
    parked = [record for _, key, record in logs.parked if key == transaction_id]
    if parked and (last := parked[-1]) is not None:
        return Known(
            state=State.PARKED,
            content=last.half.fingerprint,
            checks=last.checks,
            commit_verdict=last.half.commit_verdict,
            remark=last.half.remark,
            reason=last.reason,
            half=last.half,
            checked_at=last.half.checked_at,
            half_offset=ops[-1].half_offset,
        )
    pending = _pending(logs, transaction_id)
    if pending is None:
        return None
    offset, half = pending
    last_op = ops[-1] if ops else None
    return Known(
        state=State.PREPARED,
        content=half.fingerprint,
        checks=last_op.checks if last_op else half.checks,
        checked_at=last_op.checked_at if last_op else half.checked_at,
        commit_verdict=last_op.commit_verdict if last_op else half.commit_verdict,
        remark=last_op.remark if last_op else half.remark,
        half=half,
        half_offset=offset,
    )


def is_stray(logs: Logs, transaction_id: str) -> bool:
    """Return whether half[s] would restore the wrong content, or an ended transaction."""
    halves = _halves(logs, transaction_id)
    authority = _authority(halves)
    if authority is not None:
        return any(half is not None and half.origin is Origin.PREPARE for _, half in halves[authority + 1 :])
    prepares = [half for _, half in halves if half is not None]
    if not prepares:
        return False
    counts = _counting([half.barrier for half in prepares])
    return any(not _repeats(prepares[counts], half) for half in prepares[counts + 1 :])


def _counting(barriers: list[int]) -> int:
    """Return which of several prepares of an id counts: the first of the owner that acquired the shard last."""
    return barriers.index(max(barriers))


def _repeats(first: Half, half: Half) -> bool:
    """Return whether a fold that reads only this prepare gets the same state as one that starts at the first."""
    same = half.fingerprint == first.fingerprint and half.barrier == first.barrier
    return same and first.prepared_at <= half.prepared_at


def everything(logs: Logs) -> dict[str, Known]:
    """Return the state of every known id."""
    ids = {key for _, key, _ in logs.half} | {op.id for _, op in logs.op} | {key for _, key, _ in logs.parked}
    return {name: state for name in ids if (state := known(logs, name)) is not None}


def strays(logs: Logs) -> set[str]:
    """Return the ids whose half records must be corrected."""
    return {name for name in {key for _, key, _ in logs.half} if is_stray(logs, name)}


def _halves(logs: Logs, transaction_id: str) -> list[tuple[int, Half | None]]:
    return [(offset, half) for offset, key, half in logs.half if key == transaction_id]


def _authority(halves: list[tuple[int, Half | None]]) -> int | None:
    """Return the place of the last record that the lane wrote, which wins over all prepares."""
    places = [place for place, (_, half) in enumerate(halves) if half is None or half.origin is Origin.LANE]
    return places[-1] if places else None


def _pending(logs: Logs, transaction_id: str) -> tuple[int, Half] | None:
    """Return the half that is pending: the lane's last one, or the prepare that counts."""
    halves = _halves(logs, transaction_id)
    authority = _authority(halves)
    if authority is not None:
        offset, half = halves[authority]
        return None if half is None else (offset, half)
    prepares = [(offset, half) for offset, half in halves if half is not None]
    return prepares[_counting([half.barrier for _, half in prepares])] if prepares else None
