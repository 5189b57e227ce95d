"""Errors of a request before the service sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfway.domain.errors import HalfwayError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence


class MalformedJsonError(HalfwayError):
    """The body is not one JSON document in UTF-8."""

    code = "malformed_json"


class EmptyBodyError(HalfwayError):
    """The request needs a body of JSON, and has none."""

    code = "empty_body"


class BodyTooLargeError(HalfwayError):
    """The body is larger than the limit."""

    code = "body_too_large"

    def __init__(self, limit: int) -> None:
        """Say the limit in bytes, and how to raise it."""
        super().__init__(
            f"the body is larger than the limit of {limit} bytes: send less, or raise HALFWAY_MAX_BODY_BYTES",
            limit=limit,
        )


class BodyTimeoutError(HalfwayError):
    """The body did not arrive in time."""

    code = "body_timeout"


class UnsupportedMediaTypeError(HalfwayError):
    """The body is not sent as `application/json`, or is compressed."""

    code = "unsupported_media_type"


class BadHttpError(HalfwayError):
    """The request is not legal HTTP/1.1, or its line or headers are longer than 8 KiB."""

    code = "bad_http"


class UnknownPathError(HalfwayError):
    """There is nothing at this path: GET /openapi.json lists what there is."""

    code = "unknown_path"


class MethodNotAllowedError(HalfwayError):
    """The path does not take this method."""

    code = "method_not_allowed"

    def __init__(self, method: str, allowed: Sequence[str]) -> None:
        """Say what the path takes."""
        self.allowed = ", ".join(allowed)
        super().__init__(f"the path does not take {method[:20]}: {self.allowed}", allowed=list(allowed))


class UpgradeRequiredError(HalfwayError):
    """This path takes only WebSocket handshakes with a subprotocol that the server knows."""

    code = "upgrade_required"


class InternalError(HalfwayError):
    """Something went wrong here that is not the request's fault: the log has it under the request's id."""

    code = "internal"


def invalid(errors: Sequence[tuple[str, str]], *, noun: str = "the body") -> InvalidRequestError:
    """Return one error that names every wrong field, from (field as a JSON path, the fault and the remedy).

    `noun` is what the text calls the whole, which has the empty path.
    """
    first_field, first_detail = errors[0]
    more = f" (and {len(errors) - 1} more, in `errors`)" if len(errors) > 1 else ""
    error = InvalidRequestError(f"{first_field or noun}: {first_detail}{more}", field=first_field)
    error.fields["errors"] = [{"field": field, "detail": detail} for field, detail in errors]
    return error
