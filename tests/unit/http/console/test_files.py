"""The console's files: how they are served, and what they must not contain."""

import gzip
import re
from hashlib import sha256

import pytest

from halfway.http.console import TYPES, Console
from halfway.http.server.server import HttpServer
from tests.support.rest.client import HOST, RestWorld

MOST_BYTES = 200 * 1024
FILES = Console().files
OURS = {path: file.plain.decode() for path, file in FILES.items() if "/vendor/" not in path}
LIBRARY = "/console/vendor/htm-preact.js"
WRITES_HTML = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|dangerouslySet|\beval\(|new Function|srcdoc|javascript:"
)
ANOTHER_HOST = re.compile(r"""["'(`]\s*(?:https?:)?//\S+""")


async def test_a_page_is_served_with_a_policy_that_lets_nothing_else_in(world: RestWorld) -> None:
    async with world.session.get(f"{world.url}/console/") as answer:
        assert answer.status == 200
        assert answer.content_type == "text/html"
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["Content-Security-Policy"].split(";"))
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "connect-src": "'self'",
        "img-src": "'self' data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }


@pytest.mark.parametrize("path", FILES)
async def test_a_file_is_sent_once_and_then_only_confirmed(world: RestWorld, path: str) -> None:
    """Plain and compressed files have different ETags."""
    tags = set()
    for packing in ("gzip", "identity"):
        asked = {"Accept-Encoding": packing}
        async with world.session.get(world.url + path, headers=asked) as answer:
            assert answer.status == 200
            assert await answer.read() == FILES[path].plain
            assert answer.headers.get("Content-Encoding", "identity") == packing
            tag = answer.headers["ETag"]
        again = asked | {"If-None-Match": f'"other", {tag}'}
        async with world.session.get(world.url + path, headers=again) as answer:
            assert (answer.status, await answer.read()) == (304, b"")
        tags.add(tag)
    assert len(tags) == 2


async def test_the_address_without_a_slash_leads_on_behind_any_path(world: RestWorld) -> None:
    async with world.session.get(f"{world.url}/console", allow_redirects=False) as answer:
        assert (answer.status, answer.headers["Location"]) == (308, "console/")


@pytest.mark.parametrize(
    "method, path, status",
    [
        ("GET", "/console/none.js", 404),
        ("GET", "/console/../app.py", 404),
        ("GET", "/console/%2e%2e/console.py", 404),
        ("POST", "/console/", 405),
        ("HEAD", "/console/app.js", 200),
        ("GET", "/consoles", 404),
    ],
)
async def test_nothing_else_is_served(world: RestWorld, method: str, path: str, status: int) -> None:
    async with world.session.request(method, world.url + path) as answer:
        assert answer.status == status
        if status >= 400:
            assert answer.content_type == "application/problem+json"


def test_it_is_small() -> None:
    """The compressed size of all files."""
    assert sum(len(gzip.compress(file.plain)) for file in FILES.values()) < MOST_BYTES


def test_no_file_names_another_host_or_writes_html() -> None:
    for path, text in OURS.items():
        outside = [found for found in ANOTHER_HOST.findall(text) if "www.w3.org/2000/svg" not in found]
        assert outside == [], path
        assert WRITES_HTML.findall(text) == [], path


def test_a_page_has_no_script_or_style_of_its_own() -> None:
    page = OURS["/console/"]
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", page) == []


def test_every_file_that_is_named_is_there() -> None:
    """Imports and links, relative to their file."""
    for path, text in OURS.items():
        folder = path.rpartition("/")[0]
        named = re.findall(r'from "(\.[^"]+)"', text)
        named += re.findall(r'(?:src|href)="([\w.-]+\.(?:js|css|svg))"', text) if path.endswith("/") else []
        for name in named:
            parts = folder.split("/")
            for part in name.split("/"):
                parts = parts[:-1] if part == ".." else parts if part == "." else [*parts, part]
            assert "/".join(parts) in FILES, (path, name)


def test_the_library_is_the_one_that_the_licences_name() -> None:
    licences = FILES["/console/vendor/LICENSES.txt"].plain.decode()
    assert sha256(FILES[LIBRARY].plain).hexdigest() in licences


def test_every_kind_of_file_has_its_type() -> None:
    assert {file.content_type for file in FILES.values()} <= set(TYPES.values())


async def test_without_a_console_nothing_is_at_its_path(world: RestWorld) -> None:
    """With HALFWAY_CONSOLE=off."""
    server = HttpServer(world.api)
    port = await server.start(HOST, 0)
    try:
        async with world.session.get(f"http://{HOST}:{port}/console/") as answer:
            assert (answer.status, answer.content_type) == (404, "application/problem+json")
    finally:
        await server.stop()
