"""What a process and its descendants use: a JVM that outlives its Python by a moment is waited for by nobody."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Final, Self

import psutil

_LOOK_S: Final = 0.25


class Watch:
    """A context manager that looks at a process and its descendants a few times a second.

    `cpu_s`: user and system time of all of them so far, as last seen. `memory_bytes`: what they hold now, pages that
    forked processes share counted once, with their parent; `peak_bytes`: the most that was seen.
    """

    def __init__(self, pid: int) -> None:
        """Take the first one's id."""
        self._root = psutil.Process(pid)
        self._over = threading.Event()
        self._cpu_s: dict[psutil.Process, float] = {}
        self._thread = threading.Thread(target=self._run, daemon=True, name="watch")
        self.memory_bytes = 0
        self.peak_bytes = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    @property
    def cpu_s(self) -> float:
        """Seconds of CPU so far."""
        return sum(self._cpu_s.copy().values())

    def _run(self) -> None:
        while not self._over.wait(_LOOK_S):
            self._look()

    def _look(self) -> None:
        try:
            family = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        held = 0
        for process in family:
            try:
                with process.oneshot():
                    used, memory = process.cpu_times(), process.memory_info()
            except psutil.NoSuchProcess:
                continue
            # One that was begun just now can still have all the memory of its parent: so Java starts processes.
            if process in self._cpu_s:
                held += memory.rss - memory.shared
            self._cpu_s[process] = used.user + used.system
        self.memory_bytes = held
        self.peak_bytes = max(self.peak_bytes, held)
