"""What counts as a verdict: nothing but a JSON object with an `outcome` that is spelled as DESIGN section 6 says."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from halfway.domain.transaction import Outcome

MAX_REMARK_BYTES = 1024


class NotAVerdictError(Exception):
    """The answer is not a verdict; the message says why, and holds nothing of the answer itself."""


def is_json(content_type: str) -> bool:
    """Whether a media type (lower case, without parameters) is JSON."""
    return content_type == "application/json" or (
        content_type.startswith("application/") and content_type.endswith("+json")
    )


def read_verdict(body: bytes) -> tuple[Outcome, str | None]:
    """Return the outcome and the remark, cut to 1 KiB, that a body holds.

    The body is one JSON object in UTF-8 with exactly one `outcome`. Other fields are let through unread, so that a
    service may say more to its own tools; a remark that is no string is one of them.

    Raises:
        NotAVerdictError: it is anything else.

    """
    try:
        answer = json.loads(body.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_constant)
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
    if not isinstance(outcome, str) or outcome not in set(Outcome):
        raise NotAVerdictError("the outcome is not commit, rollback or unknown")
    return Outcome(outcome), _remark(answer.get("remark"))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if sum(name == "outcome" for name, _ in pairs) > 1:
        raise NotAVerdictError("the body has more than one outcome")
    return dict(pairs)


def _no_constant(name: str) -> NoReturn:
    raise NotAVerdictError(f"the body has {name}, which JSON does not know")


def _remark(remark: object) -> str | None:
    if not isinstance(remark, str):
        return None
    return remark.encode("utf-8", "replace")[:MAX_REMARK_BYTES].decode("utf-8", "ignore")
