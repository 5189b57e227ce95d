"""The check endpoint as a view."""

from __future__ import annotations

from typing import Any

from django.db import connections, transaction
from django.http import HttpResponse

from halfway.client.checks.answers import ANSWER_WITHIN_S, CONTENT_TYPE, Check, DecideSync
from halfway.client.checks.endpoints import answer_request
from halfway.client.checks.verification import CheckVerifier
from halfway.client.outcome import Outcome


class DjangoChecks:
    """A view: `path("check", DjangoChecks(barrier.decide))`. It needs no CSRF token, and runs outside a transaction."""

    csrf_exempt = True

    def __init__(self, decide: DecideSync, verifier: CheckVerifier | None = None) -> None:
        """Take the function that decides checks, and the verifier of their signatures."""
        self._decide = decide
        self._verifier = verifier
        for alias in connections:  # otherwise ATOMIC_REQUESTS would hold a transaction open during the barrier's
            transaction.non_atomic_requests(alias)(self)

    def __call__(self, request: Any) -> HttpResponse:
        """Answer one request. The body is limited here, not by DATA_UPLOAD_MAX_MEMORY_SIZE."""
        # Only the transaction of a test (`TestCase`) can be open here. Other threads would not see its writes.
        in_test = any(connection.in_atomic_block for connection in connections.all(initialized_only=True))
        status, answer = answer_request(
            request.method,
            request.read,
            self._decide if in_test else self._decide_and_close,
            within_s=None if in_test else ANSWER_WITHIN_S,
            headers=request.headers,
            verifier=self._verifier,
        )
        return HttpResponse(answer, status=status, content_type=CONTENT_TYPE)

    def _decide_and_close(self, check: Check) -> Outcome:
        try:
            return self._decide(check)
        finally:
            connections.close_all()  # the connections of this thread, which ends
