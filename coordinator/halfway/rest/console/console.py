"""Serves the files of the console, which are part of the package (docs/console.md#security)."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

import msgspec
from aiohttp import web

from halfway.rest.responses.answer import refusal
from halfway.rest.responses.errors import MethodNotAllowedError, UnknownPathError
from halfway.rest.responses.problems import CONTENT_TYPE

ROOT: Final = "/console"
INDEX: Final = f"{ROOT}/"
_METHODS: Final = ("GET", "HEAD")
TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # A browser asks each time whether its copy is still good: the files change with the release.
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}


class _File(msgspec.Struct, frozen=True, kw_only=True):
    """One file as it is sent, plain and compressed."""

    content_type: str
    plain: bytes
    packed: bytes
    etag: str


class Console:
    """The handler of `/console/` and what lies below it. All files are held in memory, compressed once."""

    def __init__(self) -> None:
        """Read the files of the package."""
        self.files = {f"{ROOT}/{path}": _loaded(path, file) for path, file in _walk(files(__package__) / "static")}
        self.files[INDEX] = self.files.pop(f"{ROOT}/index.html")

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer with a file, 304 if the browser has it, or a problem."""
        if request.method not in _METHODS:
            return _refused(MethodNotAllowedError(request.method, _METHODS))
        path = request.rel_url.raw_path
        if path == ROOT:
            # Relative, so that it leads to the right place behind a proxy that adds a part to the path.
            return web.Response(status=308, headers={**HEADERS, "Location": "console/"})
        file = self.files.get(path)
        if file is None:
            return _refused(UnknownPathError(f"the console has no such file: it begins at {INDEX}"))
        packs = "gzip" in request.headers.get("Accept-Encoding", "")
        etag = f'"{file.etag}{"-gzip" if packs else ""}"'
        headers = {**HEADERS, "ETag": etag}
        if etag in [known.strip() for known in request.headers.get("If-None-Match", "").split(",")]:
            return web.Response(status=304, headers=headers)
        if packs:
            headers["Content-Encoding"] = "gzip"
        headers["Content-Type"] = file.content_type
        return web.Response(body=file.packed if packs else file.plain, headers=headers)


def _walk(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        elif _suffix(entry.name) in TYPES:
            yield prefix + entry.name, entry


def _loaded(path: str, file: Traversable) -> _File:
    content = file.read_bytes()
    return _File(
        content_type=TYPES[_suffix(path)],
        plain=content,
        packed=gzip.compress(content, mtime=0),
        etag=sha256(content).hexdigest()[:32],
    )


def _suffix(name: str) -> str:
    return name[name.rfind(".") :]


def _refused(error: MethodNotAllowedError | UnknownPathError) -> web.Response:
    told = refusal(error)
    headers = {**HEADERS, **dict(told.headers), "Content-Type": CONTENT_TYPE}
    return web.Response(status=told.status, body=told.body, headers=headers)
