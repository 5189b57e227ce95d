"""The check endpoint as a view."""

from __future__ import annotations

from typing import Any

from django.db import connections, transaction
from django.http import HttpResponse

from halfway.client.checks import CONTENT_TYPE, DecideSync
from halfway.client.endpoints import answer_request


class DjangoChecks:
    """A view: `path("check", DjangoChecks(barrier.decide))`; it needs no CSRF token and is in no transaction."""

    csrf_exempt = True

    def __init__(self, decide: DecideSync) -> None:
        """Take what answers a check."""
        self._decide = decide
        for alias in connections:  # else ATOMIC_REQUESTS would hold a transaction open beside the barrier's
            transaction.non_atomic_requests(alias)(self)

    def __call__(self, request: Any) -> HttpResponse:
        """Answer one request; the body is bounded here, not by DATA_UPLOAD_MAX_MEMORY_SIZE."""
        status, answer = answer_request(request.method, request.read, self._decide)
        return HttpResponse(answer, status=status, content_type=CONTENT_TYPE)
