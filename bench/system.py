"""The measured system: a broker, coordinators of one cluster, and the processes of a load."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any, Final, Self, TypeVar

import msgspec
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined] # public, but not for mypy

from bench.audit import Auditor
from bench.figures import Say, metric, percentile
from bench.plan import GROUP, PARTITIONS, SHARDS
from halfway.embedded import EmbeddedConfig, EmbeddedKafka
from halfway.embedded.broker import HOST, pick_port
from halfway.embedded.process import SupervisedProcess
from tests.chaos.brokers import BrokerCluster

ROOT: Final = Path(__file__).resolve().parents[1]
READY_S: Final = 120.0
STOP_S: Final = 45.0
SPARE_S: Final = 180.0
"""Time that something may need besides its plan: a start, connections, and the transactions under way at its end."""
_REQUEST_S: Final = 30.0
_POLL_S: Final = 0.02
_SHOWN: Final = 4_000

R = TypeVar("R")


class RigError(Exception):
    """The benchmark cannot continue, for the reason in the message."""


class Broker(msgspec.Struct, frozen=True):
    """The brokers; the CPU time and the logs of those that run already are not measured."""

    bootstrap_servers: str
    pids: tuple[int, ...] = ()
    data_dir: Path | None = None

    def log_bytes(self) -> Counter[str]:
        """Return the bytes of the logs of each topic, without the parts of its name that differ between runs."""
        bytes_of: Counter[str] = Counter()
        for path in self.data_dir.glob("data/*/*.log") if self.data_dir else ():
            bytes_of[path.parent.name.rpartition("-")[0].rpartition(".")[2]] += path.stat().st_size
        return bytes_of

    def create_topic(self, name: str, partitions: int = PARTITIONS, **config: str) -> None:
        """Create a topic, unless an earlier run has, and wait until its partitions have leaders."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})
        try:
            new = NewTopic(name, partitions, config=config)
            admin.create_topics([new], request_timeout=_REQUEST_S)[name].result(_REQUEST_S)
        except KafkaException as error:
            if error.args[0].name() != "TOPIC_ALREADY_EXISTS":
                raise

        until(
            lambda: list(admin.list_topics(name, timeout=_REQUEST_S).topics[name].partitions.values()),
            lambda found: found and all(one.leader >= 0 for one in found),
            "the topic has no leaders",
        )

    def delete_topics(self, prefix: str) -> None:
        """Delete the topics whose names begin so."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})
        topics = [name for name in admin.list_topics(timeout=_REQUEST_S).topics if name.startswith(prefix)]
        for deleted in admin.delete_topics(topics).values() if topics else ():
            deleted.result(_REQUEST_S)


@contextmanager
def broker(say: Say, bootstrap_servers: str | None, *, three: bool) -> Iterator[Broker]:
    """Start one broker, or three with a replica of each topic, unless some are given."""
    if bootstrap_servers is not None:
        yield Broker(bootstrap_servers)
    elif three:
        say("three brokers start")
        with TemporaryDirectory() as folder, BrokerCluster(Path(folder), heap="512m") as cluster:
            yield Broker(cluster.bootstrap_servers, tuple(one.pid for one in cluster.brokers))
    else:
        say("the broker starts")
        with EmbeddedKafka(EmbeddedConfig(heap="1g", progress=say)) as kafka:
            yield Broker(kafka.bootstrap_servers, (kafka.pid,), kafka.data_dir)


class Instance:
    """`halfway serve` as a process, called over HTTP; it is always killed at the end.

    `python` is the interpreter whose environment has the measured `halfway`. `faults` is the directory of a plan of
    faults (`tests/faults`); such an instance is of this version.
    """

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, str],
        python: Path = Path(sys.executable),
        faults: Path | None = None,
    ) -> None:
        """Start it."""
        self.port = pick_port()
        self.health_port = pick_port({self.port})
        self.url = f"http://{HOST}:{self.port}"
        self.log = directory / f"coordinator-{self.port}.log"
        own = {
            "HALFWAY_HOST": HOST,
            "HALFWAY_PORT": str(self.port),
            "HALFWAY_HEALTH_HOST": HOST,
            "HALFWAY_HEALTH_PORT": str(self.health_port),
            "HALFWAY_INSTANCE_URL": self.url,
            "HALFWAY_PEER_CREDENTIAL": "bench-bench-bench",
            **settings,
        }
        command = [str(python.parent / "halfway"), "serve"]  # another version may have other modules
        if python == Path(sys.executable):
            command = [str(python), "-m", "halfway.app.cli", "serve"]
        if faults is not None:
            own["PYTHONPATH"] = str(ROOT)
            command = [str(python), "-m", "tests.faults", "--in", str(faults), "serve"]
        cleared = [word for name in os.environ if name.startswith("HALFWAY_") for word in ("-u", name)]
        variables = [f"{name}={value}" for name, value in own.items()]
        self.started = time.monotonic()
        self.process = SupervisedProcess(["env", *cleared, *variables, *command], cwd=directory, log_path=self.log)
        self.pid = self.process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()

    def ready(self, within_s: float = READY_S) -> float:
        """Wait until it is ready; return the seconds since its start."""
        while True:
            with suppress(OSError, HTTPException):
                if self.ask("GET", "/health/ready", health=True)[0] == HTTPStatus.OK:
                    return time.monotonic() - self.started
            if self.process.poll() is not None or time.monotonic() - self.started > within_s:
                shown = self.log.read_text(errors="replace")[-_SHOWN:]
                raise RigError(f"the coordinator did not become ready:\n{shown}")
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Shut it down."""
        self.process.terminate()
        if self.process.wait(STOP_S) is None:
            raise RigError("the coordinator does not stop")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the log entries of an event."""
        return [line for line in map(_decoded, self.log.read_bytes().splitlines()) if line.get("event") == name]

    def ask(
        self, method: str, path: str, body: Any = None, *, health: bool = False, timeout_s: float = _REQUEST_S
    ) -> tuple[int, bytes]:
        """Send one request on a new connection; return status and body."""
        connection = HTTPConnection(HOST, self.health_port if health else self.port, timeout=timeout_s)
        try:
            headers = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else msgspec.json.encode(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def metrics(self) -> str:
        """Return its metrics as text; empty if it does not answer."""
        try:
            return self.ask("GET", "/metrics", health=True)[1].decode()
        except (OSError, HTTPException):
            return ""

    def metric(self, name: str) -> float:
        """Return a metric, summed over its labels."""
        return metric(self.metrics(), name)

    def served(self) -> set[int]:
        """Return the shards that it serves."""
        lines = [line for line in self.metrics().splitlines() if line.startswith("halfway_pending{")]
        return {int(line.partition('shard="')[2].partition('"')[0]) for line in lines}

    def register(
        self,
        topic: str,
        group: str = GROUP,
        *,
        check: Mapping[str, Any] | None = None,
        policy: Mapping[str, float] | None = None,
    ) -> None:
        """Register a group; `check` and `policy` are the members of the REST body."""
        body = {"check": check or {"mode": "pull"}, "topics": [topic], "policy": policy or {}}
        status, answer = self.ask("PUT", f"/v1/groups/{group}", body)
        if status not in (HTTPStatus.OK, HTTPStatus.CREATED):
            raise RigError(f"the group was not registered: {status} {answer!r}")

    def transact(self, topic: str, times: list[float] | None = None) -> bool:
        """Prepare and commit one transaction; the time of the prepare is added to `times`."""
        started = time.monotonic()
        message = {"topic": topic, "key": "k", "value": "v"}
        status, answer = self.ask("POST", "/v1/transactions", {"group": GROUP, "messages": [message]})
        if times is not None:
            times.append(time.monotonic() - started)
        if status != HTTPStatus.CREATED:
            return False
        path = f"/v1/transactions/{msgspec.json.decode(answer)['id']}/end"
        return self.ask("POST", path, {"outcome": "commit"})[0] == HTTPStatus.OK

    def probe(self, path: str = "/health/live") -> Callable[[], bool | None]:
        """Return a probe of the health port; calls before the port is first open do not count."""
        opened = False

        def once() -> bool | None:
            nonlocal opened
            try:
                answered = self.ask("GET", path, health=True)[0] == HTTPStatus.OK
            except ConnectionRefusedError:
                return False if opened else None
            opened = True
            return answered

        return once


def _decoded(line: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.MsgspecError:
        return {}


class Rig:
    """A context manager for coordinators of one cluster on a broker, their topic and group, and a load's processes.

    `settings`: environment variables of the coordinators. `python`: see `Instance`. `instances`: those that start with
    the block.
    """

    def __init__(
        self,
        kafka: Broker,
        name: str,
        *,
        settings: Mapping[str, str] | None = None,
        python: Path = Path(sys.executable),
        instances: int = 1,
        shards: int = SHARDS,
    ) -> None:
        """Keep the options; nothing starts yet."""
        self.broker = kafka
        self.shards = shards
        self.prefix = f"_{name}."
        self.topic = f"{name}.orders"
        self.instances: list[Instance] = []
        self._python = python
        self._count = instances
        self._settings = {
            "HALFWAY_KAFKA__BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
            "HALFWAY_KAFKA_PREFIX": self.prefix,
            "HALFWAY_SHARDS": str(shards),
            **(settings or {}),
        }
        self._stack = ExitStack()
        self._jobs = count(1)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.directory = Path(stack.enter_context(TemporaryDirectory(prefix="halfway-bench-")))
            self.broker.create_topic(self.topic)
            self._stack = stack
            self.start(self._count)
            if self.instances:
                self.owners()
                self.first.register(self.topic)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for instance in self.instances:
            instance.process.terminate()
        for instance in self.instances:
            instance.process.wait(STOP_S)
        self._stack.close()

    # --- instances

    @property
    def first(self) -> Instance:
        """The first instance, which is the only one in most scenarios."""
        return self.instances[0]

    def launch(self, *, faults: Path | None = None) -> Instance:
        """Start another instance and return at once."""
        instance = self._stack.enter_context(Instance(self.directory, self._settings, self._python, faults))
        self.instances.append(instance)
        return instance

    def start(self, number: int) -> None:
        """Start so many instances at once, and wait until all are ready."""
        for instance in [self.launch() for _ in range(number)]:
            instance.ready()

    def owners(self) -> list[Instance]:
        """Wait until the instances serve equal shares of the shards, and return the owner of each shard."""

        def even(found: list[set[int]]) -> bool:
            sizes = [len(shards) for shards in found]
            return sum(sizes) == self.shards and len(set().union(*found)) == self.shards and max(sizes) - min(sizes) < 2  # noqa: PLR2004

        found = until(lambda: [one.served() for one in self.instances], even, "the shards are not distributed evenly")
        of = {shard: instance for instance, shards in zip(self.instances, found, strict=True) for shard in shards}
        return [of[shard] for shard in range(self.shards)]

    @property
    def pids(self) -> dict[str, int]:
        """The processes whose CPU time is measured; coordinators by their numbers."""
        kafka = {f"broker {number}": pid for number, pid in enumerate(self.broker.pids)}
        return {**{str(number): instance.pid for number, instance in enumerate(self.instances)}, **kafka}

    def metrics(self, *names: str) -> list[float]:
        """Return metrics, each summed over its labels and the instances."""
        texts = [instance.metrics() for instance in self.instances]
        return [sum(metric(text, name) for text in texts) for name in names]

    # --- the load

    def auditor(self) -> Auditor:
        """Return an auditor of everything that is written from now on."""
        return Auditor(self.broker.bootstrap_servers, prefix=self.prefix, topic=self.topic)

    def run(self, module: str, plan: Any, result: type[R], *, within_s: float) -> R:
        """Run `python -m <module>` with a plan and return its result."""
        job = Job(self.directory / f"{next(self._jobs)}-{module}", module, plan)
        return job.result(result, within_s + SPARE_S)


@contextmanager
def endpoint(outcome: str, directory: Path) -> Iterator[tuple[str, int]]:
    """Run a check endpoint in a process; yield its URL and its PID."""
    port = pick_port()
    command = [sys.executable, "-m", "bench.load.check_endpoint", str(port), outcome]
    process = SupervisedProcess(command, cwd=ROOT, log_path=directory / "endpoint.log")
    try:
        yield f"http://{HOST}:{port}/check", process.pid
    finally:
        process.kill()


class Job:
    """A process that carries out a plan: `python -m <module> PLAN RESULT`."""

    def __init__(self, stem: Path, module: str, plan: Any) -> None:
        """Start it."""
        self._module = module
        plan_path, self._result, self._log = (
            stem.with_name(f"{stem.name}.{kind}") for kind in ("plan", "result", "log")
        )
        plan_path.write_bytes(msgspec.json.encode(plan))
        command = [sys.executable, "-m", module, str(plan_path), str(self._result)]
        self.process = SupervisedProcess(command, cwd=ROOT, log_path=self._log)

    def result(self, kind: type[R], within_s: float) -> R:
        """Wait for its end and return its result."""
        try:
            status = self.process.wait(within_s)
        finally:
            self.process.kill()
        if status != 0:
            shown = self._log.read_text(errors="replace")[-_SHOWN:]
            raise RigError(f"{self._module} ended with {status} (None: not within {within_s:g} s):\n{shown}")
        return msgspec.json.decode(self._result.read_bytes(), type=kind)


def until(probe: Callable[[], R], good: Callable[[R], object], otherwise: str, within_s: float = SPARE_S) -> R:
    """Return the result of `probe` as soon as it is `good`; RigError with the last result after `within_s`."""
    deadline = time.monotonic() + within_s
    while not good(last := probe()):
        if time.monotonic() > deadline:
            raise RigError(f"{otherwise}: {last}")
        time.sleep(_POLL_S)
    return last


class Calls(msgspec.Struct, frozen=True, kw_only=True):
    """The results of repeated calls: latencies in milliseconds, and how many calls failed."""

    asked: int = 0
    failed: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    worst_ms: float = 0.0

    @classmethod
    def of(cls, times: Sequence[float], failed: int) -> Calls:
        """Summarise latencies in seconds."""
        ordered = sorted(times)
        at = {share: percentile(ordered, share) * 1000 for share in (0.5, 0.99, 1.0)}
        return cls(asked=len(ordered), failed=failed, p50_ms=at[0.5], p99_ms=at[0.99], worst_ms=at[1.0])

    def row(self, of: str) -> dict[str, float]:
        """Return the figures with names that begin so."""
        figures = msgspec.structs.asdict(self)
        return {f"{of} {name.replace('_', ' ')}": value for name, value in figures.items() if name != "asked"}


@contextmanager
def repeating(once: Callable[[], bool | None], every_s: float) -> Iterator[Callable[[], Calls]]:
    """Call `once` repeatedly on a thread; it returns whether it was answered, None if the call does not count."""
    stopped, failed = Event(), Counter[bool]()
    times: list[float] = []

    def work() -> None:
        while not stopped.is_set():
            started = time.monotonic()
            try:
                answered = once()
            except (OSError, HTTPException):
                answered = False
            if answered is not None:
                times.append(time.monotonic() - started)
                failed[not answered] += 1
            stopped.wait(every_s)

    thread = Thread(target=work, daemon=True)
    thread.start()

    def ended() -> Calls:
        stopped.set()
        thread.join()
        return Calls.of(times, failed[True])

    try:
        yield ended
    finally:
        stopped.set()
        thread.join()
