"""The measured system: a broker and a coordinator, each in its own process, and the processes of the load."""

from __future__ import annotations

import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from http import HTTPStatus
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Self, TypeVar

import msgspec
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined] # public, but not for mypy

from bench.audit.load_audit import Auditor
from bench.figures import metric
from bench.plan import GROUP, PARTITIONS, SHARDS, TOPIC
from halfway.embedded import EmbeddedConfig, EmbeddedKafka
from halfway.embedded.ports import HOST, pick_port
from halfway.embedded.process import SupervisedProcess

READY_S: Final = 60.0
STOP_S: Final = 45.0
_REQUEST_S: Final = 30.0
_POLL_S: Final = 0.05
_SHOWN: Final = 4_000
_ROOT: Final = Path(__file__).resolve().parents[2]

_PULL: Final[Mapping[str, Any]] = {"mode": "pull"}

R = TypeVar("R")


class RigError(Exception):
    """The benchmark cannot continue, for the reason in the message."""


class Rig:
    """A context manager that starts everything, and always stops it at the end.

    `bootstrap_servers`: those of a running broker; None starts one. `settings`: environment variables of the
    coordinator, which override those of the benchmark. `python`: the interpreter that runs the measured `halfway`.
    """

    def __init__(
        self,
        *,
        say: Callable[[str], None],
        bootstrap_servers: str | None = None,
        settings: Mapping[str, str] | None = None,
        name: str = "bench",
        python: Path = Path(sys.executable),
    ) -> None:
        """Keep the options; nothing starts yet."""
        self._say = say
        self._python = python
        self._external_servers = bootstrap_servers
        self._settings = settings or {}
        self._name = name
        self._stack = ExitStack()
        self._jobs = count(1)
        self.broker_pid: int | None = None
        self.prefix = f"_{name}."
        self.topic = TOPIC if name == "bench" else f"{name}.orders"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.directory = Path(stack.enter_context(TemporaryDirectory(prefix="halfway-bench-")))
            self.bootstrap_servers = self._external_servers or self._broker(stack)
            self._create_topic()
            self._say("the coordinator starts")
            self._coordinator(stack)
            self._register()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._say("everything is stopped")
        self._stack.close()

    # --- the parts

    def _broker(self, stack: ExitStack) -> str:
        self._say("the broker starts")
        kafka = stack.enter_context(EmbeddedKafka(EmbeddedConfig(heap="1g", progress=self._say)))
        self.broker_pid = kafka.pid
        return kafka.bootstrap_servers

    def _create_topic(self) -> None:
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers})
        topics = [NewTopic(self.topic, num_partitions=PARTITIONS, replication_factor=1)]
        for created in admin.create_topics(topics, operation_timeout=_REQUEST_S, request_timeout=_REQUEST_S).values():
            try:
                created.result(_REQUEST_S)
            except KafkaException as error:  # an earlier run on the same broker created it
                if error.args[0].name() != "TOPIC_ALREADY_EXISTS":
                    raise

    def _coordinator(self, stack: ExitStack) -> None:
        self.port = pick_port()
        self._health = pick_port({self.port})
        settings = {
            "HALFWAY_KAFKA__BOOTSTRAP_SERVERS": self.bootstrap_servers,
            "HALFWAY_KAFKA_PREFIX": self.prefix,
            "HALFWAY_SHARDS": str(SHARDS),
            "HALFWAY_HOST": HOST,
            "HALFWAY_PORT": str(self.port),
            "HALFWAY_HEALTH_HOST": HOST,
            "HALFWAY_HEALTH_PORT": str(self._health),
            **self._settings,
        }
        cleared = [word for name in os.environ if name.startswith("HALFWAY_") for word in ("-u", name)]
        variables = [f"{name}={value}" for name, value in settings.items()]
        log = self.directory / "coordinator.log"
        command = ["env", *cleared, *variables, str(self._python), "-m", "halfway.runtime.cli", "serve"]
        process = SupervisedProcess(command, cwd=self.directory, log_path=log)
        stack.callback(_stop, process)
        self.coordinator_pid = process.pid
        deadline = time.monotonic() + READY_S
        while not self._ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RigError(f"the coordinator did not become ready:\n{log.read_text(errors='replace')[-_SHOWN:]}")
            time.sleep(_POLL_S)

    def _ready(self) -> bool:
        try:
            return bool(_call(f"http://{HOST}:{self._health}/health/ready"))
        except (urllib.error.URLError, OSError):
            return False

    def _register(self) -> None:
        self.register()

    # --- calls

    def register(
        self, name: str = GROUP, *, check: Mapping[str, Any] = _PULL, policy: Mapping[str, float] | None = None
    ) -> None:
        """Register a group; `check` and `policy` are the members of the REST body."""
        body = msgspec.json.encode({"check": check, "topics": [self.topic], "policy": policy or {}})
        _call(f"http://{HOST}:{self.port}/v1/groups/{name}", method="PUT", body=body)

    @property
    def pids(self) -> dict[str, int]:
        """The processes whose CPU time is measured."""
        broker = {} if self.broker_pid is None else {"broker": self.broker_pid}
        return {"coordinator": self.coordinator_pid, **broker}

    def auditor(self) -> Auditor:
        """Return an auditor of everything that is written from now on."""
        return Auditor(self.bootstrap_servers, prefix=self.prefix, topic=self.topic)

    def lane(self) -> tuple[int, int, int]:
        """Return the number of the lane's Kafka transactions so far, of the ends in them, and how often it was lost."""
        names = ("halfway_lane_batch_ends_count", "halfway_lane_batch_ends_sum", "halfway_lane_failures_total")
        count, ends, lost = self.metrics(*names)
        return round(count), round(ends), round(lost)

    def metrics(self, *names: str) -> list[float]:
        """Return metrics, each summed over its labels."""
        text = _call(f"{self.health_url}/metrics").decode()
        return [metric(text, name) for name in names]

    @property
    def health_url(self) -> str:
        """The URL of the health port."""
        return f"http://{HOST}:{self._health}"

    def pending(self, at_most: int) -> list[str]:
        """Return ids of pending transactions."""
        answer = _call(f"http://{HOST}:{self.port}/v1/transactions?state=prepared&group={GROUP}&limit={at_most}")
        return [str(transaction["id"]) for transaction in msgspec.json.decode(answer)["transactions"]]

    def roll_back(self, ids: Sequence[str]) -> None:
        """Roll back all of these transactions."""
        body = msgspec.json.encode({"end": [{"id": name, "outcome": "rollback"} for name in ids]})
        answer = msgspec.json.decode(_call(f"http://{HOST}:{self.port}/v1/batch", method="POST", body=body))
        failed = [item for item in answer["end"] if item["status"] != HTTPStatus.OK]
        if failed:
            raise RigError(f"{len(failed)} rollbacks failed, the first: {failed[0]}")

    def run(
        self, module: str, plan: Any, result: type[R], *, within_s: float, meanwhile: Callable[[], None] | None = None
    ) -> R:
        """Run `python -m <module>` with a plan and return its result; `meanwhile` is called every second."""
        stem = self.directory / f"{next(self._jobs)}-{module}"
        plan_path, result_path, log_path = (stem.with_name(f"{stem.name}.{kind}") for kind in ("plan", "result", "log"))
        plan_path.write_bytes(msgspec.json.encode(plan))
        process = SupervisedProcess(
            [sys.executable, "-m", module, str(plan_path), str(result_path)], cwd=_ROOT, log_path=log_path
        )
        try:
            deadline = time.monotonic() + within_s
            while (status := process.wait(1.0)) is None:
                if time.monotonic() > deadline:
                    raise RigError(f"{module} did not end in time")
                if meanwhile is not None:
                    meanwhile()
        finally:
            process.kill()
        if status:
            raise RigError(f"{module} ended with {status}:\n{log_path.read_text(errors='replace')[-_SHOWN:]}")
        return msgspec.json.decode(result_path.read_bytes(), type=result)


def _stop(process: SupervisedProcess) -> None:
    process.terminate()
    if process.wait(STOP_S) is None:
        process.kill()


def _call(url: str, *, method: str = "GET", body: bytes | None = None) -> bytes:
    headers = {"Content-Type": "application/json"} if body is not None else {}
    request = urllib.request.Request(url, data=body, method=method, headers=headers)  # noqa: S310 - our own processes
    with urllib.request.urlopen(request, timeout=_REQUEST_S) as answer:  # noqa: S310 - the same
        return bytes(answer.read())
