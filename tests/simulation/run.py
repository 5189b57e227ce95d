"""One run: the plan of a seed on a machine of its own, and what it leaves: a trace, a history, and the topics."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from checker.content import content_of
from checker.history import AnyEvent, Checked, End, Ended, Looked, Prepare, Prepared, Rest, Run, Said, Taken
from halfway.client.ids import transaction_id
from halfway.coordinator import requests
from halfway.coordinator.ports import CheckReply, CheckRequest
from halfway.coordinator.requests import ListQuery
from halfway.protocol.errors import HalfwayError, RetryableError
from halfway.protocol.records import Message
from halfway.protocol.transactions import Outcome, State
from tests.simulation.faults import Cluster, Stage
from tests.simulation.folds import differences, other_groups
from tests.simulation.instances import Network, World, new_settings, surroundings
from tests.simulation.machine import EPOCH_S, BrokersClock, DeadlockError
from tests.simulation.story import GONE, GROUPS, TOPIC_SETTINGS, TOPICS, Plan, Transaction, group_spec

LIVENESS_S: Final = 120.0
"""How long after the last fault everything may take to end."""
_QUIET_S: Final = 8.0
"""Longer than the network has any message."""
_WIDE_NAME: Final = "\u00e4" * 10_000
"""A header's name of twice as many bytes."""
_STATUS: Final = {
    "already_ended": 409, "id_reused": 409, "not_pending": 409, "unknown_transaction": 404, "outcome_expired": 410,
}  # fmt: skip


class Simulation(Stage):
    """A run of a plan. `go` runs it; afterwards the attributes say what has happened."""

    def __init__(self, plan: Plan, *, keeps_trace: bool = False) -> None:
        super().__init__(plan, keeps_trace=keeps_trace)
        self.problems: list[str] = []
        self.decided: dict[str, Said] = {}
        """The producers' database: what was decided about each id."""
        self.said_at: dict[str, float] = {}
        """When somebody first said that a transaction is to be committed."""
        self.running: set[str] = set()
        """Transactions whose local transaction may still be decided by its producer."""
        self.silent: set[str] = set()
        """Transactions whose checks are answered with unknown."""
        self.asked_at: dict[str, list[float]] = {}
        """When each id was asked about: when the answer came, as one may be under way while clocks are set."""
        self.committed = 0

    # --- the run

    def go(self) -> Simulation:
        gc.disable()
        try:
            with surroundings(lambda: self.world), self.machine.installed():
                self.loop.set_exception_handler(self._loop_failed)
                try:
                    self.loop.run_until_complete(self._run())
                except DeadlockError as error:
                    self.problems.append(f"stuck: {error}")
                self.problems += [f"thread died: {error!r}" for error in self.machine.crashed]
        finally:
            gc.enable()
        return self

    def _loop_failed(self, _: object, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if self.machine.ending:
            return  # what nobody has asked for since
        if not isinstance(error, HalfwayError):
            self.problems.append(f"task died: {context.get('message')} {error!r}")

    async def _run(self) -> None:
        plan, traits, machine = self.plan, self.plan.traits, self.machine
        self.kafka = Cluster(
            clock=BrokersClock(),
            seed=plan.seed,
            latency_s=(0.0001, traits["kafka_s"]),
            markers_s=(0.0, traits["markers_s"]),
        )
        self.kafka.tell, self.kafka.on_the_way, self.kafka.effects = self.tell, [], self.effects
        for name, partitions in TOPICS.items():
            self.kafka.create(name, partitions, 1, TOPIC_SETTINGS, dry=False)
        self.world = World(machine, self.kafka, new_settings(), Network(machine), self._check)
        for _ in range(plan.instances):
            self.world.start()
        await self.world.all_served()
        self.note(Run(seed=plan.seed, topics=tuple(TOPICS), policy_rolls_back=("dropping",), fetching=("pulled",)))
        await self._register()
        self.calm_network()
        machine.stretch = traits["polls"]
        machine.late_share, machine.late_s = traits["threads_late"], traits["threads_late_s"]
        begun = self.loop.now
        tasks = [
            asyncio.create_task(self._later(begun + one.at, partial(self._produce, one))) for one in plan.transactions
        ]
        tasks += [asyncio.create_task(self._later(begun + one.at, partial(self.break_it, one))) for one in plan.faults]
        fetching = asyncio.create_task(self._fetch())
        await asyncio.gather(*tasks)
        self.silent.clear()
        await self.mend()
        await self._settle()
        fetching.cancel()
        self.problems += [*differences(self.world), *other_groups(self.world)]
        self.note(Rest(at=self.now_ms))

    async def _later(self, at: float, work: Callable[[], Any]) -> None:
        await asyncio.sleep(at - self.loop.now)
        await work()

    async def _register(self) -> None:
        for name in (*GROUPS, GONE) if any(fault.kind == "away" for fault in self.plan.faults) else GROUPS:
            await self.put_group(group_spec(name))

    # --- producers

    async def _produce(self, one: Transaction) -> None:
        name = transaction_id(
            f"{self.plan.seed}/{one.number}", round((EPOCH_S + self.loop.now + self.clients_ahead_s) * 1000)
        )
        self.running.add(name)
        if one.is_silent:
            self.silent.add(name)
        looks = [
            asyncio.create_task(self._later(self.loop.now + s, partial(self._look, name))) for s in one.looks_after_s
        ]
        if one.is_stored:
            self.decided[name] = "commit"
        try:
            stored = await self._prepare(one, name)
            if one.decides_after_s is None:
                return
            await asyncio.sleep(one.decides_after_s)
            said = self.decided.setdefault(name, "commit" if one.commits and stored else "rollback")
        finally:
            self.running.discard(name)
        outcome = Outcome.COMMIT if said == "commit" else Outcome.ROLLBACK
        is_done = False
        for within_s in one.ends_within_s:
            is_done = await self._end(name, outcome, within_s)
            if is_done:
                break
            await asyncio.sleep(self.chance.uniform(0.01, 1))
        if one.ends_again is not None:
            await asyncio.sleep(one.ends_again)
            if one.contradicts and is_done:
                outcome = Outcome.ROLLBACK if outcome is Outcome.COMMIT else Outcome.COMMIT
            if one.contradicts <= is_done:
                await self._end(name, outcome, 5, is_contradiction=one.contradicts)
        await asyncio.gather(*looks)

    async def _prepare(self, one: Transaction, name: str) -> bool:
        """Prepare until it is stored; return whether it is known to be."""
        for attempt, within_s in enumerate(one.within_s):
            body = attempt if one.changes else 0
            headers = ((_WIDE_NAME, b""),) if one.wide_bytes else ()
            messages = tuple(
                Message(
                    topic=topic,
                    key=f"{one.number}".encode(),
                    headers=headers,
                    value=f"{one.number}.{place}.{body}".encode().ljust(one.wide_bytes),
                )
                for place, topic in enumerate(one.topics)
            )
            ref = f"{name}/{attempt}"
            contents = tuple(content_of(one.topic, one.key, one.value, one.headers) for one in messages)
            sent_at = self.now_ms
            self.note(Prepare(at=sent_at, ref=ref, group=one.group, contents=contents, id=name))
            request = requests.Prepare(group=one.group, messages=messages, id=name)
            got = await self._ask(partial(Prepared, ref=ref, sent_at=sent_at), within_s, "prepare", request)
            if isinstance(got, HalfwayError) and not isinstance(got, RetryableError):
                return False
            if isinstance(got, requests.Prepared):
                return got.state is State.PREPARED
            await asyncio.sleep(self.chance.uniform(0.001, 0.5))
        return False

    async def _end(
        self,
        name: str,
        outcome: Outcome,
        within_s: float,
        *,
        is_contradiction: bool = False,
        check_id: str | None = None,
        by: str = "producer",
    ) -> bool:
        """End a transaction; return whether the answer says that it is done."""
        said: Any = outcome.value
        sent_at = self.now_ms
        if not is_contradiction:  # nothing can come of one, so nobody has said it
            self.note(End(at=sent_at, id=name, outcome=said, by=by))
            if outcome is Outcome.COMMIT:
                self.said_at.setdefault(name, self.loop.now)
        request = requests.End(id=name, outcome=outcome, check_id=check_id)
        answer = partial(Ended, id=name, outcome=said, by=by, sent_at=sent_at)
        got = await self._ask(answer, within_s, "end", request)
        return isinstance(got, requests.EndResult) and got.state.ended

    async def _ask(self, answer: Callable[..., AnyEvent], within_s: float, method: str, *args: Any) -> Any:
        """Call some instance, and note the answer; return it, or the error, or None if none came."""
        try:
            got = await self.world.call(self.any(), within_s, method, *args)
        except TimeoutError:
            self.note(answer(at=self.now_ms, status=0))
            return None
        except HalfwayError as error:
            if error.code == "outcome_expired" and self.is_horizon_over:
                return error  # by that clock the outcome was old
            state = error.fields.get("state")
            shown = None if state is None else str(state)
            self.effects[f"answered {error.code}"] += 1
            self.note(answer(at=self.now_ms, status=_status(error), error_code=error.code, state=shown))
            return error
        more: dict[str, Any] = {"changed": got.changed} if isinstance(got, requests.EndResult) else {}
        if isinstance(got, requests.Prepared):
            more = {"id": got.id}
        self.note(answer(at=self.now_ms, status=200, state=got.state.value, **more))
        return got

    async def _look(self, name: str) -> None:
        await self._ask(partial(Looked, id=name, sent_at=self.now_ms), 3, "get", name)

    # --- checks

    def _verdict(self, name: str) -> Said:
        """Return what the producers' database says, as a barrier does: an undecided transaction is rolled back."""
        if name in self.silent or (name in self.running and name not in self.decided):
            return "unknown"
        said = self.decided.setdefault(name, "rollback")
        if said == "commit":
            self.said_at.setdefault(name, self.loop.now)
        return said

    async def _check(self, request: CheckRequest) -> CheckReply:
        try:
            return await self._answer(request)
        finally:
            self.asked_at.setdefault(request.id, []).append(self.loop.now)

    async def _answer(self, request: CheckRequest) -> CheckReply:
        await asyncio.sleep(self.chance.uniform(0.0005, 0.01))
        kind = self.chance.random() if self.chance.random() < self.denied_checks else 1.0
        if kind < 0.2:
            return _reply(sent=False, reachable=False)
        if kind < 0.4:
            self.note(Checked(at=self.now_ms, id=request.id, said="nothing"))
            return _reply()
        if kind < 0.5:
            self.note(Checked(at=self.now_ms, id=request.id, said="unknown"))
            return _reply(Outcome.UNKNOWN, answered=True)
        said = self._verdict(request.id)
        self.note(Checked(at=self.now_ms, id=request.id, said=said))
        if kind < 0.65:  # the answer is lost
            await asyncio.sleep(self.chance.uniform(0.1, 10))
            return _reply(reachable=False)
        if kind < 0.9:
            await asyncio.sleep(self.chance.uniform(0.1, 9))
        if said != "unknown":
            self.note(Taken(at=self.now_ms, id=request.id, said=said))
        return _reply(Outcome(said), answered=True)

    async def _fetch(self) -> None:
        """Fetch the checks of the group that fetches them, and answer them."""
        while True:
            await asyncio.sleep(self.chance.uniform(0.1, 1))
            try:
                checks = await self.world.call(self.any(), 5, "lease_checks", "pulled")
            except (HalfwayError, TimeoutError):
                continue
            for check in checks:
                said = self._verdict(check.id)
                if self.chance.random() < self.denied_checks / 2 or said == "unknown":
                    continue
                await self._end(
                    check.id, Outcome(said), self.chance.uniform(0.1, 5), check_id=check.check_id, by="check"
                )

    # --- the end

    async def _settle(self) -> None:
        """Wait until everything has ended; resume what is parked."""
        quiet_from = self.loop.now + _QUIET_S
        until = self.loop.now + LIVENESS_S
        open_: tuple[Any, ...] = ()
        was_empty = False
        while self.loop.now < until:
            await asyncio.sleep(0.5)
            try:
                page = await self.world.call(self.world.instances[0], 10, "list", ListQuery(limit=1000))
            except (HalfwayError, TimeoutError):
                continue
            open_ = tuple(one for one in page.transactions if not one.state.ended)
            for one in open_:
                if one.state is State.PARKED:
                    try:
                        await self.world.call(self.world.instances[0], 10, "resume", one.id)
                    except (HalfwayError, TimeoutError):
                        break
            if not open_:
                if was_empty and self.loop.now > quiet_from and not any(one.is_busy for one in self.world.instances):
                    return
                await asyncio.sleep(1)  # a client may only now send what it has kept
            was_empty = not open_
        self.problems.append(f"stuck: {[(one.id, one.state.value, one.last_error, one.waits) for one in open_]}")


def _reply(
    outcome: Outcome = Outcome.UNKNOWN, *, sent: bool = True, answered: bool = False, reachable: bool = True
) -> CheckReply:
    return CheckReply(outcome=outcome, sent=sent, answered=answered, reachable=reachable, detail="")


def _status(error: HalfwayError) -> int:
    return 503 if isinstance(error, RetryableError) else _STATUS.get(error.code, 400)
