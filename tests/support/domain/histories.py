"""Random legal histories of one shard: the writes and reads of an owner, its lane, its tail and former owners."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import msgspec
from hypothesis import note
from hypothesis import strategies as st

from halfway.protocol.records import NO_BARRIER, Half, Message, MessageDigest, Op, OpKind, Origin, Parked, fingerprint
from halfway.protocol.shard import ShardState
from halfway.protocol.transactions import Cause, State
from tests.support.domain import naive_fold
from tests.support.domain.naive_fold import Known, Logs
from tests.support.domain.states import state_of

Action = Literal[
    "prepare",
    "ambiguous prepare",
    "foreign prepare",
    "check",
    "verdict",
    "park",
    "resume",
    "re-anchor",
    "commit",
    "roll back",
    "correct",
    "tail",
]

ACTIONS: tuple[Action, ...] = get_args(Action)
GROUP = "shop"
IDS = ("a", "b", "c")
CONTENTS = "AB"
OWN_BARRIER = 0
GAPS = 2
PARTITIONS = ("half", "op", "parked")
STEP_BYTES = 2
"""More than 100 times as many values as there are steps, so that each step is about equally likely."""


@dataclass(frozen=True)
class Step:
    """One action, which is skipped if it is not legal in the current state."""

    action: Action
    id: str
    content: str = "A"
    gap: int = 0
    """The number of offsets that control records take before the next record."""
    order: int = 0
    """The index in ORDERS: the order in which the results of a lane transaction are applied."""


@st.composite
def _histories(draw: st.DrawFn) -> list[Step]:
    """Draw histories of few kinds of actions and few ids, often long ones: these reach more states than mixtures."""
    actions = draw(st.lists(st.sampled_from(ACTIONS), min_size=2, max_size=6, unique=True))
    ids = IDS[: draw(st.integers(1, 3))]
    kinds: tuple[Action, ...] = (*actions, "foreign prepare", "tail")
    # One draw for all steps, because drawing takes most of the time.
    drawn = draw(st.binary(min_size=STEP_BYTES * draw(st.sampled_from([0, 4, 8, 15, 15])), max_size=STEP_BYTES * 30))
    numbers = (int.from_bytes(drawn[at : at + STEP_BYTES]) for at in range(0, len(drawn) - 1, STEP_BYTES))
    return [_step(number, kinds, ids) for number in numbers]


def _step(number: int, kinds: Sequence[Action], ids: Sequence[str]) -> Step:
    """Return the step that a number encodes: its digits are the fields."""
    number, order = divmod(number, len(ORDERS))
    number, gap = divmod(number, GAPS)
    number, content = divmod(number, len(CONTENTS))
    number, name = divmod(number, len(ids))
    return Step(action=kinds[number % len(kinds)], id=ids[name], content=CONTENTS[content], gap=gap, order=order)


steps = _histories()
ORDERS = (
    ("half", "op", "parked"),
    ("half", "parked", "op"),
    ("op", "half", "parked"),
    ("op", "parked", "half"),
    ("parked", "half", "op"),
    ("parked", "op", "half"),
)


def half_of(transaction_id: str, content: str, at: int, barrier: int = NO_BARRIER) -> Half:
    """Return the half of a first prepare, of an owner with this barrier."""
    messages = (Message(topic="orders", key=transaction_id.encode(), value=content.encode()),)
    return Half(
        id=transaction_id,
        group=GROUP,
        messages=messages,
        prepared_at=at,
        since=at,
        fingerprint=fingerprint(GROUP, messages, None),
        barrier=barrier,
    )


@dataclass
class World:
    """The logs of one shard, the part that its owner has read, and the owner's fold."""

    logs: Logs = field(default_factory=Logs)
    owner: ShardState = field(default_factory=lambda: ShardState(0))
    now: int = 1_000_000
    tail: int = 0
    """The number of records of half[s] that the owner's tail has read."""
    own: set[int] = field(default_factory=set)
    """The offsets of the owner's own half records."""

    def run(self, history: list[Step]) -> None:
        """Carry out a history."""
        note(f"history = {history}")
        for step in history:
            self.now += 100
            self.step(step)

    def step(self, step: Step) -> None:
        """Carry out one step, if it is legal."""
        match step.action:
            case "prepare":
                self._own_prepare(step)
            case "ambiguous prepare":
                if self.view(step.id) is None:
                    self._append_half(step, half_of(step.id, step.content, self.now, OWN_BARRIER))
            case "foreign prepare":
                self._append_half(step, half_of(step.id, step.content, self.now))
            case "tail":
                self.read_tail(1 + step.gap)
            case "correct":
                self._correct(step)
            case "resume":
                self._resume(step)
            case _:
                self._resolve(step)

    def seen(self) -> Logs:
        """Return the part of the logs that the owner has read."""
        half = [row for place, row in enumerate(self.logs.half) if place < self.tail or row[0] in self.own]
        return Logs(half=half, op=self.logs.op, parked=self.logs.parked)

    def view(self, transaction_id: str) -> Known | None:
        """Return the state of an id, as far as the owner has read the logs."""
        return naive_fold.known(self.seen(), transaction_id)

    def read_tail(self, records: int) -> None:
        """Let the tail read some more records of half[s]."""
        for offset, key, half in self.logs.half[self.tail : self.tail + records]:
            self.owner.apply_half(offset, key, half)
            self.owner.half_tail = offset + 1
        self.tail = min(len(self.logs.half), self.tail + records)

    # --- actions

    def _own_prepare(self, step: Step) -> None:
        half = half_of(step.id, step.content, self.now, OWN_BARRIER)
        unseen = [row for row in self.logs.half[self.tail :] if row[0] not in self.own and row[1] == step.id]
        # Of its own prepares the owner applies the second only when the tail has read it, and so the first.
        doubt = any(row is not None and row.barrier == OWN_BARRIER for _, _, row in unseen)
        if self.view(step.id) is not None or doubt:
            return
        offset = self._append_half(step, half)
        self.own.add(offset)
        self.owner.apply_half(offset, step.id, half)

    def _resolve(self, step: Step) -> None:
        what = self.view(step.id)
        if what is None or what.state.ended or what.half is None:
            return
        if step.action in ("commit", "roll back"):
            kind = OpKind.COMMITTED if step.action == "commit" else OpKind.ROLLED_BACK
            if what.state is State.PARKED:
                self._lane(step, half=[], op=self._op(kind, what, half_offset=-1), parked=[(step.id, None)])
            else:
                self._lane(step, half=[None], op=self._op(kind, what))
        elif what.state is State.PARKED:
            return
        elif step.action == "check":
            op = self._op(OpKind.CHECKED, what, checks=what.checks + 1, checked_at=self.now, remark=f"at {self.now}")
            self._lane(step, half=[], op=op)
        elif step.action == "verdict":
            self._lane(step, half=[], op=self._op(OpKind.VERDICT, what, commit_verdict=True))
        elif step.action == "re-anchor":
            self._lane(step, half=[_lane_half(what)], op=None)
        elif step.action == "park":
            parked_record = Parked(
                half=_lane_half(what), reason=f"at {self.now}", parked_at=self.now, checks=what.checks
            )
            self._lane(step, half=[None], op=self._op(OpKind.PARKED, what), parked=[(step.id, parked_record)])

    def _resume(self, step: Step) -> None:
        what = self.view(step.id)
        if what is None or what.state is not State.PARKED or what.half is None:
            return
        half = msgspec.structs.replace(_lane_half(what), since=self.now, checks=0, checked_at=None)
        op = self._op(OpKind.RESUMED, what, checks=0, checked_at=None)
        self._lane(step, half=[half], op=op, parked=[(step.id, None)])

    def _correct(self, step: Step) -> None:
        what = self.view(step.id)
        if what is None or not naive_fold.is_stray(self.seen(), step.id):
            return
        self._lane(step, half=[_lane_half(what) if what.state is State.PREPARED else None], op=None)

    # --- writing

    def _op(self, kind: OpKind, what: Known, **changes: object) -> Op:
        half = what.half
        assert half is not None
        op = Op(
            kind=kind,
            id=half.id,
            group=half.group,
            half_offset=what.half_offset,
            cause=Cause.CHECK if what.checks else Cause.PRODUCER,
            prepared_at=half.prepared_at,
            at=self.now,
            fingerprint=half.fingerprint,
            checks=what.checks,
            checked_at=what.checked_at,
            commit_verdict=what.commit_verdict,
            remark=what.remark,
            messages=tuple(MessageDigest.of(message) for message in half.messages) if kind.final else (),
        )
        return msgspec.structs.replace(op, **changes)

    def _append_half(self, step: Step, half: Half | None) -> int:
        offset = self._next(_last(self.logs.half), step)
        self.logs.half.append((offset, step.id, half))
        return offset

    def _lane(
        self,
        step: Step,
        *,
        half: list[Half | None],
        op: Op | None,
        parked: list[tuple[str, Parked | None]] | None = None,
    ) -> None:
        """Write one lane transaction, and apply its results to the owner in some order of the partitions."""
        for partition in ORDERS[step.order]:
            if partition == "half":
                for record in half:
                    offset = self._append_half(step, record)
                    self.own.add(offset)
                    self.owner.apply_half(offset, step.id, record)
            elif partition == "op" and op is not None:
                offset = self._next(_last(self.logs.op), step)
                self.logs.op.append((offset, op))
                self.owner.apply_op(offset, op)
            elif partition == "parked":
                for key, value in parked or []:
                    offset = self._next(_last(self.logs.parked), step)
                    self.logs.parked.append((offset, key, value))
                    self.owner.apply_parked(offset, key, value)

    @staticmethod
    def _next(last: int, step: Step) -> int:
        return last + 1 + step.gap


def _last(rows: Sequence[tuple[int, *tuple[object, ...]]]) -> int:
    """Return the offset of the last record, -1 if there is none."""
    return rows[-1][0] if rows else -1


def _lane_half(what: Known) -> Half:
    """Return the half that the lane writes again, with the current totals."""
    assert what.half is not None
    return msgspec.structs.replace(
        what.half,
        origin=Origin.LANE,
        checks=what.checks,
        checked_at=what.checked_at,
        commit_verdict=what.commit_verdict,
        remark=what.remark,
        barrier=NO_BARRIER,
    )


def known_by(state: ShardState) -> dict[str, Known]:
    """Return the content of a fold in the form of the naive model, without the offsets."""
    found: dict[str, Known] = {}
    for pending in state.pending():
        found[pending.id] = Known(
            state=State.PREPARED,
            content=pending.fingerprint,
            checks=pending.checks,
            checked_at=pending.checked_at,
            commit_verdict=pending.commit_verdict,
            remark=pending.remark,
        )
    for parked in state.parked():
        assert parked.id not in found, "both pending and parked"
        found[parked.id] = Known(
            state=State.PARKED,
            content=parked.fingerprint,
            checks=parked.checks,
            commit_verdict=parked.commit_verdict,
            remark=parked.remark,
            reason=parked.reason,
        )
    for ended in state.ended():
        assert ended.id not in found, "both ended and alive"
        found[ended.id] = Known(
            state=ended.state,
            content=ended.fingerprint,
            checks=ended.checks,
            remark=ended.remark,
            cause=ended.cause,
            at=ended.at,
        )
    for transaction_id, what in found.items():
        assert state_of(state, transaction_id) is what.state
    return found


def expected(logs: Logs) -> dict[str, Known]:
    """Return the content of the naive model, without the fields that a fold does not keep."""
    return {name: _comparable(what) for name, what in naive_fold.everything(logs).items()}


def _comparable(what: Known) -> Known:
    checked_at = what.checked_at if what.state is State.PREPARED else None
    return replace(what, half=None, half_offset=-1, checked_at=checked_at)
