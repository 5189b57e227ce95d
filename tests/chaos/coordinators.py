"""Coordinators as processes, each behind its own network, with a clock that can be set."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from halfway.embedded.broker import HOST
from halfway.embedded.process import SupervisedProcess
from tests.chaos.launcher import ClockFile
from tests.support.coordinator.process import CoordinatorProcess, halfway_command

_MISSED: Final = "halfway_missing_transactions_total{"
_UNWRITTEN: Final = "halfway_unwritten_transactions"
_KEYS_AGE: Final = "halfway_keys_age_seconds"
_BEGUN: Final = '"event": "incarnation_begun"'
_SHARD: Final = re.compile(r'"shard": (\d+), [^\n]*"event": "shard_(acquired|dropped)"')


class Instance(CoordinatorProcess):
    """One of several coordinators that share their topics."""

    def __init__(
        self, number: int, bootstrap_ports: Sequence[int], directory: Path, prefix: str, settings: Mapping[str, str]
    ) -> None:
        self.name = f"coordinator-{number}"
        self.number = number
        bootstrap = ",".join(f"{HOST}:{port}" for port in bootstrap_ports)
        super().__init__(bootstrap, directory / self.name, settings)
        self.prefix = prefix
        self.alone = False
        self.settings |= {"HALFWAY_KAFKA_PREFIX": prefix, "HALFWAY_INSTANCE_URL": self.url}
        self.clock = ClockFile(directory / self.name / "clock")

    def launch(self, **settings: str) -> None:
        assert not self.running
        self.settings |= settings
        command = halfway_command(self.settings, "serve")
        at = command.index(sys.executable)
        self._process = SupervisedProcess(
            [*command[:at], sys.executable, "-m", "tests.chaos.launcher", str(self.clock.path), "serve"],
            cwd=Path(__file__).resolve().parents[2],
            log_path=self.log_path,
        )

    def acquired(self, position: int = 0) -> set[int]:
        """Return the shards that it has acquired since its log had this length."""
        return {int(shard) for shard, what in _SHARD.findall(self.log[position:]) if what == "acquired"}

    def served(self) -> set[int]:
        """Return the shards that it serves, as its log says; none if it does not run."""
        last = dict(_SHARD.findall(self.log.rpartition(_BEGUN)[2])) if self.running else {}
        return {int(shard) for shard, what in last.items() if what == "acquired"}

    def missed(self) -> int:
        """Return how many transactions it has missed in the log since it started; 0 if it does not answer."""
        return round(sum(self._samples(_MISSED)))

    def unwritten(self) -> float | None:
        """Return how many transactions it has in memory only; None if it does not answer."""
        return next(self._samples(_UNWRITTEN), None)

    def keys_age_s(self) -> float | None:
        """Return how long ago it has read the keys, as it says itself; None if it does not answer."""
        return next(self._samples(_KEYS_AGE), None)

    def _samples(self, series: str) -> Iterator[float]:
        lines = (self._got(f"{self.health_url}/metrics") or b"").decode().splitlines()
        return (float(line.split()[-1]) for line in lines if line.startswith(series))

    def is_ready(self) -> bool:
        """Return whether it reports that it is ready."""
        return self._ready()
