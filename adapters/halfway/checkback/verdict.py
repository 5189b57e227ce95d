"""Reads verdicts: a verdict is a JSON object with a valid `outcome` (docs/rest.md#answer-a-check)."""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple, NoReturn

from halfway.domain.records import MAX_REMARK_BYTES
from halfway.domain.transaction import Outcome

_OUTCOMES: Final = frozenset(Outcome)


class NotAVerdictError(Exception):
    """The answer is not a verdict. The message is the reason, and contains no part of the answer."""


class NotBoundError(NotAVerdictError):
    """The answer may belong to another request."""


def is_json(content_type: str) -> bool:
    """Return whether a media type (lower case, without parameters) is JSON."""
    return content_type == "application/json" or (
        content_type.startswith("application/") and content_type.endswith("+json")
    )


class Verdict(NamedTuple):
    """The content of an answer's body; the remark is cut to 1 KiB."""

    outcome: Outcome
    remark: str | None
    bound: bool
    """Whether the body echoes the nonce of the request, which binds the answer to it."""


def read_verdict(body: bytes, nonce: str) -> Verdict:
    """Return the verdict in a body.

    The body is one JSON object in UTF-8 with exactly one `outcome`. Other fields are ignored, so that a service can
    send more to its own tools; a remark that is not a string is ignored too.

    Raises:
        NotAVerdictError: the body is anything else, or echoes another nonce.

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
    # Compare value and type: `Outcome("commit")` would also accept an object that merely compares equal.
    if not isinstance(outcome, str) or outcome not in _OUTCOMES:
        raise NotAVerdictError("the outcome is not commit, rollback or unknown")
    if "nonce" in answer and answer["nonce"] != nonce:
        raise NotBoundError("the nonce is that of another question")
    return Verdict(Outcome(outcome), _remark(answer.get("remark")), "nonce" in answer)


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for field in ("outcome", "nonce"):
        if names.count(field) > 1:
            raise NotAVerdictError(f"the body has more than one {field}")
    return dict(pairs)


def _refuse_constant(name: str) -> NoReturn:
    raise NotAVerdictError(f"the body has {name}, which JSON does not know")


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_unique_fields, parse_constant=_refuse_constant)


def _remark(remark: object) -> str | None:
    if not isinstance(remark, str):
        return None
    return remark.encode("utf-8", "replace")[:MAX_REMARK_BYTES].decode("utf-8", "ignore")
