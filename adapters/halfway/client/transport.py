"""HTTP to a coordinator, at any of several URLs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp

from halfway.client.errors import HalfwayError

_MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024
_AVOID_S: Final = 5.0
"""For so long a URL that gave no answer is asked only if the others give none either."""


class InvalidUrlError(HalfwayError, ValueError):
    """A coordinator's URL cannot be used; the message says what it must look like."""


class NoAnswerError(Exception):
    """No coordinator answered: whether the request was carried out is not known."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """An answer: its status, and its body if that was a JSON object."""

    status: int
    body: Mapping[str, Any]
    retry_after_s: float | None


class Transport:
    """Sends requests to the first coordinator that answers, and stays with it."""

    def __init__(self, urls: Sequence[str], *, credential: str | None, connections: int) -> None:
        """Take the coordinators' URLs without a path; raises InvalidUrlError."""
        if not urls:
            raise InvalidUrlError("no coordinator URL was given: give one such as http://halfway:8080")
        self._urls = [_checked(url) for url in urls]
        self._avoided_until = dict.fromkeys(self._urls, 0.0)
        self._credential = credential
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> None:
        """Open the connection pool in the running event loop."""
        headers = {"Authorization": f"Bearer {self._credential}"} if self._credential else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._connections),
            headers=headers,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def send(self, method: str, path: str, body: bytes | None, *, deadline: float) -> Reply:
        """Send one request and return the answer.

        `deadline` is on the event loop's clock; each coordinator gets its share of the time that is left, so that one
        that hangs leaves some for the next. Raises NoAnswerError if none answered.
        """
        loop = asyncio.get_running_loop()
        failures = []
        urls = self._order(loop.time())
        for asked, url in enumerate(urls):
            left = deadline - loop.time()
            if left <= 0:
                break
            try:
                return await self._ask(url, method, path, body, left / (len(urls) - asked))
            except (aiohttp.ClientError, OSError) as error:
                self._avoided_until[url] = loop.time() + _AVOID_S
                failures.append(f"{url}: {str(error) or type(error).__name__}")
        raise NoAnswerError("; ".join(failures) or "the deadline passed before anything was sent")

    async def _ask(self, url: str, method: str, path: str, body: bytes | None, timeout_s: float) -> Reply:
        if self._session is None:
            raise NoAnswerError("the client is not open")
        headers = {} if body is None else {"Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.request(
            method, url + path, data=body, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            return Reply(
                status=response.status,
                body=_object(await _bounded(response)),
                retry_after_s=_seconds(response.headers.get("Retry-After")),
            )

    def _order(self, now: float) -> list[str]:
        return sorted(self._urls, key=lambda url: max(self._avoided_until[url], now))


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    text = bytearray()
    async for chunk in response.content.iter_any():
        text += chunk
        if len(text) > _MAX_ANSWER_BYTES:
            raise aiohttp.ClientPayloadError(f"the answer has more than {_MAX_ANSWER_BYTES} bytes")
    return bytes(text)


def _checked(url: str) -> str:
    parts = urlsplit(url)
    try:
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.path not in {"", "/"} or parts.query or parts.fragment or parts.username:
        raise InvalidUrlError(f"{url!r} is no coordinator URL: give scheme, host and port, such as http://halfway:8080")
    return f"{parts.scheme}://{parts.netloc}"


def _object(text: bytes) -> Mapping[str, Any]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def _seconds(header: str | None) -> float | None:
    return float(header) if header is not None and header.isascii() and header.isdigit() else None
