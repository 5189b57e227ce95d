"""Follows one prepare, one commit and one check through the code, on a real Kafka and over all threads.

`python -m tests.support.structure.paths BOOTSTRAP_SERVERS` prints the calls in their order, with a star where the
module changes, and then the figures as one line of JSON. A path goes from one quiet moment to the next: it holds what
follows an answer too, such as the tail that reads what was written, so that it does not depend on how busy the machine
is. It is what all runs of an operation have in common, without the functions that an idle coordinator calls too: a
heartbeat, a poll and a scan are no part of it.
"""

import http.client
import http.server
import json
import operator
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import pairwise
from types import FrameType
from typing import Any
from uuid import uuid4

RUNS = 4
HOST = "127.0.0.1"
_QUIET_S = 1.0
"""If nothing but what an idle coordinator does was called for this time, the operation is over."""
_IDLE_S = 6.0
"""In this time an idle coordinator has sent its heartbeats and looked for checks that are due."""
_CHECK_AFTER_S = 5
_PATIENCE_S = 120.0


@dataclass
class CallPath:
    """The functions that were called, in order: thread, module and qualified name."""

    calls: list[tuple[str, str, str]] = field(default_factory=list)

    def figures(self) -> dict[str, int]:
        """Return how long the path is, and over how many modules it is spread."""
        from tests.support.structure.figures import definitions

        modules = [module for _, module, _ in self.calls]
        verbs = {name.rpartition(".")[2] for _, _, name in self.calls}
        defined = definitions(set(modules))
        return {
            "calls": len(self.calls),
            "functions": len({(module, name) for _, module, name in self.calls}),
            "modules": len(set(modules)),
            "changes of module": sum(one != other for one, other in pairwise(modules)),
            "definitions of one verb": max((defined[verb] for verb in verbs if not verb.startswith("__")), default=0),
        }

    def only(self, often: Counter[tuple[str, str, str]]) -> "CallPath":
        """Return this path with at most as many calls of each function."""
        left, calls = often.copy(), []
        for call in self.calls:
            left[call] -= 1
            if left[call] >= 0:
                calls.append(call)
        return CallPath(calls)

    def show(self) -> None:
        """Print the path and the verbs that are defined most often."""
        from tests.support.structure.figures import definitions

        before = ""
        for thread, module, name in self.calls:
            print(f"{' ' if module == before else '*'} [{thread}] {module.removeprefix('halfway.')} {name}")  # noqa: T201
            before = module
        defined = definitions({module for _, module, _ in self.calls})
        verbs = Counter({name.rpartition(".")[2]: defined[name.rpartition(".")[2]] for _, _, name in self.calls})
        print(verbs.most_common(8))  # noqa: T201


def _wait(condition: Callable[[], bool], otherwise: str) -> None:
    until = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < until, otherwise
        time.sleep(0.05)


class _Recorder:
    """Records the calls of halfway's functions in all threads that were started after it was installed."""

    def __init__(self) -> None:
        self._path: CallPath | None = None
        self._idle: set[tuple[str, str, str]] = set()
        self._ignored: set[tuple[str, str, str]] = set()
        self._called_at = 0.0

    def install(self) -> None:
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        path = self._path
        if path is None or event != "call":
            return
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        if module.startswith("halfway.") and not code.co_name.startswith("<"):
            call = threading.current_thread().name, module, code.co_qualname
            path.calls.append(call)
            if call not in self._ignored:
                self._called_at = time.monotonic()

    def learn_idle(self) -> None:
        """Note what the coordinator does while nobody asks it for anything: this is part of no path."""
        self._idle = self._ignored = self._record_rest()

    def learn_waiting(self) -> None:
        """Note what it does for a transaction that waits for its check: an operation is over in spite of this."""
        self._ignored = self._idle | self._record_rest()

    def _record_rest(self) -> set[tuple[str, str, str]]:
        time.sleep(_QUIET_S)
        self._path = path = CallPath()
        time.sleep(_IDLE_S)
        return set(path.calls)

    @contextmanager
    def recording(self) -> Iterator[CallPath]:
        """Record the calls in the block, and what follows it until the coordinator is quiet."""
        self._path = path = CallPath()
        yield path
        self.wait_until_quiet()
        self._path = CallPath()
        path.calls = [call for call in path.calls if call not in self._idle]

    def wait_until_quiet(self) -> None:
        self._called_at = time.monotonic()
        _wait(lambda: time.monotonic() > self._called_at + _QUIET_S, "the coordinator does not come to rest")


class _Answer(http.server.BaseHTTPRequestHandler):
    """Answers every check with commit."""

    checks = 0

    @classmethod
    def were_more_than(cls, before: int) -> bool:
        return cls.checks > before

    def do_POST(self) -> None:  # the name is the library's
        self.rfile.read(int(self.headers["content-length"]))
        _Answer.checks += 1
        body = b'{"outcome":"commit"}'
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the library's
        """Print nothing."""


class _Caller:
    """Calls the coordinator that runs in this process."""

    def __init__(self, port: int, topic: str) -> None:
        self._port, self._topic, self._group = port, topic, f"paths-{uuid4().hex[:8]}"

    def _call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=30)
        connection.request(
            method, path, None if body is None else json.dumps(body), {"content-type": "application/json"}
        )
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        assert answer.status in {200, 201}, (method, path, answer.status, text)
        found: dict[str, Any] = json.loads(text)
        return found

    def register(self, check_url: str) -> None:
        self._call("PUT", f"/v1/groups/{self._group}", {"check": {"urls": [check_url]}, "topics": [self._topic]})

    def prepare(self, **more: object) -> str:
        message = {"topic": self._topic, "key": "1", "value": "x"}
        prepared = self._call("POST", "/v1/transactions", {"group": self._group, "messages": [message], **more})
        return str(prepared["id"])

    def commit(self, transaction_id: str) -> None:
        self._call("POST", f"/v1/transactions/{transaction_id}/end", {"outcome": "commit"})


def _measure(recorder: _Recorder, caller: _Caller, check_port: int) -> dict[str, list[CallPath]]:
    caller.register(f"http://{HOST}:{check_port}/check")
    for _ in range(3):
        caller.commit(caller.prepare())
    recorder.learn_idle()
    waits = caller.prepare(check_after_s=3600)
    recorder.learn_waiting()
    caller.commit(waits)
    recorder.wait_until_quiet()
    paths: dict[str, list[CallPath]] = {"prepare": [], "commit": [], "check": []}
    for _ in range(RUNS):
        with recorder.recording() as path:
            prepared = caller.prepare()
        paths["prepare"].append(path)
        with recorder.recording() as path:
            caller.commit(prepared)
        paths["commit"].append(path)
        # A check has no caller: it is what happens in a time in which nothing else is asked for.
        checks = _Answer.checks
        caller.prepare(check_after_s=_CHECK_AFTER_S)
        recorder.wait_until_quiet()
        assert _Answer.checks == checks, "the check came before the prepare was over: this machine is too slow"
        with recorder.recording() as path:
            _wait(partial(_Answer.were_more_than, checks), "the check does not come")
        paths["check"].append(path)
    return paths


def main(bootstrap_servers: str) -> None:
    """Run a coordinator with two shards at this Kafka, and print its paths."""
    recorder = _Recorder()
    recorder.install()

    from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # it is there

    from halfway.app import settings as configuration
    from halfway.app.serve.app import Ready, run

    topic = f"paths-{uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    for created in admin.create_topics([NewTopic(topic, 3, 1)]).values():
        created.result()
    endpoint = http.server.ThreadingHTTPServer((HOST, 0), _Answer)
    threading.Thread(target=endpoint.serve_forever, daemon=True).start()

    def work(ready: Ready) -> None:
        """Measure, print, and end the process at once: with every call recorded, a stop can take half a minute."""
        status = 1
        try:
            _print(_measure(recorder, _Caller(int(ready.url.rpartition(":")[2]), topic), endpoint.server_address[1]))
            status = 0
        except Exception:  # noqa: BLE001 - whatever it is, it is shown
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)

    settings = configuration.load(
        file=None,
        over={
            "host": HOST,
            "health_host": HOST,
            "port": 0,
            "health_port": 0,
            "shards": 2,
            "kafka_prefix": f"_paths-{uuid4().hex[:8]}.",
            "kafka": {"bootstrap.servers": bootstrap_servers},
            "log_level": "error",
            "check_also_networks": [f"{HOST}/32"],
        },
    )
    run(settings, on_ready=lambda ready: threading.Thread(target=work, args=(ready,), name="caller").start())


def _print(paths: dict[str, list[CallPath]]) -> None:
    figures = {}
    for name, runs in paths.items():
        print(f"--- {name}")  # noqa: T201
        common = reduce(operator.and_, (Counter(path.calls) for path in runs))
        shown = [path.only(common) for path in runs]
        shown[0].show()
        for figure in shown[0].figures():
            figures[f"{figure} of a {name}"] = min(path.figures()[figure] for path in shown)
    print(json.dumps(figures))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
