"""A Spark cluster of processes on this machine: a standalone master and two workers of one core each."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import pyspark

import halfway.pipeline
from halfway.pipeline.engines.spark_session import jars
from tests.support.pipeline.fixtures import INTERPRETED, QUICK_JVM, as_options, without_spark

SPARK: Final = Path(pyspark.__file__).parent
PROGRAM: Final = Path(halfway.pipeline.__path__[0], "__main__.py")
WORKERS: Final = 2
COMMON: Final = {
    "spark.driver.memory": "512m",
    "spark.driver.extraJavaOptions": QUICK_JVM,
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": QUICK_JVM,
    "spark.eventLog.compress": "false",
    "spark.eventLog.enabled": "true",
    "spark.eventLog.rolling.enabled": "false",
    # Nothing begins before both workers have an executor.
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.ui.enabled": "false",
    "spark.pyspark.python": "/there/is/no/python",
    "spark.pyspark.driver.python": sys.executable,
    **INTERPRETED,
}
"""Settings of every job."""
PACKAGES: Final = ("--jars", ",".join(map(str, jars())))
"""What `--packages` would bring."""
_STARTED_WITHIN_S: Final = 900


class SparkCluster:
    """Start it with `with`. The workers register under their numbers, 1 and 2."""

    def __init__(self, folder: Path) -> None:
        """Take a folder for logs and the workers' files."""
        self.folder = folder
        self.events = folder / "events"
        self.told = folder / "drivers.log"
        self.master = ""
        self.workers: dict[int, subprocess.Popen[bytes]] = {}
        self._master: subprocess.Popen[bytes] | None = None
        self._drivers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        """Start the processes. What is submitted waits for the workers."""
        try:
            self._master = self._start("master", "master.Master", "--webui-port", "0")
            self.master = self._await("master", r"Starting Spark master at (spark://\S+)")[0]
            for number in range(1, WORKERS + 1):
                self.start_worker(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop everything."""
        for driver in self._drivers:
            if driver.poll() is None:
                os.killpg(driver.pid, signal.SIGKILL)
                driver.wait()
        for process in [*self.workers.values(), *([self._master] if self._master else [])]:
            process.kill()
            process.wait()

    def replace_worker(self, number: int) -> None:
        """Kill a worker with SIGKILL, and start another in its place."""
        self.workers[number].kill()
        self.workers[number].wait()
        self.start_worker(number)

    def start_worker(self, number: int) -> None:
        """Start a worker."""
        given = ("--cores", "1", "--memory", "1g", "--work-dir", str(self.folder / f"work-{number}"))
        name = f"worker-{number}"
        self.workers[number] = self._start(name, "worker.Worker", *given, "--webui-port", "0", self.master)

    def submit(
        self,
        job: Sequence[str],
        conf: Mapping[str, str],
        *,
        program: Path = PROGRAM,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Submit a job in client mode, in a process group of its own.

        Its executors have no Python.
        """
        self._await("master", "Registering worker", WORKERS)
        self.events.mkdir(exist_ok=True)
        settings = {"spark.master": self.master, "spark.eventLog.dir": self.events.as_uri(), **COMMON, **conf}
        # Into a file: a pipe that nobody reads would stop the driver.
        with self.told.open("ab") as told:
            driver = subprocess.Popen(
                [str(SPARK / "bin" / "spark-submit"), *PACKAGES, *as_options(settings), str(program), *job],
                env={**without_spark(), "SPARK_HOME": str(SPARK), "SPARK_LOCAL_IP": "127.0.0.1", **(env or {})},
                stdout=told,
                stderr=told,
                start_new_session=True,
            )
        self._drivers.append(driver)
        return driver

    def await_stage(self, since: float = 0) -> None:
        """Wait until the application that runs has completed a stage that it submitted after a time in ms."""
        deadline = time.monotonic() + _STARTED_WITHIN_S
        while not any(_completed_stage(log, since) for log in self.events.glob("*.inprogress")):
            if time.monotonic() > deadline:
                raise RuntimeError("no stage of an application was completed")
            time.sleep(0.2)

    def applications(self) -> "list[Application]":
        """Return what is known of each application, in the order of their starts."""
        return [Application(file) for file in sorted(self.events.iterdir()) if not file.name.endswith(".inprogress")]

    def _start(self, name: str, of: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [str(SPARK / "bin" / "spark-class"), f"org.apache.spark.deploy.{of}", "--host", "127.0.0.1"]
        environment = {
            **without_spark(),
            "SPARK_HOME": str(SPARK),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": QUICK_JVM,
        }
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen([*command, "--port", "0", *arguments], env=environment, stdout=log, stderr=log)

    def _await(self, name: str, pattern: str, count: int = 1) -> list[str]:
        log, deadline = self.folder / f"{name}.log", time.monotonic() + _STARTED_WITHIN_S
        while len(found := re.findall(pattern, log.read_text())) < count:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{name} of the Spark cluster did not start:\n{log.read_text()[-4000:]}")
            time.sleep(0.05)
        return found


def _completed_stage(log: Path, since: float) -> bool:
    """Return whether an event log has a completed stage. It is asked often, and most events are large plans."""
    with log.open() as events:
        # The last line of a log that is written may not be whole.
        lines = [line for line in events if '"SparkListenerStageCompleted"' in line and line.endswith("\n")]
    return any(json.loads(line)["Stage Info"]["Submission Time"] >= since for line in lines)


class Application:
    """An application as its event log shows it."""

    def __init__(self, log: Path) -> None:
        self.events: list[dict[str, Any]] = [json.loads(line) for line in log.read_text().splitlines()]

    @property
    def settings(self) -> dict[str, str]:
        """The settings of the application as a whole."""
        [environment] = self._of("EnvironmentUpdate")
        return dict(environment["Spark Properties"])

    @property
    def lost_executors(self) -> int:
        """The number of executors that went away before the end."""
        return len(self._of("ExecutorRemoved"))

    def workers(self, since: float, until: float) -> Counter[str]:
        """Return the number of tasks that ended well between two times, by the worker's own address.

        It is `driver` for those on no worker.
        """
        of_executor = {
            each["Executor ID"]: each["Executor Info"]["Log Urls"]["stdout"].partition("/logPage")[0]
            for each in self._of("ExecutorAdded")
        }
        tasks = [each["Task Info"] for each in self._of("TaskEnd")]
        return Counter(
            of_executor.get(task["Executor ID"], "driver")
            for task in tasks
            if not task["Failed"] and since <= task["Finish Time"] <= until
        )

    @property
    def executors_that_computed(self) -> set[str]:
        """The ids of the executors that have completed a task."""
        return {each["Task Info"]["Executor ID"] for each in self._of("TaskEnd") if not each["Task Info"]["Failed"]}

    def _of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["Event"] == f"SparkListener{kind}"]
