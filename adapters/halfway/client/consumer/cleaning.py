"""Deleting old rows of the inbox beside the consumer."""

from __future__ import annotations

import logging
import random
import threading
import time

from halfway.client.consumer.inbox import Inbox
from halfway.client.pacing import BATCH, pause_s

log = logging.getLogger(__name__)


class Cleaning(threading.Thread):
    """Cleans the inbox about every `every_s` seconds, on connections of its own; one instance at a time does."""

    def __init__(self, inbox: Inbox, every_s: float) -> None:
        """Take the inbox and how often it is cleaned."""
        super().__init__(name="halfway-inbox-cleaning", daemon=True)
        self._inbox = inbox
        self._every_s = every_s
        self._stopping = threading.Event()

    def run(self) -> None:
        """Go on until it is stopped; what fails is logged and tried again."""
        while not self._stopping.wait(self._every_s * random.uniform(0.5, 1.5)):  # noqa: S311 - instances take turns
            try:
                self._clean()
            except Exception:
                log.exception("the inbox was not cleaned")

    def _clean(self) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            if self._inbox.clean(BATCH) < BATCH:
                return
            self._stopping.wait(pause_s(time.monotonic() - began))

    def stop(self) -> None:
        """End after the batch that is being deleted."""
        self._stopping.set()
        self.join()
