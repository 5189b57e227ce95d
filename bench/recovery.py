"""`python -m bench recovery`: the time and memory of a start, by the number of pending and of ended transactions.

Logs are written as a coordinator would have left them (`log_history`). On each a coordinator starts, and is sent
requests all the time; on the one with the largest backlog a second instance then joins and the first is killed, and
last everything is due at once.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Final, Self

import msgspec
from msgspec import Meta

from bench.figures import Record, Row, Say, cpu_us, memory_mib
from bench.log_history import History, Plan
from bench.plan import VALUE_BYTES
from bench.system import Broker, Calls, Instance, Job, RigError, endpoint, repeating, until
from halfway.app.metrics import Metrics
from halfway.coordinator.ports import Cursors
from halfway.coordinator.requests import ServiceLimits
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.log.cursors import KafkaCursors

FEW: Final = 10
_MANY: Final = 10_000
_LARGEST: Final = ((0, 10_000, 100_000, 1_000_000), (100_000, 1_000_000, 10_000_000), (2_000_000,))
"""Pending ones, ended ones, and lately ended ones."""
_FILL_S: Final = 7_200.0
_RECOVER_S: Final = 900.0
_PARTS: Final = 2
_PAST_S: Final = 62.0
"""After this time the ended transactions are older than a horizon of a second, even if clocks differ."""
_NOT_DUE: Final = {"first_check_after_s": 259_200.0, "max_age_s": 345_600.0}
_DUE: Final = {"first_check_after_s": 1, "check_interval_s": 300, "max_interval_s": 300, "max_age_s": 345_600}


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The logs, and what happens on each. Given no counts, the largest logs have a million and ten million."""

    pending: Annotated[tuple[int, ...], Meta(description="pending transactions of a log")] = ()
    ended: Annotated[tuple[int, ...], Meta(description="ended ones, after 10 that are pending")] = ()
    lately: Annotated[tuple[int, ...], Meta(description="like ended, within the outcome horizon")] = ()
    shards: Annotated[int, Meta(description="shards")] = 8
    value_bytes: Annotated[int, Meta(description="bytes of each transaction's message")] = VALUE_BYTES
    rate: Annotated[float, Meta(description="transactions a second in the log")] = 2_000.0
    watch: Annotated[float, Meta(description="seconds after each start")] = 60.0
    starts: Annotated[int, Meta(description="starts on each log")] = 1
    before: Annotated[str, Meta(description="an interpreter of the version to compare with: only starts, in turn")] = ""

    @property
    def logs(self) -> list[Log]:
        """The logs to start on."""
        given = self.pending, self.ended, self.lately
        pending, ended, lately = given if any(given) else _LARGEST
        return [
            *(Log(pending=number) for number in pending),
            *(Log(pending=FEW, ended=number) for number in ended),
            *(Log(pending=FEW, ended=number, lately=True) for number in lately),
        ]


class Log(msgspec.Struct, frozen=True, kw_only=True):
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


def run(kafka: Broker, options: Options, say: Say) -> Record:
    """Measure starts on each log; on the largest backlog also a takeover, and a start with everything due."""
    versions = {"": Path(sys.executable)}
    if options.before:
        versions = {", before": Path(options.before).absolute(), **versions}
    rows: list[Row] = []
    with Starts(kafka, options, say) as starts:
        largest = max(log.pending for log in options.logs)
        for log in options.logs:
            with starts.written(log) as (settings, history):
                for version, python in [*versions.items()] * options.starts:
                    say(f"{log.name}{version}: a start")
                    rows.append(starts.start(log, settings, history, version=version, python=python))
                if not options.before and log.pending == largest > FEW:
                    rows += [starts.take_over(settings), starts.all_due(log, settings)]
    failed = ("health failed", "health after failed", "prepares failed")
    return Record(
        title=f"starts: {options.shards} shards, one message of {options.value_bytes} bytes each",
        rows=rows,
        clean=all(row["incarnations"] == 1 and not any(row[name] for name in failed) for row in rows if "CPU s" in row),
    )


class Starts(ExitStack):
    """Logs and starts on one broker, where one prefix with its topics follows the other."""

    def __init__(self, kafka: Broker, options: Options, say: Say) -> None:
        """Keep the options; nothing is written yet."""
        self._kafka = kafka
        self._options = options
        self._say = say
        super().__init__()
        self._name = f"recovery{time.time_ns() % 10**9}-"
        self._topic = f"{self._name}orders"
        self._count = 0
        self._empty_mib = 0.0

    def __enter__(self) -> Self:
        self._directory = Path(self.enter_context(TemporaryDirectory(prefix="halfway-recovery-")))
        self._kafka.create_topic(self._topic)
        return self

    # --- a log

    @contextmanager
    def written(self, log: Log) -> Iterator[tuple[dict[str, str], History]]:
        """Write a log under a new prefix; yield the coordinator's settings for it. It is deleted at the end."""
        self._count += 1
        prefix = f"_{self._name}{self._count}."
        settings = {
            "HALFWAY_KAFKA__BOOTSTRAP_SERVERS": self._kafka.bootstrap_servers,
            "HALFWAY_KAFKA_PREFIX": prefix,
            "HALFWAY_SHARDS": str(self._options.shards),
            "HALFWAY_CHECK_ALSO_NETWORKS": "127.0.0.0/8,::1",
        }
        try:
            with self._instance(settings) as first:  # it creates the topics, and owns the shards
                first.ready(_RECOVER_S)
                first.register(self._topic, policy=_NOT_DUE)
                first.stop()
            plans = self._plans(prefix, log)
            jobs = [Job(self._directory / f"{prefix}{plan.own[0]}", "bench.log_history", plan) for plan in plans]
            history = History.of([job.result(History, _FILL_S) for job in jobs])
            asyncio.run(_commit_cursors(plans[0].config, history))
            self._say(f"{log.name}: written, {history.reanchored} halves again")
            if log.ended and not log.lately:
                # Transaction markers have the broker's time, which is also used to look op up by time.
                settings["HALFWAY_OUTCOME_HORIZON_S"] = "1"
                time.sleep(_PAST_S)
            yield settings, history
        finally:
            self._kafka.delete_topics(prefix)

    def _instance(self, settings: Mapping[str, str], python: Path = Path(sys.executable)) -> Instance:
        return Instance(self._directory, settings, python)

    def _plans(self, prefix: str, log: Log) -> list[Plan]:
        """Return the parts of a log, each for some of the shards, which are written at once."""
        options, until_ms = self._options, time.time_ns() // 1_000_000
        parts = min(_PARTS, options.shards)
        return [
            Plan(
                bootstrap_servers=self._kafka.bootstrap_servers,
                prefix=prefix,
                shards=options.shards,
                own=tuple(range(part, options.shards, parts)),
                topic=self._topic,
                value_bytes=options.value_bytes,
                pending=log.pending * (part + 1) // parts - log.pending * part // parts,
                ended=log.ended * (part + 1) // parts - log.ended * part // parts,
                until_ms=until_ms,
                rate_per_s=options.rate / parts,
                reanchor_after=ServiceLimits().reanchor_after,
            )
            for part in range(parts)
        ]

    # --- starts

    def start(self, log: Log, settings: Mapping[str, str], history: History, *, version: str, python: Path) -> Row:
        """Start a coordinator on a log and measure it; then watch it for a while, and stop it."""
        with ExitStack() as stack:
            instance = stack.enter_context(self._instance(settings, python))
            alive = stack.enter_context(repeating(instance.probe(), 0.02))
            ready_s = instance.ready(_RECOVER_S)
            health, cpu_s, (rss, _) = alive(), cpu_us(instance.pid) / 1e6, memory_mib(instance.pid)
            get_s = None
            if history.last_pending is not None:
                get = partial(instance.ask, "GET", f"/v1/transactions/{history.last_pending}")
                until(get, lambda answer: answer[0] == HTTPStatus.OK, "it is not found", _RECOVER_S)
                get_s = time.monotonic() - instance.started
            if not instance.transact(self._topic):
                raise RigError("a transaction after the start was refused")
            commit_s = time.monotonic() - instance.started
            acquired = instance.events("shards_acquired")
            pending = round(instance.metric("halfway_pending"))
            if pending != log.pending:
                raise RigError(f"{pending} are pending, not {log.pending}")
            after, prepares = self._watched(instance)
            records = sum(line["records"] for line in acquired)
            if not log.pending and not log.ended:
                self._empty_mib = rss
            each = (rss - self._empty_mib) * 1024**2 / max(1, log.pending)
            row = {
                "the log holds": log.name + version,
                "pending": log.pending,
                "ready s": ready_s,
                "GET s": get_s,
                "commit s": commit_s,
                "records": records,
                "records/s": records / max(line["seconds"] for line in acquired),  # shards are acquired concurrently
                "CPU s": cpu_s,
                "RSS MiB": rss,
                "peak MiB": memory_mib(instance.pid)[1],
                "bytes each": each if self._empty_mib and log.pending >= _MANY else None,
                "reanchored": history.reanchored,
                "incarnations": len(instance.events("incarnation_begun")),
                **health.row("health"),
                **after.row("health after"),
                **prepares.row("prepares"),
            }
            instance.stop()
        return row

    def _watched(self, instance: Instance) -> tuple[Calls, Calls]:
        """Probe the health port, and prepare and commit with one caller, for a while."""
        times: list[float] = []
        with ExitStack() as stack:
            health = stack.enter_context(repeating(instance.probe(), 0.05))
            prepares = stack.enter_context(repeating(lambda: instance.transact(self._topic, times), 0.05))
            time.sleep(self._options.watch)
            failed = prepares().failed
            return health(), Calls.of(times, failed)

    def take_over(self, settings: Mapping[str, str]) -> Row:
        """Start a second instance beside one that serves everything, then kill the first."""
        shards = self._options.shards
        with ExitStack() as stack:
            first = stack.enter_context(self._instance(settings))
            first.ready(_RECOVER_S)
            second = stack.enter_context(self._instance(settings))
            half = shards // 2
            until(lambda: len(second.served()), lambda found: found >= half, "it gets no shards", _RECOVER_S)
            joined_s = time.monotonic() - second.started
            away = second.metric("halfway_shard_away_seconds_sum") / second.metric("halfway_shard_away_seconds_count")
            times: list[float] = []
            prepares = stack.enter_context(repeating(lambda: second.transact(self._topic, times), 0.05))
            killed = time.monotonic()
            first.process.kill()
            until(lambda: len(second.served()), lambda found: found == shards, "it does not take over", _RECOVER_S)
            taken_s = time.monotonic() - killed
            failed = prepares().failed
            rss, peak = memory_mib(second.pid)
            row = {
                "the log holds": "the same: a second instance joins, the first is killed",
                "pending": round(second.metric("halfway_pending")),
                "joined s": joined_s,
                "a shard was away s": away,
                "taken over s": taken_s,
                "RSS MiB": rss,
                "peak MiB": peak,
                **Calls.of(times, failed).row("prepares"),
            }
            second.stop()
        return row

    def all_due(self, log: Log, settings: Mapping[str, str]) -> Row:
        """Start with everything due, and an endpoint that does not know."""
        with ExitStack() as stack:
            url, _ = stack.enter_context(endpoint("unknown", self._directory))
            with self._instance(settings) as before:
                before.ready(_RECOVER_S)
                before.register(self._topic, check={"urls": [url]}, policy=_DUE)
                before.stop()
            instance = stack.enter_context(self._instance(settings))
            ready_s = instance.ready(_RECOVER_S)
            health, prepares = self._watched(instance)
            checks, seconds = instance.metric("halfway_checks_total"), time.monotonic() - instance.started - ready_s
            rss, peak = memory_mib(instance.pid)
            row = {
                "the log holds": "the same: everything is due",
                "pending": log.pending,
                "ready s": ready_s,
                "checks/s": checks / seconds,
                "RSS MiB": rss,
                "peak MiB": peak,
                **health.row("health after"),
                **prepares.row("prepares"),
            }
            instance.stop()
        return row


async def _commit_cursors(config: KafkaConfig, history: History) -> None:
    """Commit the cursors as the last scan would have: nothing was checked, so no op record is needed again."""
    cursors = KafkaCursors(config, Metrics())
    await cursors.start()
    places = history.half_cursors.items()
    await cursors.commit({number: Cursors(half=at, op=history.op_ends[number]) for number, at in places})
    await cursors.stop()
