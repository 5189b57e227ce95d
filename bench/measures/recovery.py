"""Measures the time and memory of a start, by the number of pending and of ended transactions."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Self

import msgspec
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined] # public, but not for mypy

from bench.figures import cpu_us, memory_mib
from bench.measures.recovery_figures import AllDue, Recovery, RecoveryResult, Takeover
from bench.plan import GROUP, PARTITIONS, VALUE_BYTES
from bench.system.instance import CallResults, Instance, ask, liveness_probe, repeating, served, unknown_endpoint
from bench.system.log_history import MAX_PREPARE_BYTES, History, Plan
from bench.system.rig import RigError
from halfway.embedded import EmbeddedConfig, EmbeddedKafka
from halfway.embedded.process import SupervisedProcess
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.log.cursors import KafkaCursors
from halfway.runtime.metrics.metrics import Metrics
from halfway.service.ports import Cursors
from halfway.service.requests import ServiceLimits

SHARDS: Final = 8
_ROOT: Final = Path(__file__).resolve().parents[2]
_REQUEST_S: Final = 30.0
_POLL_S: Final = 0.02
_FILL_S: Final = 7_200.0
_RECOVER_S: Final = 900.0
_PARTS: Final = 2
_NOT_DUE: Final[Mapping[str, Any]] = {"first_check_after_s": 259_200.0, "max_age_s": 345_600.0}
"""No transaction is due during the measurement."""


FEW: Final = 10
PENDING: Final = (0, 10_000, 100_000, 1_000_000)
ENDED: Final = (0, 100_000, 1_000_000, 10_000_000)
LATELY: Final = (2_000_000,)
_MANY: Final = 10_000
_HORIZON_S: Final = 1
_PAST_S: Final = 62.0
"""After this time the ended transactions are older than the horizon, even if clocks differ."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """The log that a coordinator starts with: pending transactions, then ended ones.

    `lately`: they ended within the outcome horizon, so their outcomes must be known; otherwise before it.
    """

    pending: int
    ended: int = 0
    lately: bool = False

    @property
    def name(self) -> str:
        """The name in the table."""
        return f"{self.pending:,} pending, {self.ended:,} ended{' lately' if self.lately else ''}"


class Bench:
    """A context manager for a broker, on which one prefix with its topics follows the other."""

    def __init__(
        self,
        *,
        say: Callable[[str], None],
        bootstrap_servers: str | None = None,
        shards: int = SHARDS,
        value_bytes: int = VALUE_BYTES,
        rate_per_s: float = 2_000,
        watch_s: float = 60,
        settings: Mapping[str, str] | None = None,
        name: str = "recovery",
    ) -> None:
        """Keep the options; nothing starts yet. `settings` are environment variables of the coordinator."""
        self._say = say
        self._external_servers = bootstrap_servers
        self._watch_s = watch_s
        self._settings = dict(settings or {})
        self._name = name
        self._stack = ExitStack()
        self._count = 0
        self._empty_mib = 0.0
        self.topic = f"{name}.orders"
        self.result = RecoveryResult(shards=shards, value_bytes=value_bytes, rate_per_s=rate_per_s)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.directory = Path(stack.enter_context(TemporaryDirectory(prefix="halfway-recovery-")))
            self.bootstrap_servers = self._external_servers or self._broker(stack)
            self._admin = AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})
            for created in self._admin.create_topics([NewTopic(self.topic, PARTITIONS, 1)]).values():
                created.result(_REQUEST_S)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _broker(self, stack: ExitStack) -> str:
        self._say("the broker starts")
        return stack.enter_context(EmbeddedKafka(EmbeddedConfig(heap="1g", progress=self._say))).bootstrap_servers

    # --- a log

    @contextmanager
    def log(self, cell: Cell) -> Iterator[tuple[dict[str, str], History]]:
        """Write a log under a new prefix; yield the coordinator's settings for it. It is deleted at the end."""
        self._count += 1
        prefix = f"_{self._name}{self._count}."
        settings = {
            "HALFWAY_KAFKA__BOOTSTRAP_SERVERS": self.bootstrap_servers,
            "HALFWAY_KAFKA_PREFIX": prefix,
            "HALFWAY_SHARDS": str(self.result.shards),
            **self._settings,
        }
        try:
            self._say(f"{cell.name}: the log is written")
            started = time.monotonic()
            with Instance(self.directory, settings) as first:  # it creates the topics, and owns the shards
                first.ready(_RECOVER_S)
                self.register(first, {"mode": "pull"}, _NOT_DUE)
                first.stop()
            history = self.write(prefix, cell)
            asyncio.run(self._commit_cursors(prefix, history))
            self._say(f"written in {time.monotonic() - started:.0f} s, {history.reanchored} halves written again in it")
            if cell.ended and not cell.lately:
                # Transaction markers have the broker's time, which is also used to look op up by time.
                settings["HALFWAY_OUTCOME_HORIZON_S"] = str(_HORIZON_S)
                time.sleep(_PAST_S)
            yield settings, history
        finally:
            topics = [name for name in self._admin.list_topics(timeout=_REQUEST_S).topics if name.startswith(prefix)]
            for deleted in self._admin.delete_topics(topics).values() if topics else ():
                deleted.result(_REQUEST_S)

    def register(self, instance: Instance, check: Mapping[str, Any], policy: Mapping[str, float]) -> None:
        """Register the group of all transactions."""
        body = {"check": check, "topics": [self.topic], "policy": policy}
        status, answer = ask(instance.port, "PUT", f"/v1/groups/{GROUP}", body)
        if status not in (HTTPStatus.OK, HTTPStatus.CREATED):
            raise RigError(f"the group was not registered: {status} {answer!r}")

    def write(self, prefix: str, cell: Cell) -> History:
        """Write a log with several processes, each for some of the shards."""
        until = time.time_ns() // 1_000_000
        parts = min(_PARTS, self.result.shards)
        processes: list[tuple[SupervisedProcess, Path, Path]] = []
        with ExitStack() as stack:
            for part in range(parts):
                own = tuple(range(part, self.result.shards, parts))
                share = len(own) / self.result.shards
                plan = Plan(
                    bootstrap_servers=self.bootstrap_servers,
                    prefix=prefix,
                    shards=self.result.shards,
                    own=own,
                    topic=self.topic,
                    value_bytes=self.result.value_bytes,
                    pending=_part(cell.pending, part, parts),
                    ended=_part(cell.ended, part, parts),
                    until_ms=until,
                    rate_per_s=self.result.rate_per_s * share,
                    reanchor_after=self._reanchor_after,
                )
                files = [self.directory / f"{prefix}{part}.{kind}" for kind in ("plan", "result", "log")]
                files[0].write_bytes(msgspec.json.encode(plan))
                command = [sys.executable, "-m", "bench.system.log_history", str(files[0]), str(files[1])]
                process = SupervisedProcess(command, cwd=_ROOT, log_path=files[2])
                stack.callback(process.kill)
                processes.append((process, files[1], files[2]))
            results = [_result(*result) for result in processes]
        return History(
            half_cursors={number: at for result in results for number, at in result.half_cursors.items()},
            half_ends={number: at for result in results for number, at in result.half_ends.items()},
            op_ends={number: at for result in results for number, at in result.op_ends.items()},
            reanchored=sum(result.reanchored for result in results),
            last_pending=next((result.last_pending for result in results if result.last_pending), None),
        )

    @property
    def _reanchor_after(self) -> int:
        return int(self._settings.get("HALFWAY_REANCHOR_AFTER", ServiceLimits().reanchor_after))

    def _config(self, prefix: str) -> KafkaConfig:
        return KafkaConfig(
            properties={"bootstrap.servers": self.bootstrap_servers},
            prefix=prefix,
            shards=self.result.shards,
            max_prepare_bytes=MAX_PREPARE_BYTES,
        )

    async def _commit_cursors(self, prefix: str, history: History) -> None:
        """Commit the cursors as the last scan would have: nothing was checked, so no op record is needed again."""
        cursors = KafkaCursors(self._config(prefix), Metrics())
        await cursors.start()
        places = history.half_cursors.items()
        await cursors.commit({number: Cursors(half=at, op=history.op_ends[number]) for number, at in places})
        await cursors.stop()

    # --- starts

    def run(self, cells: Sequence[Cell], *, before: Path | None = None, starts: int = 1) -> RecoveryResult:
        """Measure starts on each log; on the largest backlog also a takeover, and a start with everything due.

        `before` is the interpreter of an earlier version: then only starts are measured, and both versions take turns.
        """
        largest = max((cell.pending for cell in cells), default=0)
        versions = {"": Path(sys.executable)} if before is None else {", before": before, "": Path(sys.executable)}
        for cell in cells:
            with self.log(cell) as (settings, history):
                for version, python in [*versions.items()] * starts:
                    started = self.start(cell, settings, history, version=version, python=python)
                    self._say(f"{started.cell}: ready after {started.ready_s:.1f} s, {started.rss_mib:.0f} MiB")
                if before is None and cell.pending == largest > FEW:
                    self.take_over(settings)
                    with unknown_endpoint() as (url, count_requests):
                        self.all_due(cell, settings, url, count_requests)
        return self.result

    def start(
        self,
        cell: Cell,
        settings: Mapping[str, str],
        history: History,
        *,
        version: str = "",
        python: Path = Path(sys.executable),
    ) -> Recovery:
        """Start a coordinator on a log and measure it; then watch it for a while, and stop it."""
        with ExitStack() as stack:
            instance = stack.enter_context(Instance(self.directory, settings, python))
            alive = stack.enter_context(repeating(liveness_probe(instance, [False]), 0.02))
            ready_s = instance.ready(_RECOVER_S)
            health, cpu, (rss, _) = alive(), cpu_us(instance.pid) / 1e6, memory_mib(instance.pid)
            get_s = None if history.last_pending is None else self._until_found(instance, history.last_pending)
            prepared = self._transact(instance)
            commit_s = time.monotonic() - instance.started
            if not prepared:
                raise RigError("a transaction after the start was refused")
            acquired = instance.events("shards_acquired")
            pending = round(instance.metric("halfway_pending"))
            if pending != cell.pending:
                raise RigError(f"{pending} are pending, not {cell.pending}")
            after, prepares = self._watched(instance)
            acquire_s = max(line["seconds"] for line in acquired)  # shards are acquired concurrently
            records = sum(line["records"] for line in acquired)
            if not cell.pending and not cell.ended:
                self._empty_mib = rss
            result = Recovery(
                cell=cell.name + version,
                pending=cell.pending,
                ended=cell.ended,
                reanchored=history.reanchored,
                ready_s=ready_s,
                get_s=get_s,
                commit_s=commit_s,
                acquire_s=acquire_s,
                records=records,
                records_per_s=records / acquire_s,
                cpu_s=cpu,
                rss_mib=rss,
                peak_mib=memory_mib(instance.pid)[1],
                bytes_each=(rss - self._empty_mib) * 1024**2 / cell.pending
                if self._empty_mib and cell.pending >= _MANY
                else None,
                health=health,
                health_after=after,
                prepare_after=prepares,
                incarnations=len(instance.events("incarnation_begun")),
            )
            instance.stop()
        self.result.starts.append(result)
        return result

    def _until_found(self, instance: Instance, transaction_id: str) -> float:
        while ask(instance.port, "GET", f"/v1/transactions/{transaction_id}")[0] != HTTPStatus.OK:
            time.sleep(_POLL_S)
        return time.monotonic() - instance.started

    def _transact(self, instance: Instance, times: list[float] | None = None) -> bool:
        """Prepare and commit one transaction; the time of the prepare is added to `times`."""
        body = {"group": GROUP, "messages": [{"topic": self.topic, "key": "k", "value": "v"}]}
        started = time.monotonic()
        status, answer = ask(instance.port, "POST", "/v1/transactions", body)
        if times is not None:
            times.append(time.monotonic() - started)
        if status != HTTPStatus.CREATED:
            return False
        path = f"/v1/transactions/{msgspec.json.decode(answer)['id']}/end"
        return ask(instance.port, "POST", path, {"outcome": "commit"})[0] == HTTPStatus.OK

    def _watched(self, instance: Instance, watch_s: float | None = None) -> tuple[CallResults, CallResults]:
        """Probe the health port, and prepare and commit with one caller, for a while."""
        times: list[float] = []
        with ExitStack() as stack:
            health = stack.enter_context(repeating(liveness_probe(instance, [True]), 0.05))
            prepares = stack.enter_context(repeating(lambda: self._transact(instance, times), 0.05))
            time.sleep(self._watch_s if watch_s is None else watch_s)
            failed = prepares().failed
            return health(), CallResults.of(times, failed)

    def take_over(self, settings: Mapping[str, str]) -> Takeover:
        """Start a second instance beside one that serves everything, then kill the first."""
        with ExitStack() as stack:
            first = stack.enter_context(Instance(self.directory, settings))
            first.ready(_RECOVER_S)
            second = stack.enter_context(Instance(self.directory, settings))
            while len(served(second)) < self.result.shards // 2:
                if time.monotonic() - second.started > _RECOVER_S:
                    raise RigError("the second instance gets no shards")
                time.sleep(_POLL_S)
            joined_s = time.monotonic() - second.started
            away = second.metric("halfway_shard_away_seconds_sum") / second.metric("halfway_shard_away_seconds_count")
            times: list[float] = []
            prepares = stack.enter_context(repeating(lambda: self._transact(second, times), 0.05))
            killed = time.monotonic()
            first.kill()
            while len(served(second)) < self.result.shards:
                if time.monotonic() - killed > _RECOVER_S:
                    raise RigError("the second instance does not take over")
                time.sleep(_POLL_S)
            taken_s = time.monotonic() - killed
            failed = prepares().failed
            rss, peak = memory_mib(second.pid)
            pending = round(second.metric("halfway_pending"))
            second.stop()
        self.result.takeover = Takeover(
            pending=pending,
            joined_s=joined_s,
            join_away_s=away,
            taken_s=taken_s,
            session_s=float(settings.get("HALFWAY_SESSION_TIMEOUT_S", "10")),
            rss_mib=rss,
            peak_mib=peak,
            prepare=CallResults.of(times, failed),
        )
        return self.result.takeover

    def all_due(
        self, cell: Cell, settings: Mapping[str, str], endpoint: str, count_requests: Callable[[], int]
    ) -> AllDue:
        """Start with everything due; `count_requests` returns the number of requests to the endpoint."""
        due = {"first_check_after_s": 1, "check_interval_s": 300, "max_interval_s": 300, "max_age_s": 345_600}
        with Instance(self.directory, settings) as before:
            before.ready(_RECOVER_S)
            self.register(before, {"urls": [endpoint]}, due)
            before.stop()
        with Instance(self.directory, settings) as instance:
            ready_s = instance.ready(_RECOVER_S)
            started, count = time.monotonic(), count_requests()
            health, prepares = self._watched(instance)
            seconds = time.monotonic() - started
            rss, peak = memory_mib(instance.pid)
            self.result.all_due = AllDue(
                pending=cell.pending,
                ready_s=ready_s,
                watched_s=seconds,
                checks_per_s=(count_requests() - count) / seconds,
                rss_mib=rss,
                peak_mib=peak,
                health_after=health,
                prepare_after=prepares,
            )
            instance.stop()
        return self.result.all_due


def _part(total: int, part: int, parts: int) -> int:
    return total * (part + 1) // parts - total * part // parts


def _result(process: SupervisedProcess, result: Path, log: Path) -> History:
    status = process.wait(_FILL_S)
    if status != 0:
        raise RigError(f"the log was not written ({status}):\n{log.read_text(errors='replace')[-4000:]}")
    return msgspec.json.decode(result.read_bytes(), type=History)
