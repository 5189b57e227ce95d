"""How long ago something was, also if this machine was suspended in between."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Instant:
    """A moment on both clocks: the monotonic one stops while a machine is suspended, the other one can be set back."""

    monotonic: float
    wall: float

    @classmethod
    def now(cls) -> Instant:
        """Return the present moment."""
        return cls(monotonic=time.monotonic(), wall=time.time())

    @property
    def age_s(self) -> float:
        """How long ago it was, at most: a clock that is set forward makes it older."""
        return max(time.monotonic() - self.monotonic, time.time() - self.wall)
