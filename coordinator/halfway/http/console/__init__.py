"""Serves the files of the console and of the API reference, which are part of the package (docs/console.md)."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

import msgspec
from aiohttp import web

from halfway.http.responses import MethodNotAllowedError, UnknownPathError, problem_response

ROOT: Final = "/console"
ROOTS: Final = (ROOT, "/docs")
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
    # A browser revalidates its copy each time, because the files change with each release.
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}


class _File(msgspec.Struct, frozen=True, kw_only=True):
    content_type: str
    plain: bytes
    compressed: bytes
    etag: str


class Console:
    """The handler of `/console/` and `/docs/`. It keeps all files in memory, compressed once."""

    def __init__(self) -> None:
        self.files = {_address(path): _load(path, file) for path, file in _walk(files(__package__) / "static")}

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer with a file, with 304 if the browser has it, or with a problem."""
        if request.method not in _METHODS:
            return problem_response(MethodNotAllowedError(request.method, _METHODS), HEADERS)
        path = request.rel_url.raw_path
        if path in ROOTS:
            # The location is relative, so that it is right behind a proxy that adds a prefix to the path.
            return web.Response(status=308, headers={**HEADERS, "Location": f"{path[1:]}/"})
        file = self.files.get(path)
        if file is None:
            detail = f"there is no such file: the console starts at {ROOT}/, the API reference at /docs/"
            return problem_response(UnknownPathError(detail), HEADERS)
        gzipped = "gzip" in request.headers.get("Accept-Encoding", "")
        etag = f'"{file.etag}{"-gzip" if gzipped else ""}"'
        headers = {**HEADERS, "ETag": etag}
        if etag in [known.strip() for known in request.headers.get("If-None-Match", "").split(",")]:
            return web.Response(status=304, headers=headers)
        if gzipped:
            headers["Content-Encoding"] = "gzip"
        headers["Content-Type"] = file.content_type
        return web.Response(body=file.compressed if gzipped else file.plain, headers=headers)


def serves(path: str) -> bool:
    """Return whether a path is one of the console or of the API reference."""
    return path.startswith(ROOTS) and path.split("/")[1] in ("console", "docs")


def _address(path: str) -> str:
    """Return where a file is served: a page at its folder, the reference beside the console."""
    return ("/" if path.startswith("docs/") else f"{ROOT}/") + path.removesuffix("index.html")


def _walk(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        elif _suffix(entry.name) in TYPES:
            yield prefix + entry.name, entry


def _load(path: str, file: Traversable) -> _File:
    content = file.read_bytes()
    return _File(
        content_type=TYPES[_suffix(path)],
        plain=content,
        compressed=gzip.compress(content, mtime=0),
        etag=sha256(content).hexdigest()[:32],
    )


def _suffix(name: str) -> str:
    return name[name.rfind(".") :]
