"""HTTP requests to a coordinator at one of several URLs, with the key that identifies the caller."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, NamedTuple, cast
from urllib.parse import urlsplit

import aiohttp
from aiohttp.client_proto import ResponseHandler

from halfway.client.errors import NOT_HALFWAY, HalfwayError
from halfway.client.ids import NewIds

KEY_VARIABLE: Final = "HALFWAY_CLIENT_KEY"
"""The environment variable with the default key."""
FILE_VARIABLE: Final = "HALFWAY_CLIENT_KEY_FILE"
"""The environment variable with the path of a file that contains the default key."""


class InvalidKeyError(HalfwayError, ValueError):
    """The key is not valid, or its file cannot be read: give it as it was shown, printable ASCII without spaces.

    The error does not show it.
    """


class Key:
    """A key. Its text does not appear in `repr`, logs or errors."""

    __slots__ = ("_text",)

    def __init__(self, text: str, source: str = "the key") -> None:
        """Take the text of a key; raises InvalidKeyError, which names where it came from."""
        text = text.strip()
        if not text.startswith("hw_") or not all("!" <= character <= "~" for character in text):
            raise InvalidKeyError(f"{source} is not a key of halfway (hw_...): give it as shown, without spaces in it")
        self._text = text

    @classmethod
    def resolve(cls, key: str | Key | None) -> Key | None:
        """Return the given key, or else the key of the environment, or None if there is none."""
        if isinstance(key, Key):
            return key
        if key is not None:
            return cls(key, "the key that key= gives")
        text, path = os.environ.get(KEY_VARIABLE), os.environ.get(FILE_VARIABLE)
        if path is None:
            return None if text is None else cls(text, KEY_VARIABLE)
        if text is not None:
            raise InvalidKeyError(f"{KEY_VARIABLE} and {FILE_VARIABLE} are both set: set one of them")
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise InvalidKeyError(f"cannot read {FILE_VARIABLE} {path!r}: {error.strerror}") from None
        return cls(content.decode("utf-8", "replace"), f"what {FILE_VARIABLE} {path!r} contains")

    def __repr__(self) -> str:
        return "Key(**********)"

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._text}"}


_MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024
AVOID_S: Final = 5.0
"""A URL that gave no answer is tried last for this long."""
STOPPING: Final = "shutting_down"
SLOWEST_BYTES_PER_S: Final = 256 * 1024
"""An attempt gets more time for a larger body, by this speed."""
_MAX_DETAIL: Final = 200
_TRACES: Final = "Halfway-Traceparents"
"""The header with the span of each item of a batch."""


class InvalidUrlError(HalfwayError, ValueError):
    """A coordinator's URL is not valid; the message names the expected form."""


class NoAnswerError(Exception):
    """No coordinator answered. It is not known whether the request was carried out."""


class DeadlinePassedError(NoAnswerError):
    """The deadline passed before the last attempt was answered."""


_REMEDY: Final = "give the coordinator's URL, such as http://halfway:8080, or correct the proxy in front of it"
_NONE_READY: Final = "no ready coordinator answered behind that proxy: see /health/ready of each"
_REMEDIES: Final = dict.fromkeys((502, 503, 504), _NONE_READY)
"""The remedies for answers by which a proxy says that it has no server; for others it is `_REMEDY`."""


class Reply(NamedTuple):
    """The answer to a request."""

    status: int
    body: Mapping[str, Any]
    """The JSON object. If the answer is not from halfway, a problem with the code NOT_HALFWAY."""
    retry_after_s: float | None

    @property
    def is_from_halfway(self) -> bool:
        """Whether halfway itself has answered, not a proxy or another server."""
        return self.body.get("error_code") != NOT_HALFWAY


class _Call(NamedTuple):
    method: str
    path: str
    body: bytes | None
    headers: Mapping[str, str]


class _Connections:
    """A pool of connections and the number of requests on it."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session
        self.requests = 0


_of_parents: Final[list[object]] = []
"""Connections of the parent of a fork. If they were collected, its event loop would no longer watch them."""


class _ClosesAtOnce(ResponseHandler):
    """A connection that closes at once, with TLS too: a coordinator that hangs would keep it open for 30 s more."""

    def close(self) -> None:
        if self.transport is not None and self.transport.get_extra_info("ssl_object") is not None:
            self.transport.abort()
        super().close()


class Transport:
    """Sends requests to the first coordinator that answers, and continues with it."""

    def __init__(self, urls: Sequence[str], *, key: Key | None, tls: ssl.SSLContext | None, connections: int) -> None:
        """Take the coordinators' URLs without a path; raises InvalidUrlError."""
        if not urls:
            raise InvalidUrlError("no coordinator URL was given: give one, such as http://halfway:8080")
        self._urls = [_base_url(url) for url in urls]
        self._avoided_until = dict.fromkeys(self._urls, 0.0)
        self._key = key
        self._tls = tls
        self._connections = connections
        self._pool: _Connections | None = None
        self._upgrades: aiohttp.ClientSession | None = None
        """Opens streams, which take no connection of the pool."""
        self.ids = NewIds()
        self._retired: set[_Connections] = set()
        """Pools whose connections may be dead, until their last request is done."""

    @property
    def url_count(self) -> int:
        """Among how many coordinators the time of a call is divided."""
        return len(self._urls)

    def open(self) -> None:
        """Open the connection pool in the running event loop."""
        if self._pool is not None:
            _of_parents.extend((self._pool, self._upgrades, *self._retired))
            self._retired = set()
        self._open_pool()
        self._upgrades = self._session(0, trace_configs=[_of_upgrades(self.ids)])

    async def close(self) -> None:
        pools, self._pool = [*self._retired, *([] if self._pool is None else [self._pool])], None
        upgrades, self._upgrades = self._upgrades, None
        for session in (*(pool.session for pool in pools), *([] if upgrades is None else [upgrades])):
            await session.close()

    def _open_pool(self) -> None:
        self._pool = _Connections(self._session(self._connections))

    def _session(self, limit: int, **options: Any) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=limit, ssl=True if self._tls is None else self._tls)
        made = partial(_ClosesAtOnce, loop=asyncio.get_running_loop())
        connector._factory = cast("partial[ResponseHandler]", made)  # noqa: SLF001 - no public way
        return aiohttp.ClientSession(
            connector=connector,
            headers=self._key.headers() if self._key is not None else {},
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            **options,
        )

    async def upgrade(
        self, url: str, path: str, protocol: str, *, heartbeat_s: float
    ) -> aiohttp.ClientWebSocketResponse:
        """Open a WebSocket; raises ClientError or OSError."""
        if self._upgrades is None:
            raise aiohttp.ClientConnectionError("the client is not open")
        return await self._upgrades.ws_connect(
            url + path, protocols=(protocol,), heartbeat=heartbeat_s, compress=0, max_msg_size=_MAX_ANSWER_BYTES
        )

    def urls(self) -> list[str]:
        """Return the URLs in the order in which they are tried."""
        now = asyncio.get_running_loop().time()
        return sorted(self._urls, key=lambda url: max(self._avoided_until[url], now))

    def avoid(self, url: str) -> None:
        """Try a URL last for a while, because it gave no answer."""
        self._avoided_until[url] = asyncio.get_running_loop().time() + AVOID_S

    async def send(
        self, method: str, path: str, body: bytes | None, *, deadline: float, attempt_s: float, traces: str = ""
    ) -> Reply:
        """Send one request and return the answer.

        `deadline` is on the event loop's clock. Each coordinator gets its share of the remaining time, so that a
        coordinator that hangs leaves time for the others, and at most `attempt_s`, and more for a large body: the
        connection may have died silently. After that, every later request uses a new connection. A coordinator that is
        stopping is skipped, and so is a URL where another server answers (a proxy's 502). Raises NoAnswerError if none
        answered.
        """
        attempt_s += len(body or b"") / SLOWEST_BYTES_PER_S
        headers = {} if body is None else {"Content-Type": "application/json"}
        call = _Call(method, path, body, headers | ({_TRACES: traces} if traces else {}))
        loop = asyncio.get_running_loop()
        failures = []
        skipped: Reply | None = None
        urls = self.urls()
        for tried, url in enumerate(urls):
            left = deadline - loop.time()
            if left <= 0:
                break
            try:
                timeout_s = min(attempt_s, left / (len(urls) - tried))
                reply = await self._request(url, call, timeout_s)
            except (aiohttp.ClientError, OSError) as error:
                self.avoid(url)
                failures.append(f"{url}: {str(error) or type(error).__name__}")
                continue
            if reply.is_from_halfway and reply.body.get("error_code") != STOPPING:
                return reply
            self.avoid(url)
            skipped = reply
        if skipped is not None:
            return skipped
        if not failures:
            raise DeadlinePassedError("the deadline passed before anything was sent")
        raise NoAnswerError("; ".join(failures))

    async def _request(self, url: str, call: _Call, timeout_s: float) -> Reply:
        if self._pool is None:
            raise NoAnswerError("the client is not open")
        pool = self._pool
        pool.requests += 1
        try:
            return await self._request_on(pool.session, url, call, timeout_s)
        except TimeoutError:
            if pool is self._pool:
                self._retired.add(pool)
                self._open_pool()
            raise
        finally:
            pool.requests -= 1
            if pool in self._retired and not pool.requests:
                self._retired.discard(pool)
                await pool.session.close()

    async def _request_on(self, session: aiohttp.ClientSession, url: str, call: _Call, timeout_s: float) -> Reply:
        method, path, body, headers = call
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with session.request(
            method, url + path, data=body, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            status, document = response.status, _json_object(await _read_bounded(response))
            is_success = status in {HTTPStatus.OK, HTTPStatus.CREATED}
            if document is None or not (is_success or "error_code" in document):
                request = f"{method} {path.partition('?')[0]} at {url}"
                answer = f"{request} was answered {status} ({response.content_type})"
                document = _not_halfway(answer, _REMEDIES.get(status, _REMEDY), (document or {}).get("detail"))
                status = HTTPStatus.BAD_GATEWAY if is_success else status
            elif document.get("error_code") == "unknown_path":
                document = {**document, "detail": f"{document.get('detail', '')} ({method} {path} at {url})"}
            reply = Reply(status=status, body=document, retry_after_s=_seconds(response.headers.get("Retry-After")))
            if reply.is_from_halfway:
                self.ids.learn(response.headers.get("Date"))
            return reply


def _of_upgrades(ids: NewIds) -> aiohttp.TraceConfig:
    """Return what follows no redirect of an upgrade, and learns the coordinator's time from its answer."""

    async def refuse_redirect(*_: object) -> None:
        raise aiohttp.ClientConnectionError("the answer is a redirect")

    async def learn(_: aiohttp.ClientSession, __: object, end: aiohttp.TraceRequestEndParams) -> None:
        if end.response.status == HTTPStatus.SWITCHING_PROTOCOLS:
            ids.learn(end.response.headers.get("Date"))

    config = aiohttp.TraceConfig()
    config.on_request_redirect.append(refuse_redirect)
    config.on_request_end.append(learn)
    return config


def _not_halfway(answer: str, remedy: str, detail: object) -> Mapping[str, Any]:
    """Return a problem for an answer that is not from halfway, with the answer's own `detail` if it has one."""
    quoted = f": {detail[:_MAX_DETAIL]}" if isinstance(detail, str) else ""
    return {"error_code": NOT_HALFWAY, "detail": f"{answer}, not by halfway{quoted}; {remedy}"}


async def _read_bounded(response: aiohttp.ClientResponse) -> bytes:
    text = bytearray()
    async for chunk in response.content.iter_any():
        text += chunk
        if len(text) > _MAX_ANSWER_BYTES:
            raise aiohttp.ClientPayloadError(f"the answer has more than {_MAX_ANSWER_BYTES} bytes")
    return bytes(text)


def _base_url(url: str) -> str:
    parts = urlsplit(url)
    try:
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.path not in {"", "/"} or parts.query or parts.fragment or parts.username:
        raise InvalidUrlError(
            f"{url!r} is not a coordinator URL: give scheme, host and port, such as http://halfway:8080"
        )
    return f"{parts.scheme}://{parts.netloc}"


def _json_object(text: bytes) -> Mapping[str, Any] | None:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _seconds(header: str | None) -> float | None:
    """Return the seconds to wait. `Retry-After` contains seconds or, from a proxy, a date."""
    if header is None:
        return None
    if header.isascii() and header.isdigit():
        return float(header)
    try:
        at = parsedate_to_datetime(header)
    except ValueError:
        return None
    return max(0.0, (at.replace(tzinfo=at.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
