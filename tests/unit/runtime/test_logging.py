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
