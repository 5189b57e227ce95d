"""More time for services under test: on a slow machine, the second that they have to answer a check may pass."""

import pytest

from halfway.client.checks import answers, endpoints
from tests.support.waiting import GENEROUS_S


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let checks be answered `unknown` only by decision, and not because a thread was slow to start."""
    for answer in (answers.answer_check, answers.answer_check_sync, endpoints.answer_request):
        monkeypatch.setattr(answer, "__kwdefaults__", {**(answer.__kwdefaults__ or {}), "within_s": GENEROUS_S})
    monkeypatch.setattr("halfway.client.django.ANSWER_WITHIN_S", GENEROUS_S)
