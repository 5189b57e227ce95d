"""The CPU and memory of a process and its descendants, including a JVM that briefly outlives its Python process."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Final, Self

import psutil

_SAMPLE_S: Final = 0.25


class Watch:
    """A context manager that samples a process and its descendants a few times per second.

    `cpu_s`: user and system time of all of them so far. `memory_bytes`: their current memory, in which pages that
    forked processes share count once, for the parent. `peak_bytes`: the highest sample.
    """

    def __init__(self, pid: int) -> None:
        """Keep the id of the first process."""
        self._root = psutil.Process(pid)
        self._stopped = threading.Event()
        self._cpu_s: dict[psutil.Process, float] = {}
        self._thread = threading.Thread(target=self._run, daemon=True, name="watch")
        self.memory_bytes = 0
        self.peak_bytes = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stopped.set()
        self._thread.join()

    @property
    def cpu_s(self) -> float:
        """CPU time so far, in seconds."""
        return sum(self._cpu_s.copy().values())

    def _run(self) -> None:
        while not self._stopped.wait(_SAMPLE_S):
            self._sample()

    def _sample(self) -> None:
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
            # A process that has just started may still share all memory of its parent, as Java starts processes.
            if process in self._cpu_s:
                held += memory.rss - memory.shared
            self._cpu_s[process] = used.user + used.system
        self.memory_bytes = held
        self.peak_bytes = max(self.peak_bytes, held)
