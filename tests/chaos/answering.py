"""How producers answer checks: over HTTP, plainly, late, wrongly or not at all; and by fetching them."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from aiohttp import web

from checker.history import Checked, HistoryWriter, Said, Taken
from halfway.client import CheckVerifier, InvalidSignatureError
from halfway.embedded.broker import HOST, pick_port
from tests.chaos.caller import Caller, Way
from tests.chaos.decisions import Decisions
from tests.chaos.producers import LEAVING, PULLED, Producers

PLAIN_FROM: Final = 4
"""From this attempt on answers are plain: without a good answer a transaction is never resolved."""
FETCHERS: Final = 2
"""For each coordinator: while one waits for its answer, the others fetch."""
LATE_S: Final = 3.0
"""Longer than the coordinators wait (2 s)."""
_MANNERS: Final = {
    "plain": 67,
    "late": 6,
    "error with a verdict": 5,
    "redirect": 4,
    "trailing text": 5,
    "page": 4,
    "capitals": 3,
    "to another question": 3,
    "broken off": 3,
}
_SIGNED_WITHIN_S: Final = 86_400.0
"""Clocks of coordinators are set hours ahead and back."""
_VERDICT_TEXT: Final = '{"outcome": "%s", "nonce": "%s"}'


class CheckEndpoints:
    """Answers checks by the decision table; for a group with secrets only if the check is signed."""

    def __init__(self, decisions: Decisions, producers: Producers, history: HistoryWriter, seed: int) -> None:
        self._decisions = decisions
        self._producers = producers
        self._history = history
        self._seed = seed
        self._port = pick_port()
        self._runner: web.AppRunner | None = None
        self._stopped = False
        self.manners: Counter[str] = Counter()
        self.forged: list[str] = []
        """Checks without a signature of their group's secrets, and repeated ones: each is a violation."""
        self._verifiers: dict[str, CheckVerifier] = {}
        self._last_answers: dict[web.RequestHandler, tuple[str, Said]] = {}
        """The last answer on each connection."""

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._port}/check"

    def trust(self, group: str, secrets: Sequence[str]) -> None:
        """From now on answer the checks of a group only if one of these secrets signed them."""
        self._verifiers[group] = CheckVerifier(*secrets, within_s=_SIGNED_WITHIN_S)

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/check", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, self._port).start()

    async def stop(self) -> None:
        """Close; callers that still wait for an answer get no verdict."""
        self._stopped = True
        if self._runner is not None:
            await self._runner.cleanup()

    def verdict(self, transaction: str) -> Said:
        """Return the database's outcome; an unknown transaction is rolled back for good."""
        if self._stopped or transaction in self._producers.undecided:
            return "unknown"
        return self._decisions.decide(transaction, "rollback")

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            raw = await request.read()
        except OSError:
            # The caller was gone before this process handled the check; the history contains it nevertheless.
            checked_id = request.headers["webhook-id"].rpartition(":")[0]
            self._history.write(Checked(id=checked_id, said="nothing", manner="too late"))
            raise
        body: dict[str, Any] = json.loads(raw)
        try:
            if (verifier := self._verifiers.get(body["group"])) is not None:
                verifier.verify(raw, request.headers)
        except InvalidSignatureError as error:
            self.forged.append(f"{body['id']}, attempt {body['attempt']}: {error}")
            self._history.write(Checked(id=str(body["id"]), said="nothing", manner="forged"))
            return web.Response(status=web.HTTPUnauthorized.status_code)
        if (last_answer := self._last_answers.pop(request.protocol, None)) is not None:
            # A connection is used again only if the answer before was read to its end, and in time.
            self._history.write(Taken(id=last_answer[0], said=last_answer[1]))
        transaction, attempt, nonce = str(body["id"]), int(body["attempt"]), str(body["nonce"])
        chance = random.Random(f"{self._seed}/{transaction}/{attempt}")
        manner = chance.choices(list(_MANNERS), list(_MANNERS.values()))[0] if attempt < PLAIN_FROM else "plain"
        self.manners[manner] += 1
        if manner == "late":
            await asyncio.sleep(LATE_S)
        if manner in ("plain", "late"):
            said = self.verdict(transaction)
            self._history.write(Checked(id=transaction, said=said, manner=manner))
            self._last_answers[request.protocol] = (transaction, said)
            return web.json_response({"outcome": said, "nonce": nonce})
        self._history.write(Checked(id=transaction, said="nothing", manner=manner))
        return _no_verdict(request, manner, self._bait(transaction), nonce)

    def _bait(self, transaction: str) -> str:
        """Return the opposite of the truth: acting on an invalid answer would be noticed."""
        return "rollback" if self._decisions.find(transaction) == "commit" else "commit"


def _no_verdict(request: web.Request, manner: str, bait: str, nonce: str) -> web.StreamResponse:
    text = _VERDICT_TEXT % (bait, nonce)
    unlike = {
        "trailing text": text + " or so",
        "capitals": _VERDICT_TEXT % (bait.upper(), nonce),
        "to another question": _VERDICT_TEXT % (bait, nonce[::-1]),
    }
    match manner:
        case "error with a verdict":
            return web.Response(status=500, text=text, content_type="application/json")
        case "redirect":
            return web.Response(status=307, headers={"Location": "/check"}, text=text, content_type="application/json")
        case "page":
            return web.Response(text=f"<html>{text}</html>", content_type="text/html")
        case _ if manner in unlike:
            return web.Response(text=unlike[manner], content_type="application/json")
        case _:
            if request.transport is not None:
                request.transport.close()
            return web.Response()


class Fetcher:
    """A producer service without an endpoint: it fetches its checks from every coordinator."""

    def __init__(self, caller: Caller, endpoints: CheckEndpoints, instances: int) -> None:
        self._caller = caller
        self._endpoints = endpoints
        self._instances = instances
        self.fetched = 0
        self.pushed = 0

    async def run(self) -> None:
        """Fetch, several at a time, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(FETCHERS * self._instances):
                group.create_task(self._fetch(PULLED))
            group.create_task(self._fetch(LEAVING))
            self._caller.streams.want(PULLED)
            for _ in range(self._instances):
                group.create_task(self._take_pushed())

    async def _fetch(self, of_group: str) -> None:
        while True:
            answer = await self._caller.persist("GET", f"/groups/{of_group}/checks?wait_s=0.5&max=50", group=of_group)
            checks = answer.body.get("checks") or []
            self.fetched += len(checks)
            await asyncio.gather(*(self._answer(check) for check in checks))
            if answer.status != web.HTTPOk.status_code:
                await asyncio.sleep(0.5)

    async def _take_pushed(self) -> None:
        while True:
            check = await self._caller.streams.checks.get()
            self.pushed += 1
            await self._answer(check, way="stream")

    async def _answer(self, check: dict[str, Any], way: Way = "single") -> None:
        said = self._endpoints.verdict(name := str(check["id"]))
        await self._caller.end(name, said, group=check["group"], by="check", check_id=check["check_id"], way=way)
