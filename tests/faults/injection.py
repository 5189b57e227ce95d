"""The coordinator's side: wraps the methods of the table, and does what the plan says where a point is reached."""

import asyncio
import functools
import importlib
import inspect
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from confluent_kafka import KafkaError, KafkaException

from tests.faults.plan import Fault, Faults, Reached
from tests.faults.points import STEPS

_LOOK_AGAIN_S = 0.01
_INITIALISE_S = 20.0


class FaultError(Exception):
    """Raised at a fault point."""


class StepLeftOut(BaseException):
    """Tells the wrapper of a step not to take it."""


class Injection:
    """The plan as it stands, and the count of hits since it came."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._lock = threading.Lock()
        self._seen: tuple[int, int] | None = None
        self._planned: list[Fault] = []
        self._hits: Counter[int] = Counter()

    def install(self) -> None:
        """Wrap every step of the table."""
        for step, (module, qualified_name) in STEPS.items():
            owner, name = resolve(module, qualified_name)
            setattr(owner, name, self._wrapped(step, getattr(owner, name)))

    def _wrapped(self, step: str, original: Callable[..., Any]) -> Callable[..., Any]:
        before, after = f"{step}.before", f"{step}.after"

        @functools.wraps(original)
        def plain(*args: Any, **fields: Any) -> Any:
            try:
                for seconds in self._pass(before, args):
                    time.sleep(seconds)
            except StepLeftOut:
                return None
            result = original(*args, **fields)
            for seconds in self._pass(after, args):
                time.sleep(seconds)
            return result

        @functools.wraps(original)
        async def coroutine(*args: Any, **fields: Any) -> Any:
            for seconds in self._pass(before, args):
                await asyncio.sleep(seconds)
            result = await original(*args, **fields)
            for seconds in self._pass(after, args):
                await asyncio.sleep(seconds)
            return result

        return coroutine if inspect.iscoroutinefunction(original) else plain

    def _pass(self, point: str, args: Sequence[Any]) -> Iterator[float]:
        """Do what is due at a point; yields the seconds to wait, which the caller does in its own way."""
        for fault in self._due(point):
            yield from self._act(fault, args)

    def _due(self, point: str) -> list[Fault]:
        """Count and write down a hit; the faults that act at it."""
        thread = threading.current_thread().name
        due: list[Fault] = []
        with self._lock:
            self._refresh()
            for number, fault in enumerate(self._planned):
                if fault.point != point or not thread.startswith(fault.thread):
                    continue
                self._hits[number] += 1
                acts = fault.acts_at(self._hits[number])
                self._note(fault, self._hits[number], thread, acts=acts)
                if acts:
                    due.append(fault)
        return due

    def _refresh(self) -> None:
        try:
            found = self._faults.plan_path.stat()
        except FileNotFoundError:
            return
        seen = (found.st_ino, found.st_mtime_ns)
        if seen != self._seen:
            self._seen = seen
            self._planned = msgspec.json.decode(self._faults.plan_path.read_bytes(), type=list[Fault])
            self._hits.clear()

    def _note(self, fault: Fault, hit: int, thread: str, *, acts: bool) -> None:
        line = Reached(
            point=fault.point,
            hit=hit,
            action=fault.action if acts else None,
            pid=os.getpid(),
            thread=thread,
            at_ms=time.time_ns() // 1_000_000,
        )
        file = os.open(self._faults.reached_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, msgspec.json.encode(line) + b"\n")
            os.fsync(file)
        finally:
            os.close(file)

    def _act(self, fault: Fault, args: Sequence[Any]) -> Iterator[float]:
        """Do what a fault says; yields the seconds to wait."""
        match fault.action:
            case "pause":
                while not self._faults.release_path.exists():
                    yield _LOOK_AGAIN_S
            case "delay":
                yield fault.seconds
            case "kill":
                if fault.seconds:
                    yield fault.seconds
                _kill()
            case _:
                _do(fault, args)


def _do(fault: Fault, args: Sequence[Any]) -> None:
    """Do what takes no time."""
    match fault.action:
        case "doom":
            threading.Thread(target=_kill, args=(fault.seconds,), name="doom", daemon=True).start()
        case "fail":
            raise _error(fault)
        case "skip":
            raise StepLeftOut
        case "initialise":
            producer, config = args[:2]
            producer.__init__(config, producer.transactional_id)
            producer.initialise(time.monotonic() + _INITIALISE_S)


def resolve(module: str, qualified_name: str) -> tuple[Any, str]:
    """Give what holds a function, and its name there; AttributeError where there is no such function."""
    *path, name = qualified_name.split(".")
    owner: Any = importlib.import_module(module)
    for part in path:
        owner = getattr(owner, part)
    if not inspect.isfunction(inspect.getattr_static(owner, name)):
        raise AttributeError(f"{module}.{qualified_name} is no function")
    return owner, name


def _kill(after_s: float = 0.0) -> None:
    time.sleep(after_s)
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # the signal ends the process before this returns


def _error(fault: Fault) -> Exception:
    if fault.code is None:
        return FaultError(fault.point)
    return KafkaException(
        KafkaError(
            fault.code,
            f"fault at {fault.point}",
            fatal=fault.fatal,
            retriable=fault.retriable,
            txn_requires_abort=fault.txn_requires_abort,
        )
    )
