"""A verdict is bound to its check, whatever an endpoint does to its connections."""

import asyncio
import contextlib
import os
import random

import pytest

from halfway.coordinator.ports import CheckReply, CheckRequest
from halfway.protocol.records import Group
from halfway.protocol.transactions import Outcome
from tests.support.hostile.adversary import Adversary
from tests.unit.checks.conftest import GROUP, local_caller
from tests.unit.checks.test_stray_answers import OTHER_GROUP

ROUNDS = int(os.environ.get("HALFWAY_TEST_ADVERSARIES", "25"))
"""The endpoints to try for either rule, with some dozens of checks each."""
AT_ONCE = 25


@pytest.mark.parametrize("demanded", [False, True], ids=["nonce echoed or not", "nonce demanded"])
async def test_no_endpoint_resolves_what_its_handler_did_not_say(demanded: bool) -> None:
    """Two groups call one address at once; each verdict is that of the handler for the same transaction.

    If the nonce is required, this holds for any bytes at any time. Otherwise it holds for everything except an answer
    without a nonce on a new connection before its check was read. HALFWAY_TEST_ADVERSARIES is the number of endpoints.
    """
    verdicts = questions = 0
    seed = random.SystemRandom().randbytes(8).hex()
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    for number in range(0, ROUNDS, AT_ONCE):
        names = [f"{seed}/{number + one}" for one in range(AT_ONCE)]
        adversaries = [Adversary.drawn(name, silent_strays=demanded) for name in names]
        for adversary, replies in zip(
            adversaries, await asyncio.gather(*(answers(one, demanded=demanded) for one in adversaries)), strict=True
        ):
            questions += adversary.questions
            for name, reply in replies:
                assert not reply.answered or reply.outcome is Outcome(adversary.truth[name]), (name, reply)
                verdicts += reply.answered and reply.outcome is not Outcome.UNKNOWN
    print(f"{questions} questions, {verdicts} verdicts")  # noqa: T201
    assert verdicts


async def answers(adversary: Adversary, *, demanded: bool) -> list[tuple[str, CheckReply]]:
    """Check every transaction, some at once and some in sequence, for two groups."""
    server = await asyncio.start_server(adversary.connected, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/check"
    replies: list[tuple[str, CheckReply]] = []

    async def ask(ids: list[str], group: Group) -> None:
        for transaction_id in ids:
            request = CheckRequest(
                check_id=f"{transaction_id}:1",
                id=transaction_id,
                group=group.name,
                prepared_at=0,
                attempt=1,
                messages=(),
            )
            replies.append((transaction_id, await caller.call(group, [url], request)))

    try:
        async with local_caller(timeout_s=5, demand_nonce=demanded) as caller:
            ids = list(adversary.truth)
            await asyncio.gather(*(ask(ids[start::6], (GROUP, OTHER_GROUP)[start % 2]) for start in range(6)))
    finally:
        server.close()
        for task in adversary.tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*adversary.tasks)
    return replies
