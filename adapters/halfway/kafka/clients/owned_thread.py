"""A thread that belongs to one object."""

from __future__ import annotations

import threading
from collections.abc import Callable


class OwnedThread:
    """An object with a thread of its own, which runs from `start` until its owner ends it or it fails."""

    def __init__(self, run: Callable[[], None], name: str) -> None:
        self._thread = threading.Thread(target=run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait for the thread to end; return whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()
