"""Deletes old rows of the inbox while the consumer runs."""

from __future__ import annotations

import logging
import random
import threading
import time

from halfway.client.cleanup_rate import BATCH, pause_s
from halfway.client.consumer.foreign_errors import loggable
from halfway.client.consumer.inbox import Inbox

log = logging.getLogger(__name__)


class Cleaning(threading.Thread):
    """Deletes old rows about every `every_s` seconds, on its own connections. One instance deletes at a time."""

    def __init__(self, inbox: Inbox, every_s: float) -> None:
        """Take the inbox and the interval in seconds."""
        super().__init__(name="halfway-inbox-cleaning", daemon=True)
        self._inbox = inbox
        self._every_s = every_s
        self._stopping = threading.Event()

    def run(self) -> None:
        """Run until stopped. Failures are logged and retried."""
        while not self._stopping.wait(self._every_s * random.uniform(0.5, 1.5)):  # noqa: S311 - instances take turns
            try:
                self._clean()
            except Exception as error:
                log.error("old rows of the inbox were not deleted", exc_info=loggable(error))  # noqa: TRY400

    def _clean(self) -> None:
        while not self._stopping.is_set():
            started = time.monotonic()
            if self._inbox.clean(BATCH) < BATCH:
                return
            self._stopping.wait(pause_s(time.monotonic() - started))

    def stop(self) -> None:
        """Stop after the current batch, and wait for it."""
        self._stopping.set()
        self.join()
