"""Logs with structlog: a constant event name and fields. Secrets are redacted by their type and by the field's name."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import MutableMapping
from typing import Any, Final

import structlog
from pydantic import SecretBytes, SecretStr

from halfway.runtime.terminal import complain, printable

log = structlog.get_logger(__name__)

REDACTED: Final = "**********"
_SECRET_WORDS: Final = ("password", "secret", "token", "credential", "authorization", "api_key", "jaas")


def redact(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replace every value that is a secret according to its type or the name of its field."""
    for name, value in event.items():
        if isinstance(value, SecretStr | SecretBytes) or any(word in name.lower() for word in _SECRET_WORDS):
            event[name] = REDACTED
    return event


def escape(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escape control characters, because fields contain text of clients and endpoints."""
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = "\n".join(map(printable, value.split("\n"))) if name == "exception" else printable(value)
    return event


def log_start_failure(detail: str, *, form: str) -> None:
    """Say why the start has failed, in the format of the log: as JSON it is a line like any other."""
    if form == "json":
        log.critical("start_failed", error=detail)
    else:
        complain(detail)  # with its line breaks


def configure(*, form: str, level: str) -> None:
    """Send all logs, including those of libraries, to standard error: as JSON (one object per line) or readable."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True)
        if form == "json"
        else structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
        redact,
    ]
    last: list[structlog.typing.Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if form == "json"
        # A plain traceback: the rich one shows local variables, which may contain secrets.
        else [
            structlog.processors.format_exc_info,
            escape,
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty() and not os.environ.get("NO_COLOR")),
        ]
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # It logs the start and the end of each job, every second and for every shard.
    logging.getLogger("apscheduler").setLevel(logging.ERROR)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
