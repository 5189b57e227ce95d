"""Finds from where a recovery must read op[s] to know the outcomes that its former owner remembered."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from halfway.domain.shard import ShardState

_SAMPLES: Final = 60
"""The number of samples in one horizon."""


class OutcomeWindow:
    """The position that op[s] had one outcome horizon ago. It goes by the monotonic clock, while the shard is served.

    A recovery that reads from there knows each outcome that this owner remembered last, however long the outage
    lasted: a late half of it may be in the log already, and would be taken for a new transaction.
    """

    def __init__(self, state: ShardState, horizon_s: float) -> None:
        """Start where the fold of the acquisition has started."""
        self._state = state
        self._horizon_s = horizon_s
        self._start = state.op_start
        self._samples: deque[tuple[float, int]] = deque(maxlen=2 * _SAMPLES)
        """Times on the monotonic clock, and how far op[s] was known then."""

    def start(self, now: float) -> int:
        """Return the offset. It stays while there are strays, whose outcomes must be known until they are corrected."""
        if not self._samples:
            self._samples.append((now - self._horizon_s, self._state.op_recent))
        if now >= self._samples[-1][0] + self._horizon_s / _SAMPLES:
            self._samples.append((now, self._state.op_tail))
        if not self._state.has_strays:
            while len(self._samples) > 1 and self._samples[0][0] <= now - self._horizon_s:
                self._start = max(self._start, self._samples.popleft()[1])
        return self._start
