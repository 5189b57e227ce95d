"""HTTP to a coordinator, at any of several URLs."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp

from halfway.client.errors import NOT_HALFWAY, HalfwayError
from halfway.client.key import Key

_MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024
_AVOID_S: Final = 5.0
"""For so long a URL that gave no answer is asked only if the others give none either."""
_STOPPING: Final = "shutting_down"
_MAX_DETAIL: Final = 200


class InvalidUrlError(HalfwayError, ValueError):
    """A coordinator's URL cannot be used; the message says what it must look like."""


class NoAnswerError(Exception):
    """No coordinator answered: whether the request was carried out is not known."""


class DeadlinePassedError(NoAnswerError):
    """The time was over before anything was known of the last attempt."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """An answer: its status, and its body if that was a JSON object."""

    status: int
    body: Mapping[str, Any]
    """Of an answer that is not halfway's own, a problem in its form that says so."""
    retry_after_s: float | None

    @property
    def is_halfways(self) -> bool:
        """Whether halfway has answered, and not something before it or in its place."""
        return self.body.get("error_code") != NOT_HALFWAY


class Transport:
    """Sends requests to the first coordinator that answers, and stays with it."""

    def __init__(self, urls: Sequence[str], *, key: Key | None, tls: ssl.SSLContext | None, connections: int) -> None:
        """Take the coordinators' URLs without a path; raises InvalidUrlError."""
        if not urls:
            raise InvalidUrlError("no coordinator URL was given: give one such as http://halfway:8080")
        self._urls = [_checked(url) for url in urls]
        self._avoided_until = dict.fromkeys(self._urls, 0.0)
        self._key = key
        self._tls = tls
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> None:
        """Open the connection pool in the running event loop."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._connections, ssl=True if self._tls is None else self._tls),
            headers=self._key.headers() if self._key is not None else {},
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
        that hangs leaves some for the next. One that is stopping, or in whose place something else answers (a proxy,
        502), is passed by as well. Raises NoAnswerError if none answered.
        """
        loop = asyncio.get_running_loop()
        failures = []
        passed: Reply | None = None
        urls = self._order(loop.time())
        for asked, url in enumerate(urls):
            left = deadline - loop.time()
            if left <= 0:
                break
            try:
                reply = await self._ask(url, method, path, body, left / (len(urls) - asked))
            except (aiohttp.ClientError, OSError) as error:
                self._avoided_until[url] = loop.time() + _AVOID_S
                failures.append(f"{url}: {str(error) or type(error).__name__}")
                continue
            if reply.is_halfways and reply.body.get("error_code") != _STOPPING:
                return reply
            self._avoided_until[url] = loop.time() + _AVOID_S
            passed = reply
        if passed is not None:
            return passed
        if not failures:
            raise DeadlinePassedError("the deadline passed before anything was sent")
        raise NoAnswerError("; ".join(failures))

    async def _ask(self, url: str, method: str, path: str, body: bytes | None, timeout_s: float) -> Reply:
        if self._session is None:
            raise NoAnswerError("the client is not open")
        headers = {} if body is None else {"Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.request(
            method, url + path, data=body, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            status, found = response.status, _object(await _bounded(response))
            done = status in {HTTPStatus.OK, HTTPStatus.CREATED}
            if found is None or not (done or "error_code" in found):
                asked = f"{method} {path.partition('?')[0]} at {url}"
                found = _foreign(
                    f"{asked} was answered {status} ({response.content_type})", (found or {}).get("detail")
                )
                status = HTTPStatus.BAD_GATEWAY if done else status
            return Reply(status=status, body=found, retry_after_s=_seconds(response.headers.get("Retry-After")))

    def _order(self, now: float) -> list[str]:
        return sorted(self._urls, key=lambda url: max(self._avoided_until[url], now))


def _foreign(what: str, detail: object) -> Mapping[str, Any]:
    """Return the problem that stands for an answer that is not halfway's; `detail` is what that said, if anything."""
    said = f": {detail[:_MAX_DETAIL]}" if isinstance(detail, str) else ""
    remedy = "give the coordinator's URL, such as http://halfway:8080, or mend what stands before it"
    return {"error_code": NOT_HALFWAY, "detail": f"{what}, not by halfway{said}; {remedy}"}


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


def _object(text: bytes) -> Mapping[str, Any] | None:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _seconds(header: str | None) -> float | None:
    """Return how long `Retry-After` says to wait, which is seconds or, of a proxy, a date."""
    if header is None:
        return None
    if header.isascii() and header.isdigit():
        return float(header)
    try:
        at = parsedate_to_datetime(header)
    except ValueError:
        return None
    return max(0.0, (at.replace(tzinfo=at.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
