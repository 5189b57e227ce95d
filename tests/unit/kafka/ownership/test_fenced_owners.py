"""An incarnation fences each former owner once, for all shards that it acquires concurrently."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from halfway.kafka.ownership.former_owners import FencedOwners

LONG_S = 30.0


def test_it_is_fenced_once_however_many_ask() -> None:
    fences, calls, go = FencedOwners("me"), list[str](), threading.Event()

    def fence() -> None:
        calls.append("fence")
        assert go.wait(LONG_S)

    with ThreadPoolExecutor(4) as pool:
        attempts = [pool.submit(fences.once, "former", fence, lambda: None) for _ in range(4)]
        go.set()
        for attempt in attempts:
            attempt.result(LONG_S)
    fences.once("former", fence, lambda: None)
    assert calls == ["fence"]
    assert "former" in fences
    assert "me" in fences
    assert "other" not in fences


def test_a_fence_that_fails_is_tried_again_by_the_next() -> None:
    """Acquisitions that wait for it fail too."""
    fences, started, go = FencedOwners("me"), threading.Event(), threading.Event()

    def fail() -> None:
        started.set()
        assert go.wait(LONG_S)
        raise TimeoutError("no answer")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(fences.once, "former", fail, lambda: None)
        assert started.wait(LONG_S)
        second = pool.submit(fences.once, "former", lambda: None, go.set)
        for call in (first, second):
            with pytest.raises(TimeoutError, match="no answer"):
                call.result(LONG_S)
    assert "former" not in fences
    fences.once("former", lambda: None, lambda: None)
    assert "former" in fences


def test_who_waits_for_another_fence_may_give_up() -> None:
    fences, started, go = FencedOwners("me"), threading.Event(), threading.Event()

    def hang() -> None:
        started.set()
        assert go.wait(LONG_S)

    def give_up() -> None:
        raise RuntimeError("no longer wanted")

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(fences.once, "former", hang, lambda: None)
        assert started.wait(LONG_S)
        with pytest.raises(RuntimeError):
            fences.once("former", lambda: None, give_up)
        go.set()
        first.result(LONG_S)
    assert "former" in fences
