"""A stream whose answers are looked through for payloads and secrets, as those to REST calls are."""

from collections.abc import Mapping
from typing import Any

from bench.load.stream_client import Answer, StreamClient
from tests.support.canary import refuse_leaks


class CheckedStream(StreamClient):
    """A client that no problem may tell a payload or a secret."""

    async def call(self, kind: str, fields: Mapping[str, Any]) -> Answer:
        answer = await super().call(kind, fields)
        refuse_leaks(bytes(answer.problem))
        return answer
