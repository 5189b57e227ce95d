"""Logs: JSON lines with an event and fields, and no secret in them."""

import json
import subprocess
import sys

SCRIPT = """
import logging, structlog
from pydantic import SecretStr
from halfway.runtime.logging import configure
configure(form="json", level="info")
log = structlog.get_logger("test")
log.info("joined", sasl_password="open sesame", given=SecretStr("open sesame"), shard=3)
log.debug("not shown")
logging.getLogger("library").warning("a library speaks")
"""


def test_secrets_are_redacted_by_name_and_by_type() -> None:
    """Every line is one JSON object; libraries' lines too; a secret's value is nowhere."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["event"] for line in lines] == ["joined", "a library speaks"]
    assert lines[0]["shard"] == 3
    assert "open sesame" not in done.stderr


CONSOLE = """
import structlog
from halfway.runtime.logging import configure
configure(form="console", level="info")
log = structlog.get_logger("test")
log.info("refused", remark="\\x1b]0;title\\x07 \\u202egnp.exe\\na line of its own", errors=["\\x1b[31m"])
def fail(password):
    raise ValueError("\\x1b[31mred")
try:
    fail("open sesame")
except ValueError:
    log.exception("failed")
"""


def test_the_console_obeys_nothing_in_a_field_and_shows_no_local_variable() -> None:
    """Fields and errors hold what clients and endpoints sent; a traceback's variables may hold secrets."""
    done = subprocess.run([sys.executable, "-c", CONSOLE], capture_output=True, text=True, check=True, timeout=60)
    assert all(line.isprintable() for line in done.stderr.split("\n")), done.stderr
    first, *traceback = done.stderr.splitlines()
    for shown in (r"x1b]0;title", r"x07 ", r"u202egnp.exe", r"na line of its own"):
        assert "\\" + shown in first
    assert any("ValueError" in line for line in traceback)
    assert "sesame" not in done.stderr.replace('fail("open sesame")', "")
