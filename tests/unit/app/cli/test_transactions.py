"""The operator's commands with a server that answers anything: no traceback, no control characters, nothing cut."""

import asyncio
import contextlib
import json
import os
import pty
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from halfway.app.cli.main import halfway
from halfway.app.settings import NOT_SETTINGS, load
from tests.support.certificates import Authority
from tests.support.rest.client import RestWorld
from tests.support.rest.parked import park
from tests.support.waiting import GENEROUS_S

ID = "3-0190f5fe-7c00-7a00-8000-0123456789ab"
TIME = "2026-01-02T03:04:05.678901Z"
HOSTILE = {
    "brackets": "see [/etc/passwd] and [bold]this[/bold]",
    "a closing tag": "[/]",
    "a colour": "\x1b[31mred\x1b[0m",
    "a title": "\x1b]0;title\x07",
    "one-byte codes": "a\x9b31mb\x7f",
    "right to left": "abc\u202egnp.exe\u2066\u200f",
    "line ends": "a\nb\rc\u2028d\x85e",
    "half a pair": "a\ud800b",
    "emoji": ":smile: \U0001f600",
}


class Answer:
    """The server's answer to every request, and the requests that it received."""

    def __init__(self) -> None:
        self.status = 200
        self.body = b"{}"
        self.headers: dict[str, str] = {}
        self.asked: list[tuple[str, str]] = []
        self.received: list[bytes] = []
        self.authorization: list[str | None] = []
        self.url = ""

    def set(self, body: object, status: int = 200) -> None:
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.status = status


@pytest.fixture
def answer() -> Iterator[Answer]:
    given = Answer()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            given.asked.append((self.command, self.path))
            given.authorization.append(self.headers["Authorization"])
            given.received.append(self.rfile.read(int(self.headers["Content-Length"] or 0)))
            self.send_response(given.status)
            for name, value in given.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(given.body)))
            self.end_headers()
            self.wfile.write(given.body)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer  # noqa: N815 - names of http.server

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        given.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield given
        server.shutdown()
        thread.join()


def run(answer: Answer, *arguments: str, token: str | None = None) -> Result:
    environment = {"HALFWAY_URL": answer.url, "HALFWAY_TOKEN": token}
    result = CliRunner().invoke(halfway, arguments, env=environment)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


def transaction(**fields: object) -> dict[str, object]:
    return {"id": ID, "state": "prepared", "group": "shop", "prepared_at": TIME} | fields


def test_a_group_is_added_to_or_replaced(answer: Answer) -> None:
    """With `--add` a command names only what is new: the topics, and perhaps a part of the policy."""
    put = ("groups", "put", "shop", "--topic", "orders")
    assert run(answer, *put, "--add", "--policy", '{"max_checks": 5}').exit_code == 0
    assert run(answer, *put, "--add", "--pull").exit_code == 0
    assert run(answer, *put, "--pull").exit_code == 0
    assert [method for method, _ in answer.asked] == ["PATCH", "PATCH", "PUT"]
    pull = {"topics": ["orders"], "check": {"mode": "pull"}}
    assert [json.loads(body) for body in answer.received] == [
        {"topics": ["orders"], "policy": {"max_checks": 5}},
        pull,
        pull,
    ]
    for refused in (put, (*put, "--add", "--pull", "--check-url", "http://shop:9000/check")):
        assert "either --check-url or --pull" in run(answer, *refused).output


def test_a_remark_is_sent_with_an_action(answer: Answer) -> None:
    answer.set(transaction())
    for action in ("check", "resume"):
        assert run(answer, "transactions", action, ID, "--remark", "mended").exit_code == 0
    assert [json.loads(body) for body in answer.received] == [{"remark": "mended"}] * 2


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_text_of_others_is_shown_and_neither_obeyed_nor_lost(answer: Answer, text: str) -> None:
    """In a value, a remark, a name and an error: every printed line has only printable characters."""
    answer.set(transaction(messages=[{"topic": "orders", "value": text}], remark=text, **{text: "name"}))
    shown = run(answer, "transactions", "show", ID)
    answer.set({"transactions": [transaction(cause=text)]})
    listed = run(answer, "transactions", "list")
    answer.set({"detail": text, "errors": [{"field": text, "detail": f"not {text}"}]}, status=422)
    refused = run(answer, "transactions", "check", ID)

    assert (shown.exit_code, listed.exit_code, refused.exit_code) == (0, 0, 1)
    for output in (shown.output, listed.output, refused.output):
        assert all(line.isprintable() for line in output.split("\n")), output
        for word in ("[/etc/passwd]", "[bold]", "[/]", ":smile:"):
            assert (word in output) == (word in text)
    assert len(listed.stdout.splitlines()) == 2
    assert len(refused.stderr.splitlines()) == 2


def test_the_list_shows_why_transactions_were_parked(answer: Answer) -> None:
    reason = "older than max_age_s 4; last error: shop:9000: the connection was refused"
    answer.set({"transactions": [transaction(), transaction(id="x", state="parked", reason=reason)]})
    heading, prepared, parked = run(answer, "transactions", "list").stdout.splitlines()
    assert heading.split()[-1] == "reason"
    assert prepared.split()[-1] == "-"
    assert parked.endswith(reason)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_json_is_exact_and_printable(answer: Answer, text: str) -> None:
    """--json loses nothing, and is safe to print."""
    answer.set(transaction(remark=text))
    result = run(answer, "transactions", "show", ID, "--json")
    assert json.loads(result.stdout)["remark"] == text
    assert result.stdout.strip().isprintable()
    assert result.stdout.isascii()


def test_a_row_is_one_line_at_any_width_and_its_columns_can_be_copied(answer: Answer) -> None:
    """Nothing is wrapped or cut at 80 columns; an absent value keeps its column."""
    long = "g" * 100
    rows = [transaction(next_check_at=TIME, checks=3, topics=["orders", "ä" * 200]), transaction(id="x", group=long)]
    answer.set({"transactions": rows, "next": "a b"})
    program = [sys.executable, "-m", "halfway.app.cli", "transactions", "list"]
    main, terminal = pty.openpty()
    try:
        termios.tcsetwinsize(terminal, (24, 80))
        environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        done = subprocess.run(
            program,
            env=environment | {"HALFWAY_URL": answer.url, "TERM": "xterm"},
            stdin=terminal,
            stdout=terminal,
            stderr=subprocess.PIPE,
            check=True,
            timeout=GENEROUS_S,
        )
    finally:
        os.close(terminal)
    written = b""
    with contextlib.suppress(OSError), os.fdopen(main, "rb", buffering=0) as shown:  # EIO: all has been read
        while part := shown.read(65_536):
            written += part
    seen = written.decode().replace("\r\n", "\n")
    heading, first, second = seen.splitlines()
    assert heading.split() == ["id", "state", "group", "prepared_at", "checks", "next_check_at", "cause", "topics"]
    assert first.split()[:7] == [ID, "prepared", "shop", TIME, "3", TIME, "-"]
    assert "ä" * 200 in first
    assert second.split() == ["x", "prepared", long, TIME, "-", "-", "-", "-"]
    assert first.index("prepared") == heading.index("state")
    assert b"--cursor 'a b'" in done.stderr, "not among the rows"


def test_a_very_long_value_is_cut_and_says_by_how_much(answer: Answer) -> None:
    """One payload does not fill the screen; --json has all of it."""
    answer.set(transaction(messages=[{"value": "v" * 64_000}, {"value": "short"}]))
    result = run(answer, "transactions", "show", ID)
    assert len(result.stdout) < 5_000
    assert "more characters: --json shows all" in result.stdout
    assert "short" in result.stdout
    assert len(run(answer, "transactions", "show", ID, "--json").stdout) > 64_000


NOT_HALFWAY = {
    "a list": b"[]",
    "a number": b"5",
    "a page": b"<html>welcome</html>",
    "not UTF-8": b'{"id": "\xff\xfe"}',
    "nested without end": b"[" * 100_000,
    "a list of the wrong things": b'{"transactions": [1, "two"], "groups": [null]}',
    "no list": b'{"transactions": {}, "groups": 7}',
}


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("body", NOT_HALFWAY.values(), ids=NOT_HALFWAY)
def test_what_is_no_answer_of_halfway_ends_the_command_with_a_message(answer: Answer, body: bytes, status: int) -> None:
    """Status 1, one line with the cause, and nothing printed as if it were an answer."""
    answer.set(body, status)
    for command in (("transactions", "list"), ("groups", "list")):
        result = run(answer, *command)
        assert result.exit_code == 1
        assert result.stdout == ""
        assert "HALFWAY_URL" in result.stderr or result.stderr == "halfway: 500: no detail\n"
        assert len(result.stderr.splitlines()) == 1


def test_a_redirect_is_named_and_not_followed(answer: Answer) -> None:
    """A redirected end would arrive as a GET, and a token might go to another server."""
    answer.status, answer.headers = 302, {"Location": f"{answer.url}/other"}
    result = run(answer, "transactions", "end", ID, "commit")
    assert result.exit_code == 1
    assert f"redirects to {answer.url}/other" in result.stderr
    assert len(answer.asked) == 1


@pytest.mark.parametrize("token", ["secret\n", "sec\rret", "secret\x00", "sécret", "sec ret", "secret\ud800"])
def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(answer: Answer, token: str) -> None:
    """A token from an env file may end with a line break, unlike one from `$(cat file)`."""
    result = CliRunner().invoke(halfway, ["transactions", "list", "--url", answer.url, "--token", token])
    assert result.exit_code == 1, result.exc_info
    assert "HALFWAY_TOKEN" in result.stderr
    assert "cret" not in result.stderr
    assert answer.asked == []


def test_a_token_may_be_in_a_file(answer: Answer, tmp_path: Path) -> None:
    """As for other secrets: white space around it is ignored, and what is wrong is named. The option overrides it."""
    file = tmp_path / "token"
    file.write_text("key-1\n")
    answer.set({"transactions": []})
    listing = ["transactions", "list", "--url", answer.url]
    from_file = {"HALFWAY_TOKEN_FILE": str(file), "HALFWAY_TOKEN": None}

    assert CliRunner().invoke(halfway, listing, env=from_file).exit_code == 0
    assert CliRunner().invoke(halfway, [*listing, "--token", "key-2"], env=from_file).exit_code == 0
    assert answer.authorization == ["Bearer key-1", "Bearer key-2"]
    both = CliRunner().invoke(halfway, listing, env=from_file | {"HALFWAY_TOKEN": "key-3"})
    file.write_text("\n")
    empty = CliRunner().invoke(halfway, listing, env=from_file)
    file.unlink()
    missing = CliRunner().invoke(halfway, listing, env=from_file)

    assert [result.exit_code for result in (both, empty, missing)] == [1, 1, 1]
    assert "HALFWAY_TOKEN and HALFWAY_TOKEN_FILE are both set" in both.stderr
    assert f"HALFWAY_TOKEN_FILE {str(file)!r} is empty" in empty.stderr
    assert f"cannot read HALFWAY_TOKEN_FILE {str(file)!r}: No such file" in missing.stderr
    assert len(answer.asked) == 2
    load({"HALFWAY_TOKEN_FILE": "x"})


def test_a_refusal_without_a_valid_key_names_where_a_key_is_set(answer: Answer) -> None:
    answer.set({"detail": "the request has no key", "error_code": "unauthenticated"}, status=401)
    result = run(answer, "groups", "list")
    assert result.exit_code == 1
    assert "401: the request has no key" in result.stderr
    assert "HALFWAY_TOKEN" in result.stderr
    assert "--token" in result.stderr


@pytest.mark.parametrize(
    "arguments,option,variable",
    [
        (("groups", "list"), "--url", "HALFWAY_URL"),
        (("transactions", "show", ID), "--url", "HALFWAY_URL"),
        (("topics", "shards"), "--health-url", "HALFWAY_HEALTH_URL"),
    ],
)
def test_the_other_port_of_halfway_is_named_with_the_option_to_correct(
    answer: Answer, arguments: tuple[str, ...], option: str, variable: str
) -> None:
    """The API's port and the health port answer an unknown path alike; so may another server, without JSON."""
    for body in ({"detail": "this port serves others", "error_code": "unknown_path"}, b"<html>"):
        answer.set(body, status=404)
        result = run(answer, *arguments, option, answer.url)
        assert result.exit_code == 1
        assert answer.url in result.stderr
        assert f"is {option} ({variable}) the URL of" in result.stderr
    result = run(answer, *arguments, option, "nothing")
    assert f"{option} ({variable})" in result.stderr


@pytest.mark.parametrize(
    "url", ["", "nothing", "ftp://host", "http://", "http://[::1", "http://h:99999", "http://h/?a=b", "http://a\x1b[1m"]
)
def test_a_url_that_is_none_is_named(url: str) -> None:
    """Instead of a traceback from the client."""
    result = CliRunner().invoke(halfway, ["transactions", "list", "--url", url])
    assert result.exit_code == 1, result.exc_info
    named = "HALFWAY_URL" in result.stderr and "is not a URL such as" in result.stderr and url[:6] in result.stderr
    assert named or "did not answer" in result.stderr
    assert all(line.isprintable() for line in result.stderr.split("\n"))


def test_a_password_in_the_url_is_not_shown() -> None:
    """Not even if nobody answers."""
    for url, problem in (
        ("http://me:open-sesame@127.0.0.1:1", "did not answer"),
        ("me:open-sesame@nothing", "is not a URL"),
    ):
        result = CliRunner().invoke(halfway, ["transactions", "list", "--url", url])
        assert result.exit_code == 1
        assert problem in result.stderr
        assert "sesame" not in result.stderr
        assert "ssl:" not in result.stderr, "a URL without TLS"


@pytest.mark.parametrize("name", [".", "..", "", "a\udcffb"])
def test_a_name_that_no_path_can_hold_asks_nothing(answer: Answer, name: str) -> None:
    """`..` would request another path."""
    for command in (("transactions", "show"), ("groups", "delete")):
        result = run(answer, *command, name)
        assert result.exit_code == 1
        assert result.stderr.startswith("halfway: ")
    assert answer.asked == []


def test_every_other_name_is_one_part_of_the_path(answer: Answer) -> None:
    """Whatever characters it contains."""
    answer.set({})
    run(answer, "transactions", "show", "../a?b#c%2F")
    assert answer.asked == [("GET", "/v1/transactions/..%2Fa%3Fb%23c%252F")]


@pytest.mark.parametrize(
    "command",
    [
        ["audit-log", "--since-s"],
        ["keys", "create", "group", "shop", "--expires-in"],
        ["keys", "rotate", "AbCdEf123456", "--expires-in"],
        ["keys", "rotate", "AbCdEf123456", "--keep"],
        ["top", "--interval"],
        ["transactions", "list", "--older-than"],
        ["transactions", "list", "--younger-than"],
        ["transactions", "bulk", "resume", "--older-than"],
        ["transactions", "bulk", "resume", "--rate"],
    ],
    ids=lambda command: f"{command[0]} {command[1].removeprefix('--')} {command[-1]}",
)
def test_a_number_that_is_none_is_refused_by_the_name_of_its_option(command: list[str]) -> None:
    """Nothing is sent."""
    for number in ("nan", "inf", "-inf", "-1", "soon"):
        result = CliRunner().invoke(halfway, [*command, number])
        assert result.exit_code == 2, result.output
        assert f"Invalid value for '{command[-1]}'" in result.stderr
        assert number in result.stderr


def test_an_argument_that_is_not_utf_8_is_named(answer: Answer) -> None:
    """Because a query contains text."""
    result = run(answer, "transactions", "list", "--key", "a\udcffb")
    assert result.exit_code == 1
    assert "not UTF-8" in result.stderr


def variables(command: click.Command) -> set[str]:
    """Return the variables that provide options of a command and its subcommands."""
    own = {option.envvar for option in command.params if isinstance(option.envvar, str)}
    below = command.commands.values() if isinstance(command, click.Group) else ()
    return own.union(*map(variables, below))


def test_a_variable_of_the_command_line_is_no_unknown_setting() -> None:
    """One environment serves `serve`, `topics` and the operator's commands."""
    names = variables(halfway)
    assert {"HALFWAY_URL", "HALFWAY_TOKEN"} <= names <= NOT_SETTINGS
    load(dict.fromkeys(names, "x"))


def command(arguments: str, url: str) -> str:
    return f"HALFWAY_URL={url} exec {sys.executable} -m halfway.app.cli {arguments}"


def shell(line: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["bash", "-c", line], capture_output=True, check=False, timeout=GENEROUS_S)


def test_a_reader_that_goes_away_ends_the_command_in_silence(answer: Answer) -> None:
    """For example `| head -1`."""
    answer.set({"transactions": [transaction(topics=["t" * 240] * 8) for _ in range(1_000)]})
    done = shell(f"({command('transactions list', answer.url)}) | head -1")
    assert done.stdout.startswith(b"id ")
    assert done.stderr == b""


def test_a_full_disk_and_a_closed_output_are_no_tracebacks(answer: Answer) -> None:
    """A failed write is reported, with status 1; a closed output is not an error."""
    answer.set({"transactions": [transaction()]})
    full = shell(command("transactions list >/dev/full", answer.url))
    assert (full.returncode, full.stderr) == (1, b"halfway: cannot write the output: No space left on device\n")
    closed = shell(command("transactions list >&- 2>&-", answer.url))
    assert (closed.returncode, closed.stdout, closed.stderr) == (0, b"", b"")


def test_a_terminal_without_unicode_gets_escapes(answer: Answer) -> None:
    """A name that the encoding does not support causes no traceback."""
    answer.set({"groups": [{"group": "größe \u65e5"}]})
    done = shell("PYTHONIOENCODING=latin-1 " + command("groups list", answer.url))
    assert done.returncode == 0, done.stderr
    assert "größe \\u65e5".encode("latin-1") in done.stdout


def test_shards_that_an_instance_cannot_acquire_are_listed(answer: Answer) -> None:
    """With the time, the error and the remedy, whether the instance is ready or not; the exit status is for scripts."""
    lacking = {"shard": 3, "since": TIME, "tries": 2, "error": "folding: held", "remedy": "look for it"}
    arguments = ("topics", "shards", "--health-url", answer.url)
    for status in (200, 503):
        answer.set({"status": "ok", "reasons": [], "not_acquired": [lacking]}, status=status)
        shown = run(answer, *arguments)
        assert shown.exit_code == 1
        assert all(str(value) in shown.stdout for value in lacking.values())
    answer.set({"status": "ok", "reasons": [], "not_acquired": []})
    shown = run(answer, *arguments)
    assert (shown.exit_code, answer.url in shown.stdout) == (0, True)
    assert answer.asked[-1] == ("GET", "/health/ready")


def test_a_certificate_of_an_unknown_authority_is_told_with_the_remedy(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "own")
    context = authority.server("DNS:localhost")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept_handshake() -> None:
            with contextlib.suppress(OSError), context.wrap_socket(listener.accept()[0], server_side=True) as told:
                told.recv(1)

        answering = threading.Thread(target=accept_handshake)
        answering.start()
        url = f"https://localhost:{listener.getsockname()[1]}"
        result = CliRunner().invoke(halfway, ["groups", "list", "--url", url], env={"HALFWAY_TOKEN": ""})
        answering.join()
    assert result.exit_code == 1
    assert "SSL_CERT_FILE" in result.stderr


async def test_a_misspelt_group_is_named_before_any_is_refused() -> None:
    async with RestWorld() as world:
        await world.put_shop()
        ended = await asyncio.to_thread(
            CliRunner().invoke, halfway, ["groups", "refuse", "shop", "shpo"], env={"HALFWAY_URL": world.url}
        )
    assert (ended.exit_code, "are refused" in ended.stdout) == (1, False)
    assert ended.stderr.startswith("halfway: 404: ")
    assert "shpo" in ended.stderr


@pytest.mark.parametrize(
    "words, field, once",
    [
        (["groups", "put", "shop", "--add", "--check-url", "http://shop:9000/check"], "topics", "is new"),
        (["transactions", "show", "a b"], "id", "is not valid"),
    ],
)
async def test_one_wrong_field_is_told_once(words: list[str], field: str, once: str) -> None:
    """The coordinator's text may name the field too, or not."""
    async with RestWorld() as world:
        ended = await asyncio.to_thread(CliRunner().invoke, halfway, words, env={"HALFWAY_URL": world.url})
    assert ended.stderr.startswith(f"halfway: 422: {field}: "), ended.stderr
    assert ended.stderr.count(once) == 1


async def test_top_shows_what_statistics_say() -> None:
    """Once, if the output is not a terminal."""
    async with RestWorld() as world:
        await park(3, world)
        for words in ((), ("--json",)):  # on a thread, because it calls the coordinator over HTTP
            shown = await asyncio.to_thread(CliRunner().invoke, halfway, ["top", *words, "--url", world.url])
            assert shown.exit_code == 0, shown.output
            for part in ("pending", "shop", "shards"):
                assert part in shown.output
            assert not words or json.loads(shown.output)["totals"]["parked"] == 3


def test_top_in_a_pipe_cuts_no_name(answer: Answer) -> None:
    group, url = "a-group-with-a-long-name-" + "x" * 60, "http://10.0.0.1:7080"
    warning = {"check": "topics", "detail": "by time"}
    answer.set(
        {
            "groups": [{"group": group}],
            "instances": [{"url": url, "last_failure": {"reason": "fenced"}, "warnings": [warning]}],
            "shards": [{"shard": number, "instance": url, "pending": 0} for number in range(3)],
            "failures": {"quarantined": [{"topic": "orders", "id": "t-1", "state": "refused", "detail": "too large"}]},
        }
    )
    shown = CliRunner().invoke(halfway, ["top", "--url", answer.url], env={"COLUMNS": None}).output
    assert "…" not in shown
    for part in (group, "fenced", "by time", "t-1", "too large"):
        assert shown.count(part) == 1


@pytest.mark.parametrize("text", list(HOSTILE.values()), ids=list(HOSTILE))
def test_top_obeys_nothing_that_it_shows(answer: Answer, text: str) -> None:
    statistics = {
        "at": text,
        "totals": {"pending": text},
        "away": [{"shard": 1, "instance": text, "detail": text}],
        "groups": [{"group": text, "breaker": text}],
        "instances": [{"url": text, "last_failure": {"reason": text}, "warnings": [{"check": text, "detail": text}]}],
        "shards": [{"shard": 0, "instance": text}],
        "failures": {
            "topics": [{"topic": text, "detail": text, "error_code": text}],
            "skipped": [{"topic": text, "reason": text}],
        },
    }
    answer.set(statistics)
    shown = CliRunner().invoke(halfway, ["top", "--url", answer.url])
    assert shown.exit_code == 0, shown.output
    assert all(character.isprintable() or character == "\n" for character in shown.output)
