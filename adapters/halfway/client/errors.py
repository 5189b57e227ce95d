"""The errors of the client. The docstring of each error says what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import inf
from typing import Any, ClassVar, Final


class HalfwayError(Exception):
    """The base class of all errors of this client."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a pool's process hand it over: `multiprocessing.Pool` waits for ever for an error that it cannot read.

        Exception gives its text to the constructor, which may take something else.
        """
        return type(self).__new__, (type(self), *self.args), self.__dict__


class InvalidSettingError(HalfwayError, ValueError):
    """A setting is not valid; the message names it, its value, and what to give."""


def demand(
    is_valid: object, name: str, value: object, expected: str, error: type[HalfwayError] = InvalidSettingError
) -> None:
    """Raise an error unless a value that a caller has just given is valid: later nobody may see it."""
    if not is_valid:
        raise error(f"{name} is {ascii(value)[:80]}: give {expected}")


def matches(pattern: re.Pattern[str], value: object) -> bool:
    """Return whether a value is a text that a pattern matches as a whole."""
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def demand_positive(least: float = 0, **numbers: object) -> None:
    """Raise InvalidSettingError for what is no finite number above 0, or of at least `least`."""
    for name, number in numbers.items():
        is_valid = isinstance(number, int | float) and max(0, least) <= number < inf and number != 0
        demand(is_valid, name, number, f"a number of at least {least:g}" if least else "a number above 0")


class ClientClosedError(HalfwayError):
    """The client is not open: use it inside `async with Halfway(...)`, or open a new one."""


class WrongEventLoopError(HalfwayError):
    """The client was opened in another event loop: open one client per loop, or use `SyncHalfway` in threads."""


class QueueFullError(HalfwayError):
    """Too many calls of this client wait for halfway: nothing was sent. Slow down, or raise `max_waiting`."""


class UnavailableError(HalfwayError):
    """halfway gave no final answer before the deadline; the message names the last failure."""


class PrepareUnconfirmedError(UnavailableError):
    """The prepare may or may not be stored: do no local work. If it is stored, check-back resolves it."""


class EndUnconfirmedError(UnavailableError):
    """The end was not confirmed before the deadline: the local outcome is final, and check-back asks for it."""


class TransactionEndedError(HalfwayError):
    """This transaction object has already sent its end: begin a new one."""


class MissingRowError(HalfwayError):
    """The local transaction ended without the row of the barrier, or of the inbox.

    Either the block has not called `barrier.insert`, or the database has rolled the row back because of an error that
    the block or the handler caught. The messages are not sent without the row, and a message without it has no effect.
    If the block has no local transaction, end it with `commit`.
    """


class NestedTransactionError(HalfwayError):
    """A transaction of this client is open in this task: put all messages into one transaction.

    A bare `prepare` inside a block is allowed: its caller ends the transaction.
    """


class RefusedError(HalfwayError):
    """halfway refused the call permanently; a repeat does not help."""

    remedy: ClassVar[str] = ""
    """What the text adds to the answer of halfway, which does not know the names of this client."""
    in_doubt = False
    """Whether an earlier attempt of the same call, whose answer was lost, may have been carried out."""

    def __init__(self, problem: Mapping[str, Any]) -> None:
        """Read a problem document (RFC 9457), as described in docs/api.md."""
        self.status = int(problem.get("status", 0))
        self.error_code = str(problem.get("error_code", "unknown"))
        self.detail = str(problem.get("detail", ""))
        self.errors = {str(error.get("field")): str(error.get("detail")) for error in problem.get("errors") or ()}
        """The error of each wrong field, by its JSON path."""
        super().__init__(f"{self.error_code}: {self.detail}{self._details_of_fields()}{self.remedy}")
        self.add_note(" ".join((type(self).__doc__ or "").split()))  # the remedy, in every traceback

    def _details_of_fields(self) -> str:
        """Return what `errors` adds to `detail`, which may contain a field's name and its error already."""
        parts = []
        for field, detail in self.errors.items():
            if detail not in self.detail:
                parts.append(f"; {field}: {detail}")
            elif field not in self.detail:
                parts.append(f" ({field})")
        return "".join(parts)


class InvalidRequestError(RefusedError):
    """The messages or settings break a rule: `errors` names each wrong field. Correct the call."""


class UnknownGroupError(RefusedError):
    """The group is not registered: call `register` when the service starts."""


class UnauthenticatedError(RefusedError):
    """halfway requires a valid key: give the group's key as `key`, or in HALFWAY_CLIENT_KEY(_FILE)."""

    remedy = " (in the Python client: key= or HALFWAY_CLIENT_KEY(_FILE))"


class ForbiddenError(RefusedError):
    """The key does not allow this call: `detail` names its owner and the permission that is needed.

    A group's key cannot register its group for the first time, nor add a topic: `start` and `register` raise this until
    an operator has run the command in `detail`.
    """


class NotHalfwayError(RefusedError):
    """The server at the URL is not halfway: give the URL of the coordinator, such as http://halfway:8080."""


class PreparesRejectedError(RefusedError):
    """The coordinator currently accepts no new transactions, because its operator set this; ends still work."""


class UnknownTransactionError(RefusedError):
    """halfway does not know the id. This does not mean that the transaction was rolled back."""


class IdReusedError(RefusedError):
    """The id was used for other messages: give each transaction its own id."""


class IdInFutureError(InvalidRequestError):
    """The id is born more than a minute after now: correct the clock that it was made by, or that of halfway."""


class AlreadyEndedError(RefusedError):
    """The transaction has the opposite outcome, in `state`, and it is final: compare it with your database."""

    def __init__(self, problem: Mapping[str, Any]) -> None:
        super().__init__(problem)
        self.state = str(problem.get("state", ""))


class OutcomeExpiredError(RefusedError):
    """The id is so old that halfway no longer has its outcome, or it never existed. This does not mean rolled back.

    A prepare is refused too, because the id may have been decided: prepare soon after the time that the id contains.
    """


_BY_CODE: Final[dict[str, type[RefusedError]]] = {
    "unknown_group": UnknownGroupError,
    "unknown_transaction": UnknownTransactionError,
    "already_ended": AlreadyEndedError,
    "id_reused": IdReusedError,
    "outcome_expired": OutcomeExpiredError,
    "id_in_future": IdInFutureError,
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
"""The errors for other codes, and for answers of a proxy."""


NOT_HALFWAY: Final = "not_halfway"
"""The client's code for an answer without an error code of halfway."""


def error_of(problem: Mapping[str, Any], *, in_doubt: bool = False) -> RefusedError:
    code = str(problem.get("error_code"))
    default = NotHalfwayError if code == NOT_HALFWAY else RefusedError
    error = (_BY_CODE.get(code) or _BY_STATUS.get(problem.get("status"), default))(problem)
    error.in_doubt = in_doubt
    return error


AWAY: Final = (PrepareUnconfirmedError, QueueFullError, NotHalfwayError)
"""The errors of a prepare that say that halfway is away."""


def is_refused_for_its_time(error: RefusedError) -> bool:
    """Return whether halfway has not accepted an id, and would accept another one that is born now."""
    return isinstance(error, IdInFutureError | OutcomeExpiredError) and not error.in_doubt
