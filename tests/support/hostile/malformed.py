"""Sending what no client should send, byte by byte, and what every refusal must be."""

import asyncio
import json
from collections.abc import Mapping
from io import BytesIO
from typing import Any

from yarl import URL

from tests.support.coordinator.rest_client import Answer, Rest

JSON = "application/json"


async def send(
    rest: Rest, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> Answer:
    """Send bytes as they are; the body as JSON unless `headers` say otherwise."""
    whole = {"Content-Type": JSON, **(headers or {})}
    async with rest.session.request(
        method,
        URL(rest.url + path, encoded=True),
        data=None if body is None else BytesIO(body),
        headers=whole,
        allow_redirects=False,
    ) as response:
        text = await response.text(errors="replace")
        return Answer(status=response.status, body=json.loads(text) if text else None, headers=response.headers.copy())


def refused(answer: Answer, status: int, code: str, field: str | None = None) -> dict[str, Any]:
    """Require a problem document, and that it names a field where one is wrong."""
    problem = answer.refused(status, code)
    assert problem["status"] == status
    assert problem["title"]
    assert problem["detail"]
    assert problem["instance"]
    if field is not None:
        assert field in [one["field"] for one in problem["errors"]], problem
        assert all(one["detail"] for one in problem["errors"])
    return problem


async def raw(rest: Rest, sent: bytes, *, end: bool = False) -> tuple[int, dict[str, Any]]:
    """Send bytes over a connection of their own; give the first answer's status and its problem."""
    url = URL(rest.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        writer.write(sent)
        if end:
            writer.write_eof()
        async with asyncio.timeout(180):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
            body = await reader.readexactly(int(headers["content-length"]))
        assert headers["content-type"] == "application/problem+json", headers
        return int(head[0].split()[1]), json.loads(body)
    finally:
        writer.close()
