"""Drives the unchanged docker-compose.yml through failures under load, and judges it: `make compose-test`.

The producers are those of the chaos runs, with checks that they fetch; the checker reads the topics from outside. At
the end the image is looked at. The exit status is 0 if nothing is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import aiohttp
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # it is there

from checker.dump import Topics
from checker.history import Fault, Held, HistoryWriter, Rest, Run, read_history
from checker.judge import Verdict, judge
from checker.records import read_records
from tests.chaos.answering import CheckEndpoints
from tests.chaos.brokers import FORGOTTEN
from tests.chaos.caller import Caller
from tests.chaos.coordinators import Instance
from tests.chaos.decisions import Decisions
from tests.chaos.follower import Follower
from tests.chaos.producers import GROUPS, TOPICS, Producers

ROOT: Final = Path(__file__).parents[2]
KAFKA: Final = "127.0.0.1:9092"
PREFIX: Final = "_halfway."
DIRECT: Final = "http://127.0.0.1:8080"
BALANCED: Final = "http://127.0.0.1:8090"
POLICY: Final = {"first_check_after_s": 2, "check_interval_s": 1, "max_interval_s": 4, "max_checks": 1000}
REST_WITHIN_S: Final = 300.0
STAND_IN: Final = "halfway.stand-in"
"""The label of images that engine.sh makes of Debian's packages."""
_HOW_BUILT: Final = "import sysconfig; print(sysconfig.get_config_var('CONFIG_ARGS'))"
_AGAIN: Final = "halfway:again"
_GROWS: Final = 100
"""The transactions that are stored between two failures."""


@dataclass(frozen=True)
class Address:
    """Where calls go: what the callers of the chaos runs need to know of an instance."""

    url: str
    number: int = 1


def compose(*arguments: str, profiles: tuple[str, ...] = ()) -> str:
    """Run docker compose in the project's folder, and return what it prints; a failure shows it."""
    command = ["docker", "compose", *(word for name in profiles for word in ("--profile", name)), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201  the progress


class Trial:
    """One run of the composition."""

    def __init__(self, directory: Path, seed: int, *, three: bool) -> None:
        self._directory = directory
        self._seed = seed
        self._profiles = ("three",) if three else ()
        self._url = BALANCED if three else DIRECT
        self._history_path, self._dump_path = directory / "history.jsonl", directory / "topics.jsonl"
        self._over = False

    def _compose(self, *arguments: str) -> str:
        return compose(*arguments, profiles=self._profiles)

    def _up(self) -> None:
        self._compose("up", "--detach", "--wait", "--wait-timeout", "300")

    def _failures(self) -> list[tuple[str, str, Callable[[], None]]]:
        """Return the kinds and targets of the failures, and what makes each and mends it."""

        def restart(service: str) -> None:
            self._compose("restart", service)
            self._up()

        def kill(service: str) -> None:
            self._compose("kill", service)
            self._up()

        def down(_: str) -> None:
            self._compose("down")
            self._up()

        single = [(kind, one) for one in ("coordinator", "kafka") for kind in (restart, kill)]
        if self._profiles:
            single.append((kill, "coordinator-2"))
        return [(act.__name__, one, partial(act, one)) for act, one in [*single, (down, "all")]]

    async def run(self) -> Verdict:
        with ExitStack() as stack:
            await asyncio.to_thread(self._compose, "down", "--volumes")
            say("images are built, and everything starts")
            await asyncio.to_thread(self._compose, "build", "--quiet")
            stack.callback(self._compose, "down", "--volumes")
            stack.callback(self._keep_logs)
            await asyncio.to_thread(self._up)
            await asyncio.to_thread(self._make_topics)
            history = stack.enter_context(HistoryWriter(self._history_path))
            decisions = Decisions(self._directory / "decisions.db")
            stack.callback(decisions.close)
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                await self._load(session, history, decisions)
        return judge(read_history(self._history_path), read_records(self._dump_path))

    def _make_topics(self) -> None:
        admin = AdminClient({"bootstrap.servers": KAFKA})
        made = admin.create_topics([NewTopic(name, num_partitions=3, replication_factor=1) for name in TOPICS])
        for future in made.values():
            future.result(timeout=60)

    async def _load(self, session: aiohttp.ClientSession, history: HistoryWriter, decisions: Decisions) -> None:
        caller = Caller(session, [cast(Instance, Address(self._url))], history, random.Random(f"{self._seed}/caller"))
        producers = Producers(caller, decisions, self._seed, None)
        answers = CheckEndpoints(decisions, producers, history, self._seed)
        topics = Topics(KAFKA, prefix=PREFIX, topics=tuple(TOPICS))
        follower = Follower.of(topics, self._dump_path)
        wall = int(time.time() * 1000)
        history.write(Run(seed=self._seed, topics=tuple(TOPICS), fetching=tuple(GROUPS), wall=wall))
        for group in GROUPS:
            body = {"check": {"mode": "pull"}, "topics": list(TOPICS), "policy": POLICY}
            answer = await caller.persist("PUT", f"/groups/{group}", body)
            assert answer.status == aiohttp.web.HTTPCreated.status_code, answer
        helpers = [asyncio.create_task(self._fetch(caller, answers, group)) for group in GROUPS]
        helpers.append(asyncio.create_task(follower.run()))
        try:
            async with asyncio.TaskGroup() as tasks:
                enough = tasks.create_task(self._break(history, producers))
                tasks.create_task(producers.run(1, enough.done, side_by_side=32, a_second=50.0, lull_until=lambda: 0.0))
            await self._come_to_rest(follower)
        finally:
            for task in helpers:
                task.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            await caller.streams.close()
        await asyncio.to_thread(follower.look)
        forgotten = FORGOTTEN.findall(self._compose("logs", "--no-log-prefix", "kafka"))
        for (topic, partition), end in topics.held.items():
            known = any(f"{topic}-{partition}" in named.split(", ") for named in forgotten)
            why = "Kafka itself forgot a transaction there (docs/verification.md)" if known else ""
            history.write(Held(topic=topic, partition=partition, end=end, why=why))
        history.write(Rest())
        say(f"{producers.stored} transactions stored; answers: {dict(caller.answers.most_common())}")

    async def _fetch(self, caller: Caller, answers: CheckEndpoints, group: str) -> None:
        """Fetch a group's checks and answer them, until cancelled."""
        while True:
            found = await caller.persist("GET", f"/groups/{group}/checks?wait_s=0.5&max=50", group=group)
            checks: list[dict[str, Any]] = found.body.get("checks") or []
            for check in checks:
                said, asked = answers.verdict(str(check["id"])), str(check["check_id"])
                await caller.end(str(check["id"]), said, group=group, by="check", check_id=asked)
            if found.status != aiohttp.web.HTTPOk.status_code:
                await asyncio.sleep(0.5)

    async def _break(self, history: HistoryWriter, producers: Producers) -> None:
        """Make one failure after the other, each after some transactions were stored."""
        for kind, target, act in self._failures():
            await self._until_stored(producers, producers.stored + _GROWS)
            say(f"{producers.stored} transactions stored; {kind} {target}")
            since = history.now()
            await asyncio.to_thread(act)
            history.write(Fault(kind=kind, target=target, since=since))
        await self._until_stored(producers, producers.stored + _GROWS)

    @staticmethod
    async def _until_stored(producers: Producers, wanted: int) -> None:
        async with asyncio.timeout(REST_WITHIN_S):
            while producers.stored < wanted:  # noqa: ASYNC110  a counter sets no event
                await asyncio.sleep(0.1)

    @staticmethod
    async def _come_to_rest(follower: Follower) -> None:
        say("everything runs again; what is pending is resolved")
        async with asyncio.timeout(REST_WITHIN_S):
            while True:
                await asyncio.to_thread(follower.look)
                if not follower.prepared:
                    return
                await asyncio.sleep(1)

    def _keep_logs(self) -> None:
        done = subprocess.run(
            ["docker", "compose", "--profile", "*", "logs", "--no-color"], cwd=ROOT, capture_output=True, check=False
        )
        (self._directory / "compose.log").write_bytes(done.stdout + done.stderr)


def main() -> int:
    """Run with one instance, then with three behind the balancer, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.compose.run", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--instances", type=int, choices=(1, 3), nargs="+", default=(1, 3))
    options = parser.parse_args()
    sound = True
    for instances in options.instances:
        directory = Path(tempfile.mkdtemp(prefix="halfway-compose-"))
        say(f"instances: {instances}, seed {options.seed}; everything is in {directory}")
        verdict = asyncio.run(Trial(directory, options.seed, three=instances > 1).run())
        for finding in verdict.findings[:30]:
            say(f"{finding.count} {finding.rule} {finding.id}: {'; '.join(finding.evidence)}")
        print(json.dumps(verdict.summary()))  # noqa: T201  the result
        sound = sound and verdict.complete and verdict.sound
        if verdict.complete and verdict.sound:
            shutil.rmtree(directory)
    wrong = wrong_of_image("halfway:dev")
    for line in wrong:
        say(line)
    return 0 if sound and not wrong else 1


def docker(*arguments: str) -> str:
    """Run docker in the project's folder, and return what it prints."""
    return subprocess.run(["docker", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def wrong_of_image(name: str) -> list[str]:
    """Return what is wrong with an image: a Python without PGO, or files that another build makes differently."""
    (found,) = json.loads(docker("image", "inspect", name))
    labels: dict[str, str] = found["Config"]["Labels"] or {}
    say(f"the image has {int(found['Size']) / 1e6:.0f} MB and the labels {labels}")
    wrong = []
    how = docker("run", "--rm", "--entrypoint", "python", name, "-c", _HOW_BUILT)
    if "--enable-optimizations" not in how and STAND_IN not in labels:
        wrong.append(f"its Python was built without --enable-optimizations (PGO): {how}")
    docker("build", "--no-cache", "--quiet", "--tag", _AGAIN, ".")
    first, second = contents(name), contents(_AGAIN)
    docker("image", "rm", _AGAIN)
    if differing := sorted(path for path in {*first, *second} if first.get(path) != second.get(path)):
        wrong.append(f"two builds differ in {len(differing)} files: {differing[:20]}")
    return wrong


def contents(image: str) -> dict[str, tuple[object, ...]]:
    """Return what each file of an image is, and its owner and mode; not when it was written."""
    container = docker("create", image).strip()
    found: dict[str, tuple[object, ...]] = {}
    with (
        subprocess.Popen(["docker", "export", container], stdout=subprocess.PIPE) as export,
        tarfile.open(fileobj=export.stdout, mode="r|") as archive,
    ):
        for one in archive:
            file = archive.extractfile(one) if one.isfile() else None
            digest = hashlib.sha256(file.read()).hexdigest() if file else ""
            found[one.name] = (one.type, one.mode, one.uid, one.gid, one.linkname, digest)
    docker("rm", container)
    return found


if __name__ == "__main__":
    sys.exit(main())
