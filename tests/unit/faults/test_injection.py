"""What a plan says is done at its points, at the hits that it names, and every hit is written down first."""

import asyncio
import sys
import threading
import types
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException

from tests.faults import injection, plan
from tests.faults.injection import FaultError, Injection
from tests.faults.plan import Fault, Faults


class Work:
    """Stands for a part of the product."""

    def __init__(self) -> None:
        self.done = 0

    def step(self) -> int:
        self.done += 1
        return self.done

    async def wait(self) -> int:
        self.done += 1
        return self.done


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Give faults of which `Work` is the product."""
    module = types.ModuleType("work")
    module.Work = Work  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "work", module)
    for name in ("step", "wait"):
        monkeypatch.setattr(Work, name, getattr(Work, name))  # put back afterwards
    monkeypatch.setattr(injection, "STEPS", {"step": ("work", "Work.step"), "wait": ("work", "Work.wait")})
    points = [f"{step}.{when}" for step in ("step", "wait") for when in ("before", "after")]
    monkeypatch.setattr(plan, "POINTS", dict.fromkeys(points))
    faults = Faults(tmp_path / "faults")
    Injection(faults).install()
    return faults


def test_a_fault_acts_at_its_hits_alone_and_every_hit_is_written_down(faults: Faults) -> None:
    """The second and third call fail before they do anything; the plan can change meanwhile."""
    work = Work()
    work.step()
    faults.plan(Fault(point="step.before", action="fail", hit=2, times=2))
    assert work.step() == 2
    for _ in range(2):
        with pytest.raises(FaultError):
            work.step()
    assert work.step() == 3
    assert [(hit.hit, hit.action) for hit in faults.reached()] == [(1, None), (2, "fail"), (3, "fail"), (4, None)]
    faults.clear()
    assert work.step() == 4
    assert len(faults.reached()) == 4


def test_after_means_that_the_step_was_done(faults: Faults) -> None:
    """And what is raised can be an error of Kafka's."""
    work = Work()
    faults.plan(Fault(point="step.after", action="fail", code=KafkaError._TIMED_OUT, retriable=True))
    with pytest.raises(KafkaException) as raised:
        work.step()
    assert raised.value.args[0].retriable()
    assert work.done == 1


def test_a_pause_lasts_until_it_is_released(faults: Faults) -> None:
    """On a thread that the plan names; others pass."""
    work = Work()
    faults.plan(Fault(point="step.before", action="pause", thread="paused"))
    assert work.step() == 1
    thread = threading.Thread(target=work.step, name="paused-1")
    thread.start()
    assert [hit.thread for hit in faults.until_reached("step.before")] == ["paused-1"]
    assert work.done == 1
    faults.release()
    thread.join(30)
    assert work.done == 2


async def test_a_coroutine_waits_without_holding_up_its_loop(faults: Faults) -> None:
    """Others go on while it pauses."""
    work = Work()
    faults.plan(Fault(point="wait.after", action="pause"))
    waiting = asyncio.create_task(work.wait())
    await asyncio.to_thread(faults.until_reached, "wait.after")
    assert not waiting.done()
    faults.release()
    assert await waiting == 1


def test_a_point_that_is_not_in_the_table_cannot_be_planned(faults: Faults) -> None:
    """Else a test would wait for nothing."""
    with pytest.raises(AssertionError, match=r"step\.beside"):
        faults.plan(Fault(point="step.beside"))
