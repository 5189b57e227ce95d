"""An instance that is asked by others, and what asks it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from halfway.coordinator.ports import OwnerHint
from halfway.coordinator.records import EndCall, PeerCall
from halfway.coordinator.requests import End, EndResult
from halfway.http.server.peer_port import PeerPort
from halfway.peers import HttpPeers
from halfway.protocol.principal import Principal, PrincipalKind
from halfway.protocol.transactions import Outcome, State

HOST = "127.0.0.1"
SECRET = "the secret of this cluster"
CALLER = Principal(kind=PrincipalKind.GROUP, name="shop", key_id="k")
Serve = Callable[[Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]], Awaitable[OwnerHint]]


def end_of(name: str) -> EndCall:
    return EndCall(request=End(id=name, outcome=Outcome.COMMIT))


class Owner:
    """An instance that answers as a test says, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[PeerCall] = []
        self.principals: list[Principal] = []
        self.left_s: list[float] = []
        self.connections = 0
        self.incarnation: str | None = "one"
        self.gates: dict[str, asyncio.Event] = {}
        self.error: Exception | None = None
        self.port = PeerPort(
            self,  # type: ignore[arg-type] # it answers, which is all that is asked of it
            credentials=[SECRET, "the one before"],
            incarnation=lambda: self.incarnation,
            max_body_bytes=100_000,
            longest_s=600,
            max_calls=1_000,
        )

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        self.connections += 1
        return await self.port(request)

    async def answer(self, call: PeerCall, *, deadline: float, principal: Principal) -> msgspec.Struct:
        self.asked.append(call)
        self.principals.append(principal)
        self.left_s.append(deadline - asyncio.get_running_loop().time())
        name = call.request.id if isinstance(call, EndCall) else ""
        if name in self.gates:
            await self.gates[name].wait()
        if self.error is not None:
            raise self.error
        return EndResult(id=name, state=State.COMMITTED, changed=True)


def within(seconds: float = 60) -> float:
    return asyncio.get_running_loop().time() + seconds


async def ask(peers: HttpPeers, owner: OwnerHint, name: str, seconds: float = 60) -> Any:
    return await peers.ask(owner, end_of(name), deadline=within(seconds), principal=CALLER)
