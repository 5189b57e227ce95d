"""Time for services under test: the second that they have for the answer to a check may pass on a slow machine."""

import pytest

from halfway.client import checks, endpoints
from tests.support.waiting import GENEROUS_S


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have checks answered `unknown` by what is decided, and not because its thread was slow to run."""
    for answer in (checks.answer_check, checks.answer_check_sync, endpoints.answer_request):
        monkeypatch.setattr(answer, "__kwdefaults__", {**(answer.__kwdefaults__ or {}), "within_s": GENEROUS_S})
    monkeypatch.setattr("halfway.client.django.endpoint.ANSWER_WITHIN_S", GENEROUS_S)
