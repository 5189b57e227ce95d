"""Calls between instances of one process, encoded as for a connection."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

from halfway.coordinator.cluster.forward import PeerHandler
from halfway.coordinator.ports import OwnerHint
from halfway.coordinator.records import (
    PeerCall,
    decode_answers,
    decode_call,
    decode_calls,
    decode_result,
    encode_answer,
    encode_call,
    encode_message,
)
from halfway.protocol.errors import HalfwayError, PeerLostError, ShardUnavailableError
from halfway.protocol.principal import Principal


class EncodedPeers:
    """The port `Peers` of the instance at a URL; `handlers` has those that answer, by their URLs."""

    def __init__(self, handlers: MutableMapping[str, PeerHandler], url: str) -> None:
        self._handlers = handlers
        self._url = url
        self.lose_answers = 0
        """How many of the next calls are carried out without an answer."""

    def serve(self, answers: PeerHandler) -> None:
        """Answer other instances from now on."""
        self._handlers[self._url] = answers

    async def ask(self, owner: OwnerHint, call: PeerCall, *, deadline: float, principal: Principal) -> Any:
        """Send a call to an owner and return its answer; see the port for the errors."""
        await asyncio.sleep(0)
        answers = self._handlers.get(owner.url)
        if answers is None:
            raise ShardUnavailableError(f"{owner.url} cannot be reached")
        [frame] = decode_calls(encode_message([encode_call(1, call, within_ms=1, principal=principal)]))
        try:
            async with asyncio.timeout_at(deadline):
                done = await answers.answer(decode_call(frame.call), deadline=deadline, principal=frame.caller)
                answer = encode_answer(1, done)
        except TimeoutError:
            raise PeerLostError("not in time") from None
        except HalfwayError as error:
            answer = encode_answer(1, error)
        if self.lose_answers:
            self.lose_answers -= 1
            raise PeerLostError("the connection was closed")
        [frame_read] = decode_answers(encode_message([answer]))
        return decode_result(call, frame_read)
