"""Logs: JSON lines with an event and fields, and no secret in them."""

import json
import os
import subprocess
import sys
from contextlib import suppress

from tests.support.waiting import GENEROUS_S

SCRIPT = """
import logging, structlog
from pydantic import SecretStr
from halfway.app.serve.process import configure
configure(level="info")
log = structlog.get_logger("test")
log.info("joined", sasl_password="open sesame", given=SecretStr("open sesame"), shard=3)
log.debug("not shown")
logging.getLogger("library").warning("a library speaks")
"""


def log_of(script: str) -> str:
    """Return the log of a program."""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=GENEROUS_S
    )
    return done.stderr


def shown_on_terminal(script: str) -> str:
    """Return what a program writes to its terminal."""
    terminal, given = os.openpty()
    # What a program writes stays in the terminal's buffer until it is read.
    plain = {**os.environ, "NO_COLOR": "1"}
    subprocess.run([sys.executable, "-c", script], stderr=given, check=True, timeout=GENEROUS_S, env=plain)
    os.close(given)
    shown = b""
    with os.fdopen(terminal, "rb", buffering=0) as reading, suppress(OSError):  # nobody writes to it any more
        while part := reading.read(65_536):
            shown += part
    return shown.decode().replace("\r\n", "\n")


def test_secrets_are_redacted_by_name_and_by_type() -> None:
    """Every line is one JSON object, also those of libraries; the value of a secret occurs nowhere."""
    told = log_of(SCRIPT)
    lines = [json.loads(line) for line in told.splitlines()]
    assert [line["event"] for line in lines] == ["joined", "a library speaks"]
    assert lines[0]["shard"] == 3
    assert "open sesame" not in told


CONSOLE = """
import structlog
from halfway.app.serve.process import configure
configure(level="info")
log = structlog.get_logger("test")
log.info("refused", remark="\\x1b]0;title\\x07 \\u202egnp.exe\\na line of its own", errors=["\\x1b[31m"])
def fail(password):
    raise ValueError("\\x1b[31mred")
try:
    fail("open sesame")
except ValueError:
    log.exception("failed")
"""


def test_a_start_that_fails_keeps_its_line_breaks_on_a_terminal() -> None:
    """Elsewhere it is a line of JSON like any other."""
    script = "from halfway.app.serve.process import log_start_failure as fail; fail('one\\ntwo')"
    assert shown_on_terminal(script) == "halfway: one\ntwo\n"


def test_the_terminal_obeys_nothing_in_a_field_and_shows_no_local_variable() -> None:
    """Fields and errors contain text of clients and endpoints; the variables of a traceback may contain secrets."""
    told = shown_on_terminal(CONSOLE)
    assert all(line.isprintable() for line in told.split("\n")), told
    first, *traceback = told.splitlines()
    for shown in (r"x1b]0;title", r"x07 ", r"u202egnp.exe", r"na line of its own"):
        assert "\\" + shown in first
    assert any("ValueError" in line for line in traceback)
    assert "sesame" not in told.replace('fail("open sesame")', "")
