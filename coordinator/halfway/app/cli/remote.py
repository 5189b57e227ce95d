"""Calls a coordinator over REST for a command. Every failure ends the command with a message."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Final, TypedDict, Unpack
from urllib.parse import quote

import aiohttp
from yarl import URL

from halfway.app.terminal import complain, fail, printable

_TIMEOUT_S: Final = 30
_MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024
_SHOWN: Final = 200
_REDIRECT: Final = 300
_ERROR: Final = 400
_UNAUTHENTICATED: Final = 401
_LATER: Final = frozenset({429, 502, 503, 504})
_DOUBT: Final = "is --url (HALFWAY_URL) the URL of a coordinator?"
HEALTH_DOUBT: Final = "is --health-url (HALFWAY_HEALTH_URL) the URL of an instance's health port?"


class _Request(TypedDict, total=False):
    body: object
    query: Mapping[str, str]
    headers: Mapping[str, str]


class _NotHalfwayError(Exception):
    """The server at this URL is not a coordinator. `status` is that of its answer."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class NoAnswer(SystemExit):
    """No answer came: others would not come either."""


class Remote:
    """A coordinator's URL and the caller's token. An invalid one ends the command with status 1."""

    def __init__(self, url: str, token: str | None, doubt: str = _DOUBT) -> None:
        """Validate and store the URL and the token. `doubt` asks about the URL if the answers are of another server."""
        self._base = _base(url, doubt)
        self._doubt = doubt
        self._shown = str(self._base.with_user(None))
        self._headers = {}
        if token:
            if self._base.user is not None:
                fail("give either a user in --url or a --token: both are sent as Authorization")
            self._headers["Authorization"] = f"Bearer {_header_value(token)}"

    @property
    def shown(self) -> str:
        """The URL without its secrets."""
        return self._shown

    def ask_patiently(self, method: str, path: str, **request: Unpack[_Request]) -> dict[str, Any] | None:
        """Return the answer as `ask` does, or None if no answer came or the answer is to try again later."""
        try:
            status, answer = asyncio.run(self._ask(method, path, **request))
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None
        except _NotHalfwayError as error:
            if error.status in _LATER:  # of a proxy, whose coordinator is away
                return None
            fail(f"{self._shown} {error}: {self._doubt}")
        return None if status in _LATER else self._success(status, answer)

    def ask(
        self, method: str, path: str, *, expected: int | None = None, **request: Unpack[_Request]
    ) -> dict[str, Any]:
        """Return the answer to a request with `body`, `query` and `headers`, a JSON object.

        An error or a missing answer ends the command with a message and status 1. An answer with the error status
        `expected` is returned like a success.
        """
        try:
            # yarl would drop text that is not UTF-8
            json.dumps([request.get("body"), request.get("query")], ensure_ascii=False).encode()
            status, answer = asyncio.run(self._ask(method, path, **request))
        except _NotHalfwayError as error:
            fail(f"{self._shown} {error}: {self._doubt}")
        except UnicodeEncodeError:
            fail("an argument is not UTF-8")
        except aiohttp.ClientConnectorCertificateError as error:
            reason = printable(str(error.certificate_error))
            remedy = "set SSL_CERT_FILE to the certificate (PEM) of the authority that signed it"
            fail(f"the certificate of {self._shown} is not trusted ({reason}): {remedy}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
            reason = printable(str(cause)) or type(error).__name__
            complain(f"{self._shown} did not answer ({reason}): is `halfway serve` running there?")
            raise NoAnswer(1) from error
        return answer if status == expected else self._success(status, answer)

    def every(self, path: str, name: str) -> list[dict[str, Any]]:
        """Return the objects of a list on all its pages; errors as for `ask`."""
        rows: list[dict[str, Any]] = []
        query: dict[str, str] = {}
        while True:
            page = self.ask("GET", path, query=query)
            rows += objects_of(page, name, self._doubt)
            if not (cursor := page.get("next")):
                return rows
            query = {"cursor": str(cursor)}

    def _success(self, status: int, answer: dict[str, Any]) -> dict[str, Any]:
        return answer if status < _ERROR else fail(f"{status}: {self._explained(status, answer)}")

    def _explained(self, status: int, problem: dict[str, Any]) -> str:
        """Return the text of a problem document, with the wrong fields of the request, or with what to set."""
        lines = [str(problem.get("detail") or "no detail")]
        errors = problem.get("errors")
        wrong = [
            (error.get("field", ""), error.get("detail", ""))
            for error in (errors if isinstance(errors, list) else ())
            if isinstance(error, dict)
        ]
        told = [f"{field}: {detail}" for field, detail in wrong]
        if lines in ([detail for _, detail in wrong], told):  # one wrong field is the whole of it
            lines = told
        else:
            lines += [f"  {one}" for one in told]
        if status == _UNAUTHENTICATED:
            lines.append("set HALFWAY_TOKEN (or HALFWAY_TOKEN_FILE, or --token) to a key that is valid there")
        elif problem.get("error_code") == "unknown_path":
            lines.append(f"{self._shown} answered: {self._doubt}")
        return "\n".join(map(printable, lines))

    async def _ask(self, method: str, path: str, **request: Unpack[_Request]) -> tuple[int, dict[str, Any]]:
        url = URL(str(self._base).rstrip("/") + path, encoded=True).extend_query(request.get("query") or {})
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=self._headers) as session,
            session.request(
                method, url, json=request.get("body"), headers=request.get("headers"), allow_redirects=False
            ) as response,
        ):
            if _REDIRECT <= response.status < _ERROR:
                target = printable(response.headers.get("Location", "nowhere"))[:_SHOWN]
                raise _NotHalfwayError(f"redirects to {target}")
            received = bytearray()
            async for chunk in response.content.iter_any():
                received += chunk
                if len(received) > _MAX_ANSWER_BYTES:
                    raise _NotHalfwayError(f"answered more than {_MAX_ANSWER_BYTES} bytes")
            return response.status, _object(response.status, bytes(received))


def path_of(*parts: str) -> str:
    """Return the path below /v1. A name that is not legal in a path ends the command."""
    for part in parts:
        if part in ("", ".", ".."):
            fail(f"{part!r} is not an id or a name")
        try:
            part.encode()
        except UnicodeEncodeError:
            fail(f"{part!r} is not UTF-8")
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


def objects_of(answer: dict[str, Any], name: str, doubt: str = _DOUBT) -> list[dict[str, Any]]:
    """Return the list of objects in a field of an answer. If it is missing, the command ends."""
    rows = answer.get(name)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        fail(f"the answer has no list {name!r}: {doubt}")
    return rows


def _base(url: str, doubt: str) -> URL:
    try:
        base = URL(url)
        usable = base.scheme in ("http", "https") and bool(base.host) and not (base.query_string or base.fragment)
    except ValueError:
        usable = False
    if not usable:
        shown = printable(url.rpartition("@")[2])[:_SHOWN]  # what stands before may be a password
        fail(f"{shown!r} is not a URL such as http://127.0.0.1:8080: {doubt}")
    return URL(url)


def _header_value(token: str) -> str:
    """Return the token after a check of its characters. The error never shows the token."""
    for position, character in enumerate(token, 1):
        if not "!" <= character <= "~":
            fail(
                f"--token (HALFWAY_TOKEN, HALFWAY_TOKEN_FILE) has an illegal character at position {position} "
                f"of {len(token)}: "
                "a token is visible ASCII without spaces or line breaks"
            )
    return token


def _object(status: int, received: bytes) -> dict[str, Any]:
    if not received:
        return {}
    try:
        answer = json.loads(received.decode())
    except (ValueError, RecursionError):
        answer = None
    if isinstance(answer, dict):
        return answer
    start = received[:_SHOWN].decode("ascii", "backslashreplace")
    raise _NotHalfwayError(f"answered {status} with something that is not a JSON object ({printable(start)!s})", status)
