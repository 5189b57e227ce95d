"""The text of an error has each cause and each field once."""

import pytest

from halfway.client.errors import error_of

OUTLIVES = "max_age_s 604800 could outlive the op topic's retention: at most 86400"


@pytest.mark.parametrize(
    "detail, errors, text",
    [
        (OUTLIVES, [("policy.max_age_s", OUTLIVES)], f"invalid_request: {OUTLIVES} (policy.max_age_s)"),
        ("group: too long", [("group", "too long")], "invalid_request: group: too long"),
        (
            "group: too long (and 1 more, in `errors`)",
            [("group", "too long"), ("id", "empty")],
            "invalid_request: group: too long (and 1 more, in `errors`); id: empty",
        ),
        ("wrong", [], "invalid_request: wrong"),
    ],
    ids=["without the field", "with the field", "two fields", "no field"],
)
def test_a_text_says_nothing_twice(detail: str, errors: list[tuple[str, str]], text: str) -> None:
    """A field and its error are added only if the detail does not have them; `errors` has all of them."""
    problem = {
        "status": 422,
        "error_code": "invalid_request",
        "detail": detail,
        "errors": [{"field": field, "detail": cause} for field, cause in errors],
    }
    error = error_of(problem)
    assert str(error) == text
    assert error.errors == dict(errors)
