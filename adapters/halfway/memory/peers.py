"""The owners of shards, and calls between instances, on one log in memory."""

from __future__ import annotations

import asyncio
from typing import Any

from halfway.domain.errors import HalfwayError, PeerLostError, ShardUnavailableError
from halfway.domain.principal import Principal
from halfway.memory.log import CallHandler, MemoryLog
from halfway.service.cluster.peer_wire import (
    AnswerReader,
    decode_call,
    decode_request,
    encode_answer,
    encode_call,
    encode_request,
)
from halfway.service.cluster.peer_wire import decode_result as read_result
from halfway.service.ports import OwnerHint
from halfway.service.records.peer_calls import PeerCall

_MAX_ANSWER_BYTES = 64 * 1024 * 1024


class MemoryOwners:
    """The port `service.ports.Owners`."""

    def __init__(self, log: MemoryLog, url: str) -> None:
        """Keep the log, and the URL of this instance."""
        self._log = log
        self._url = url

    def find(self, shard: int) -> OwnerHint | None:
        """Return the owner of a shard; None if there is none or if it is this instance."""
        hint = self._log.owners.get(shard)
        return None if hint is None or hint.url == self._url else hint


class MemoryPeers:
    """The port `service.ports.Peers`: calls and answers are encoded as for a connection."""

    def __init__(self, log: MemoryLog, url: str) -> None:
        """Keep the log, and the URL of this instance."""
        self._log = log
        self._url = url
        self.lose_answers = 0
        """How many of the next calls are carried out without an answer."""

    def serve(self, answers: CallHandler) -> None:
        """Answer other instances from now on."""
        self._log.instances[self._url] = answers

    async def ask(self, owner: OwnerHint, call: PeerCall, *, deadline: float, principal: Principal) -> Any:
        """Send a call to an owner and return its answer; see the port for the errors."""
        await asyncio.sleep(0)
        answers = self._log.instances.get(owner.url)
        if answers is None or owner not in self._log.owners.values():
            raise ShardUnavailableError(f"{owner.url} cannot be reached")
        body = encode_request([encode_call(call, within_ms=1, principal=principal)])
        [frame] = decode_request(body)
        try:
            async with asyncio.timeout_at(deadline):
                done = await answers.answer(decode_call(frame.call), deadline=deadline, principal=frame.caller)
                answer = encode_answer(0, done)
        except TimeoutError:
            raise PeerLostError("not in time") from None
        except HalfwayError as error:
            answer = encode_answer(0, error)
        if self.lose_answers:
            self.lose_answers -= 1
            raise PeerLostError("the connection was closed")
        [frame_read] = AnswerReader(_MAX_ANSWER_BYTES).feed(answer)
        return read_result(call, frame_read)
