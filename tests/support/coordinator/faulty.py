"""A coordinator with fault points (`tests/faults`): the same command line in the same environment."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from halfway.embedded.process import SupervisedProcess
from tests.faults.plan import Faults
from tests.support.coordinator.process import CoordinatorProcess, clean_environment, halfway_command
from tests.support.coordinator.warm_process import WarmProcess

_ROOT = Path(__file__).resolve().parents[3]
_KILLED = -9


class FaultyCoordinator(CoordinatorProcess):
    """A coordinator that does at its fault points what `faults` say."""

    def __init__(self, bootstrap_servers: str, directory: Path, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(bootstrap_servers, directory, settings)
        self.faults = Faults(directory / "faults")

    def _started(self) -> SupervisedProcess:
        settings = {"PYTHONPATH": str(_ROOT), **self.settings}
        command = halfway_command(settings, "--in", str(self.faults.directory), "serve", module="tests.faults")
        return SupervisedProcess(command, cwd=self.directory, log_path=self.log_path)

    def _forked(self) -> SupervisedProcess:
        environment = clean_environment(self.settings)
        return WarmProcess(environment, cwd=self.directory, log_path=self.log_path, faults=self.faults.directory)

    async def killed_at_its_fault(self) -> None:
        """Wait until it is dead by signal 9 at a point of the plan, which is empty from then on."""
        pid, planned = self.pid, self.faults.planned
        status = await self.exited()
        reached = self.faults.reached(acted=True)
        self.faults.clear()
        assert status == _KILLED, f"it was not killed, but ended with {status}"
        assert any(hit.pid == pid and hit.action in {"kill", "doom"} for hit in reached), (
            f"it was killed, but reached none of {planned}: {reached}"
        )


class NewFaultyCoordinator(Protocol):
    """Makes coordinators with fault points, not yet started, that end with the test."""

    def __call__(
        self, settings: Mapping[str, str] | None = None, *, bootstrap_servers: str | None = None
    ) -> FaultyCoordinator: ...
