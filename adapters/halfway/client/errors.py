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
    """A transaction of this client is open in this task: put all messages into one transaction.

    A bare `prepare` inside a block is allowed: whoever calls it ends its transaction.
    """


class RefusedError(HalfwayError):
    """halfway refused the call for good; to repeat it does not help."""

    in_doubt = False
    """Whether an earlier attempt of the same call, whose answer was lost, may have been carried out."""

    def __init__(self, problem: Mapping[str, Any]) -> None:
        """Take over a problem document (RFC 9457), as docs/rest.md describes it."""
        self.status = int(problem.get("status", 0))
        self.error_code = str(problem.get("error_code", "unknown"))
        self.detail = str(problem.get("detail", ""))
        self.errors = {str(one.get("field")): str(one.get("detail")) for one in problem.get("errors") or ()}
        """What is wrong with each field, by its JSON path."""
        fields = "".join(f"; {field}: {detail}" for field, detail in self.errors.items())
        super().__init__(f"{self.error_code}: {self.detail}{fields}")
        self.add_note(" ".join((type(self).__doc__ or "").split()))  # the remedy, in every traceback


class InvalidRequestError(RefusedError):
    """The messages or settings break a rule: `errors` names each field. Mend the call."""


class UnknownGroupError(RefusedError):
    """The group is not registered: call `register` when the service starts."""


class UnauthenticatedError(RefusedError):
    """halfway wants a valid key: give the group's as `key`, or as HALFWAY_CLIENT_KEY in the environment."""


class ForbiddenError(RefusedError):
    """The key does not allow this call: `detail` says whose it is and what is needed.

    A group's key cannot register its group for the first time, nor add a topic: `start` and `register` raise this until
    an operator has run the command in `detail`.
    """


class NotHalfwayError(RefusedError):
    """Something else than halfway's REST answers at the URL: give the coordinator's, such as http://halfway:8080."""


class PreparesRejectedError(RefusedError):
    """The coordinator takes no new transactions now, because its operator said so; ends still work."""


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
    "unauthenticated": UnauthenticatedError,
    "prepares_rejected": PreparesRejectedError,
    "unknown_path": NotHalfwayError,
}
_BY_STATUS: Final[dict[object, type[RefusedError]]] = {
    401: UnauthenticatedError,
    403: ForbiddenError,
    **dict.fromkeys((400, 413, 415, 422), InvalidRequestError),
}
"""Of problems whose code is not among them, and of answers of something before halfway."""


NOT_HALFWAY: Final = "not_halfway"
"""The code that the client gives to an answer that has none of halfway's."""


def refused(problem: Mapping[str, Any], *, in_doubt: bool = False) -> RefusedError:
    """Return the error for a problem document."""
    code = str(problem.get("error_code"))
    otherwise = NotHalfwayError if code == NOT_HALFWAY else RefusedError
    error = (_BY_CODE.get(code) or _BY_STATUS.get(problem.get("status"), otherwise))(problem)
    error.in_doubt = in_doubt
    return error
