"""The errors that a caller of the client can get; the docstring of each says what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final


class HalfwayError(Exception):
    """The root of all errors of this client."""


class ClientClosedError(HalfwayError):
    """The client is not open: use it inside `async with Halfway(...)`, or open a new one."""


class WrongEventLoopError(HalfwayError):
    """The client was opened in another event loop: open one client for each loop, or use `SyncHalfway` in threads."""


class QueueFullError(HalfwayError):
    """Too many calls of this client wait for halfway: nothing was sent. Slow down, or raise `max_waiting`."""


class UnavailableError(HalfwayError):
    """halfway gave no final answer before the deadline; the message names the last failure."""


class PrepareUnconfirmedError(UnavailableError):
    """The prepare may or may not be stored: do no local work. If it is stored, check-back resolves it."""


class EndUnconfirmedError(UnavailableError):
    """The end was not confirmed before the deadline: the local outcome stands, and check-back asks for it."""


class TransactionEndedError(HalfwayError):
    """This transaction object has sent its end already: begin a new one."""


class NestedTransactionError(HalfwayError):
    """A transaction of this client is open in this task: put all messages into one transaction."""


class RefusedError(HalfwayError):
    """halfway refused the call for good; to repeat it does not help."""

    def __init__(self, problem: Mapping[str, Any]) -> None:
        """Take over a problem document (RFC 9457), as docs/rest.md describes it."""
        self.status = int(problem.get("status", 0))
        self.error_code = str(problem.get("error_code", "unknown"))
        self.detail = str(problem.get("detail", ""))
        self.errors = {str(one.get("field")): str(one.get("detail")) for one in problem.get("errors") or ()}
        """What is wrong with each field, by its JSON path."""
        fields = "".join(f"; {field}: {detail}" for field, detail in self.errors.items())
        super().__init__(f"{self.error_code}: {self.detail}{fields}")


class InvalidRequestError(RefusedError):
    """The messages or settings break a rule: `errors` names each field. Mend the call."""


class UnknownGroupError(RefusedError):
    """The group is not registered: call `register` when the service starts."""


class ForbiddenError(RefusedError):
    """The credential does not allow this call, or the coordinator takes no new transactions now."""


class UnknownTransactionError(RefusedError):
    """halfway does not know the id. It does not mean that the transaction was rolled back."""


class IdReusedError(RefusedError):
    """The id was used for other messages: give each transaction an id of its own."""


class AlreadyEndedError(RefusedError):
    """The transaction has the opposite outcome, in `state`, for ever: compare it with your database."""

    def __init__(self, problem: Mapping[str, Any]) -> None:
        """Keep the state that stands."""
        super().__init__(problem)
        self.state = str(problem.get("state", ""))


class OutcomeExpiredError(RefusedError):
    """The transaction ended longer ago than halfway remembers outcomes. It does not mean rolled back."""


_BY_CODE: Final[dict[str, type[RefusedError]]] = {
    "unknown_group": UnknownGroupError,
    "unknown_transaction": UnknownTransactionError,
    "already_ended": AlreadyEndedError,
    "id_reused": IdReusedError,
    "outcome_expired": OutcomeExpiredError,
    "forbidden": ForbiddenError,
    "unauthorized": ForbiddenError,
    "prepares_rejected": ForbiddenError,
}
_INVALID: Final = frozenset({400, 413, 415, 422})


def refused(problem: Mapping[str, Any]) -> RefusedError:
    """Return the error for a problem document."""
    kind = _BY_CODE.get(str(problem.get("error_code")))
    if kind is None:
        kind = InvalidRequestError if problem.get("status") in _INVALID else RefusedError
    return kind(problem)
