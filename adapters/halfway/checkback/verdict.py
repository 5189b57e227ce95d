"""What counts as a verdict: a JSON object with an `outcome` that is spelled right (docs/rest.md#answer-a-check)."""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple, NoReturn

from halfway.domain.records import MAX_REMARK_BYTES
from halfway.domain.transaction import Outcome

_OUTCOMES: Final = frozenset(Outcome)


class NotAVerdictError(Exception):
    """The answer is not a verdict; the message says why, and holds nothing of the answer itself."""


class NotBoundError(NotAVerdictError):
    """The answer may belong to another question."""


def is_json(content_type: str) -> bool:
    """Whether a media type (lower case, without parameters) is JSON."""
    return content_type == "application/json" or (
        content_type.startswith("application/") and content_type.endswith("+json")
    )


class Verdict(NamedTuple):
    """The content of an answer's body; the remark is cut to 1 KiB."""

    outcome: Outcome
    remark: str | None
    bound: bool
    """Whether the body echoes the question's nonce, which binds it to this question."""


def read_verdict(body: bytes, nonce: str) -> Verdict:
    """Return the verdict that a body holds.

    The body is one JSON object in UTF-8 with exactly one `outcome`. Other fields are let through unread, so that a
    service may say more to its own tools; a remark that is no string is one of them.

    Raises:
        NotAVerdictError: it is anything else, or echoes another nonce.

    """
    try:
        answer = _DECODER.decode(body.decode("utf-8"))
    except UnicodeDecodeError:
        raise NotAVerdictError("the body is not UTF-8") from None
    except RecursionError:
        raise NotAVerdictError("the body is nested too deep") from None
    except ValueError:
        raise NotAVerdictError("the body is not one JSON document") from None
    if not isinstance(answer, dict):
        raise NotAVerdictError("the body is not a JSON object")
    if "outcome" not in answer:
        raise NotAVerdictError("the body has no outcome")
    outcome = answer["outcome"]
    # By value and type: `Outcome("commit")` would also take what merely compares equal.
    if not isinstance(outcome, str) or outcome not in _OUTCOMES:
        raise NotAVerdictError("the outcome is not commit, rollback or unknown")
    if "nonce" in answer and answer["nonce"] != nonce:
        raise NotBoundError("the nonce is that of another question")
    return Verdict(Outcome(outcome), _remark(answer.get("remark")), "nonce" in answer)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for once in ("outcome", "nonce"):
        if names.count(once) > 1:
            raise NotAVerdictError(f"the body has more than one {once}")
    return dict(pairs)


def _no_constant(name: str) -> NoReturn:
    raise NotAVerdictError(f"the body has {name}, which JSON does not know")


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_constant)


def _remark(remark: object) -> str | None:
    if not isinstance(remark, str):
        return None
    return remark.encode("utf-8", "replace")[:MAX_REMARK_BYTES].decode("utf-8", "ignore")
