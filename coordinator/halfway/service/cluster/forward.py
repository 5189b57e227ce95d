"""Forwards calls to the owner of a shard that is not served here: one hop, never more.

See docs/protocol.md#any-instance-may-be-asked.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from halfway.domain.errors import (
    EndUnconfirmedError,
    HalfwayError,
    NotServedError,
    OutcomeUnknownError,
    PeerLostError,
    ShardUnavailableError,
)
from halfway.service.records.peer_calls import EndCall, PeerCall, PrepareCall, ResumeCall

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from halfway.domain.principal import Principal
    from halfway.service.ports import Observer, OwnerHint, Owners, Peers
    from halfway.service.shards.shard_table import ShardTable

_HELD_BACK_S = 0.25
"""How much earlier the deadline of a forwarded call is than its caller's, to leave time for the answer."""

T = TypeVar("T")


class NoOwners:
    """The port `Owners` of a single instance."""

    def find(self, shard: int) -> OwnerHint | None:  # noqa: ARG002 - the port's
        """Return None."""
        return None


class NoPeers:
    """The port `Peers` of an instance that forwards nothing."""

    async def ask(self, owner: OwnerHint, call: PeerCall, *, deadline: float, principal: Principal) -> Any:  # noqa: ARG002
        """Refuse every call."""
        raise ShardUnavailableError("this instance forwards nothing: set HALFWAY_PEER_CREDENTIAL on every instance")


class Forwarder:
    """Finds owners and calls them. An unknown outcome raises the same errors as for a call to this instance."""

    def __init__(self, shards: ShardTable, owners: Owners, peers: Peers, observer: Observer) -> None:
        """Store the parts."""
        self._shards = shards
        self._owners = owners
        self._peers = peers
        self._observer = observer
        self.is_single = isinstance(peers, NoPeers)
        """Whether this instance forwards nothing."""
        self._next_owner = 0

    def begin(
        self,
        requests: Sequence[Any],
        call: Callable[..., PeerCall],
        deadline: float,
        principal: Principal,
        index: int,
        error: NotServedError,
    ) -> asyncio.Task[Any] | None:
        """Forward the request at an index to the owner of the shard that `error` names; None on a single instance."""
        if self.is_single:
            return None
        forwarded = self._forward(error, call(request=requests[index]), deadline=deadline, principal=principal)
        return asyncio.get_running_loop().create_task(forwarded)

    async def run_or_forward(
        self, here: Awaitable[T], call: Callable[[], PeerCall], deadline: float, principal: Principal
    ) -> T:
        """Return the result of `here`, or the answer of the shard's owner if the shard is not served here."""
        try:
            return await here
        except NotServedError as error:
            forwarded: T = await self._forward(error, call(), deadline=deadline, principal=principal)
            return forwarded

    async def _forward(self, error: NotServedError, call: PeerCall, *, deadline: float, principal: Principal) -> Any:
        """Send a call to the owner of the shard that `error` names, or to any owner if it names none."""
        owner = self._any_owner() if error.shard is None else self._owners.find(error.shard)
        if owner is None:
            raise error
        return await self.ask(owner, call, deadline=deadline, principal=principal)

    async def ask(self, owner: OwnerHint, call: PeerCall, *, deadline: float, principal: Principal) -> Any:
        """Send a call to an owner and return its answer.

        Raises:
            OutcomeUnknownError, EndUnconfirmedError: there was no answer, and the call may have been done.
            ShardUnavailableError: the call was not done, or it is one that changes nothing.
            HalfwayError: any other error that the owner answers with.

        """
        loop = asyncio.get_running_loop()
        started, result = loop.time(), "done"
        # At most a quarter of the remaining time, so that the owner has some.
        until = deadline - min(_HELD_BACK_S, max(0.0, deadline - started) / 4)
        try:
            return await self._peers.ask(owner, call, deadline=until, principal=principal)
        except PeerLostError as error:
            result = error.code
            raise _unknown_outcome(call, error) from None
        except HalfwayError as error:
            result = error.code
            raise
        finally:
            self._observer.forwarded(str(type(call).__struct_config__.tag), result, loop.time() - started)

    def owner_of(self, shard: int) -> OwnerHint | None:
        """Return the owner of a shard, None if it is not known here."""
        return self._owners.find(shard)

    def others(self) -> list[OwnerHint]:
        """Return every other known owner, starting with a different one each time."""
        owners = list(dict.fromkeys(hint for shard in range(self._shards.count) if (hint := self._owners.find(shard))))
        self._next_owner += 1
        start = self._next_owner % len(owners) if owners else 0
        return [*owners[start:], *owners[:start]]

    def parts(self) -> tuple[list[int], dict[OwnerHint, list[int]]]:
        """Return the shards served here, and the other shards by owner.

        Raises:
            ShardUnavailableError: a shard has no owner now.

        """
        here: list[int] = []
        elsewhere: dict[OwnerHint, list[int]] = {}
        for number in range(self._shards.count):
            if self._shards.serves(number):
                here.append(number)
                continue
            owner = self._owners.find(number)
            if owner is None:
                raise ShardUnavailableError(
                    f"shard {number} is being recovered or moved, and this needs all shards: try again", shard=number
                )
            elsewhere.setdefault(owner, []).append(number)
        return here, elsewhere

    def _any_owner(self) -> OwnerHint | None:
        return next(iter(self.others()), None)


def _unknown_outcome(call: PeerCall, error: PeerLostError) -> HalfwayError:
    if isinstance(call, PrepareCall):
        fields = {} if call.request.id is None else {"id": call.request.id}
        return OutcomeUnknownError(
            f"the owner of its shard did not answer ({error.detail}): roll back, or send the same prepare with the "
            "same id again",
            **fields,
        )
    if isinstance(call, EndCall | ResumeCall):
        name = call.request.id if isinstance(call, EndCall) else call.id
        return EndUnconfirmedError(
            f"the owner of {name!r} did not answer ({error.detail}): send the same again, it is never done twice",
            id=name,
        )
    return ShardUnavailableError(f"the owner of a shard did not answer ({error.detail}): try again")


async def gather_all(calls: Sequence[asyncio.Task[T]]) -> list[T]:
    """Return all results; the first error cancels the others."""
    try:
        return list(await asyncio.gather(*calls))
    finally:
        for call in calls:
            call.cancel()
