"""Orders over outages of minutes: `python -m tests.orders --orders 50000 --database postgresql --seed 1`.

Callers place orders with ids of their own, and repeat what was not answered. A seeded schedule kills services (-9) all
the time, and in turn lets both coordinators and the broker be away. In the end each order that was taken must have had
its effects once, and no other order any. Exit status 1 if not; then the directory with the logs is kept.
"""

import argparse
import asyncio
import math
import random
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from halfway.client import SyncHalfway
from halfway.embedded import EmbeddedConfig, EmbeddedKafka
from halfway.embedded.broker import HOST, pick_port
from halfway.embedded.process import SupervisedProcess
from tests.support.coordinator.fleet import Fleet
from tests.support.coordinator.topics import Cluster
from tests.support.databases.servers import run_mariadb, run_postgresql
from tests.support.effects.story import PARTITIONS, PROCESSES, SOON, Story

CALLERS = 16
TAKEN, REFUSED = (200, 201), 409
ANSWER_WITHIN_S = 10.0
LONGEST_GAP_S = 15.0
"""Without an order taken; a caller waits up to 4 s while its service finds that halfway is away, and is killed then."""
STUCK_AFTER_S = 300.0
DATABASES = {"postgresql": (run_postgresql, "postgresql+psycopg"), "mariadb": (run_mariadb, "mysql+pymysql")}


class Callers:
    """Place orders at a rate, each until it is taken or refused, at any of the services."""

    def __init__(self, seed: int, rate: float, ports: list[int]) -> None:
        self.taken: dict[str, float] = {}
        self.refused = set[str]()
        self.answers = Counter[str]()
        self._seed, self._rate, self._ports = seed, rate, ports
        self._begun, self._next, self._give_up = time.monotonic(), 0, math.inf
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._threads = [threading.Thread(target=self._call, args=(number,)) for number in range(CALLERS)]

    @contextmanager
    def calling(self) -> Iterator[None]:
        self._begun = time.monotonic()
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._give_up = time.monotonic() + STUCK_AFTER_S
            self._stop.set()
            for thread in self._threads:
                thread.join()

    def longest_gap_s(self, since: float, until: float) -> float:
        """Return the longest time without an order taken."""
        times = sorted(at for at in list(self.taken.values()) if since < at < until)
        return max(later - earlier for earlier, later in zip([since, *times], [*times, until], strict=True))

    def _call(self, number: int) -> None:
        chance = random.Random(f"{self._seed}/{number}")
        connection = HTTPConnection(HOST, chance.choice(self._ports), timeout=ANSWER_WITHIN_S)
        while not self._stop.is_set():
            with self._lock:
                self._next, order = self._next + 1, f"{self._seed}-{self._next}"
                due = self._begun + self._next / self._rate
            self._stop.wait(due - time.monotonic())
            while time.monotonic() < self._give_up:  # also after the stop: whoever has asked wants to know
                try:
                    connection.request("POST", f"/orders/{order}")
                    answer = connection.getresponse()
                    answer.read()
                except (OSError, HTTPException) as error:
                    self.answers[type(error).__name__] += 1
                    connection.close()
                    connection = HTTPConnection(HOST, chance.choice(self._ports), timeout=ANSWER_WITHIN_S)
                    time.sleep(0.05)
                    continue
                self.answers[str(answer.status)] += 1
                if answer.status in TAKEN:
                    self.taken[order] = time.monotonic()
                elif answer.status == REFUSED:
                    self.refused.add(order)
                else:
                    time.sleep(0.2)
                    continue
                break
        connection.close()


def serves(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return False
    return True


class Run(Story):
    """The services of the story, called from outside, while all that they need fails."""

    def go(
        self, seed: int, orders: int, rate: float, away_s: tuple[float, float], kafka: EmbeddedKafka, fleet: Fleet
    ) -> list[str]:
        """Return what was wrong beside the counts, which are compared."""
        chance = random.Random(seed)
        self._ports = [pick_port() for _ in range(PROCESSES.count("produce"))]
        self.callers = callers = Callers(seed, rate, self._ports)
        self.kills, self.wrong = Counter[str](), list[str]()
        with ExitStack() as stack:
            stack.enter_context(self._tables())
            with SyncHalfway(self._given["url"], self._group) as client:
                client.register(topics=[self._topic], policy=SOON)
            copying = stack.enter_context(self._copying())
            stack.callback(lambda: self._kill(range(len(self._running))))
            self._running = [self._launched(slot) for slot in range(len(PROCESSES))]
            self._wait(lambda: all(map(serves, self._ports)), "the services do not start")
            begun = time.monotonic()
            with callers.calling(), self._killing(chance, orders, rate):
                pause_s = max(2.0, (orders / rate - 3 * sum(away_s) / 2) / 6)
                for fault in chance.sample(["coordinators away", "broker killed", "broker frozen"], 3):
                    self._pass(pause_s)
                    self._kill_one(chance, kafka, fleet)
                    self._pass(pause_s)
                    self._outage(fault, chance.uniform(*away_s), kafka, fleet)
                while len(callers.taken) < orders:
                    self._pass(1.0)
                    now = time.monotonic()
                    assert callers.longest_gap_s(now - STUCK_AFTER_S, now) < STUCK_AFTER_S, "no orders are taken"
            self._say(f"{len(callers.taken)} orders were taken in {time.monotonic() - begun:.0f} s")
            self._drain()
            committed = self._come_to_an_end(copying)
            for trouble, ids in (
                ("taken, but not there", callers.taken.keys() - set(committed)),
                ("there, but refused", callers.refused & set(committed)),
                ("there, but nobody was told", set(committed) - callers.taken.keys()),
            ):
                if ids:
                    self.wrong.append(f"{len(ids)} orders were {trouble}: {sorted(ids)[:5]}")
            effects = self._count(self._effects, "effects") - PARTITIONS
        self._say(
            f"orders {len(committed)}, refused {len(callers.refused)}, effects {effects}, copies {self._copies},"
            f" kills {dict(self.kills)}, answers {dict(callers.answers)}"
        )
        return self.wrong

    def _launched(self, slot: int) -> SupervisedProcess:
        if PROCESSES[slot] == "produce":
            self._given["port"] = self._ports[slot]
        return self._start(PROCESSES[slot])

    @contextmanager
    def _killing(self, chance: random.Random, orders: int, rate: float) -> Iterator[None]:
        """Kill one service after the other, when all serve: 4 times, or once for 500 orders."""
        stop, every_s = threading.Event(), orders / rate / max(4, orders // 500)
        own = random.Random(chance.random())

        def kill() -> None:
            while not stop.wait(every_s * own.uniform(0.5, 1.5)):
                self._start_again()
                slot = own.randrange(len(PROCESSES))
                if not all(map(serves, self._ports)):
                    continue  # a slow machine still starts the last one
                self._kill([slot])
                self._running[slot] = self._launched(slot)
                self.kills[PROCESSES[slot]] += 1

        thread = threading.Thread(target=kill)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self._start_again()

    def _start_again(self) -> None:
        """Start what has ended by itself, which is wrong: a service lives through all that happens here."""
        for slot, process in enumerate(self._running):
            if process.poll() is not None:
                self.wrong.append(f"a service has ended by itself: {PROCESSES[slot]}")
                self._running[slot] = self._launched(slot)

    def _kill_one(self, chance: random.Random, kafka: EmbeddedKafka, fleet: Fleet) -> None:
        one, since = chance.choice(fleet.members), time.monotonic()
        one.kill()
        one.start()
        self._tell("one coordinator killed", since)
        since = time.monotonic()
        kafka.kill()
        kafka.start()
        self._tell("broker killed", since)

    def _outage(self, fault: str, seconds: float, kafka: EmbeddedKafka, fleet: Fleet) -> None:
        since = time.monotonic()
        if fault == "broker frozen":
            kafka.pause()
            self._pass(seconds)
            kafka.resume()
        elif fault == "broker killed":
            kafka.kill()
            self._pass(seconds)
            kafka.start()
        else:
            for member in fleet.members:
                member.kill()
            self._pass(seconds)
            for member in fleet.members:
                member.launch()
        gap_s = self._tell(f"{fault} for {seconds:.0f} s", since)
        if gap_s > LONGEST_GAP_S:
            self.wrong.append(f"no order was taken for {gap_s:.1f} s: {fault}")

    def _tell(self, fault: str, since: float) -> float:
        """Say what it has cost; return the longest time without an order."""
        now = time.monotonic()
        gap_s = self.callers.longest_gap_s(since, now)
        taken = sum(since < at < now for at in list(self.callers.taken.values()))
        self.kills[fault.partition(" for ")[0]] += 1
        self._say(f"{fault}: {now - since:.1f} s, {taken} orders taken, longest gap {gap_s:.1f} s")
        return gap_s

    def _pass(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 15.0))
            self._say()

    def _say(self, what: str = "") -> None:
        taken, stored = len(self.callers.taken), self._barrier.stored()
        effects = self._count(self._effects, "effects")
        state = f"taken {taken}, stored {stored.waiting} (oldest {stored.oldest_s:.0f} s), parked {stored.parked}"
        state += f", effects {effects}"
        print(f"{time.strftime('%H:%M:%S')} {what or state}{f' [{state}]' if what else ''}", flush=True)

    def _drain(self) -> None:
        """Wait until all that is stored was sent, as long as it gets less."""
        least, since = self._barrier.stored().waiting, time.monotonic()
        while (waiting := self._barrier.stored().waiting) > 0:
            if waiting < least:
                least, since = waiting, time.monotonic()
            if time.monotonic() - since > STUCK_AFTER_S:
                raise AssertionError(f"{waiting} transactions stay stored")
            self._pass(5.0)
        self._say("all that was stored is sent")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.orders", description=__doc__)
    parser.add_argument("--orders", type=int, default=500, help="that are to be taken, at least")
    parser.add_argument("--database", choices=DATABASES, default="postgresql")
    parser.add_argument("--rate", type=float, default=80.0, help="orders a second")
    parser.add_argument(
        "--away", type=float, nargs=2, default=(60.0, 180.0), help="the shortest and the longest outage, in s"
    )
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = parser.parse_args()
    print(f"python -m tests.orders --orders {given.orders} --database {given.database} --seed {given.seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="halfway-orders-"))
    run, driver = DATABASES[given.database]
    try:
        with ExitStack() as stack:
            server = stack.enter_context(run())
            databases = (
                stack.enter_context(server.new_database(driver)),
                stack.enter_context(server.new_database(driver)),
            )
            kafka = stack.enter_context(EmbeddedKafka(EmbeddedConfig(data_dir=folder / "kafka")))
            fleet = Fleet(kafka.bootstrap_servers, folder)
            stack.callback(fleet.close)
            fleet.start(2)
            topic = asyncio.run(Cluster(kafka.bootstrap_servers).make_topic(partitions=PARTITIONS))
            urls = [member.url for member in fleet.members]
            story = Run(urls, kafka.bootstrap_servers, topic, databases, folder, given.seed, stores=True)
            wrong = story.go(given.seed, given.orders, given.rate, tuple(given.away), kafka, fleet)
    except AssertionError as error:
        wrong = [str(error)]
    if wrong:
        print("\n".join(wrong), f"the logs are in {folder}", sep="\n", flush=True)
        return 1
    print("0 lost, 0 doubled", flush=True)
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
