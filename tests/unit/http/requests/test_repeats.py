"""Names that occur twice in one object of a body."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfway.http.requests.models import BatchRequest, EndRequest, PrepareRequest, WholeBatch, WholeStreamFrame
from halfway.http.requests.validation import Validation
from halfway.protocol.errors import InvalidRequestError
from tests.support.ids import named_id

VALIDATION = Validation(internal_prefix="_halfway.")
MESSAGE = '{"topic": "t", "value": "v"}'


def fields(model: type[PrepareRequest | EndRequest | BatchRequest], body: str) -> list[str]:
    """Return the refused fields of a body, none if it is accepted."""
    try:
        VALIDATION.read(model, body.encode(), lambda request: request)
    except InvalidRequestError as error:
        named = error.fields["errors"]
        assert isinstance(named, list)
        return [one["field"] for one in named]
    return []


@pytest.mark.parametrize(
    "messages, field",
    [
        ('[{"topic": "t", "topic": "u", "value": "v"}]', "messages[0].topic"),
        (f'[{MESSAGE}, {{"topic": "t", "value": "v", "key": null, "key": "k"}}]', "messages[1].key"),
        ('[{"topic": "t", "value": {"type": "STRING", "type": "STRING", "data": "d"}}]', "messages[0].value.type"),
        ('[{"topic": "t", "value": {"type": "JSON", "data": 1, "data": 2}}]', "messages[0].value.data"),
        ('[{"topic": "t", "value": "v", "headers": [{"name": "a", "name": "b"}]}]', "messages[0].headers[0].name"),
        ('[{"topic": "t", "value": "v", "headers": [], "headers": []}]', "messages[0].headers"),
        ('[{"topic": "t", "value": "v", "partition": 1, "p\\u0061rtition": 2}]', "messages[0].partition"),
    ],
)
def test_a_repeated_name_is_found_with_its_place(messages: str, field: str) -> None:
    assert fields(PrepareRequest, f'{{"group": "g", "messages": {messages}}}') == [field]


@pytest.mark.parametrize(
    "messages",
    [
        f"[{MESSAGE}, {MESSAGE}]",
        '[{"topic": "topic", "value": "value", "key": "key"}]',
        '[{"topic": "t", "value": "{\\"topic\\": 1, \\"topic\\": 2}"}]',
        '[{"topic": "t", "value": {"type": "JSON", "data": {"a": 1, "a": 2, "type": "type"}}}]',
        '[{"topic": "t", "value": "v", "headers": [{"name": "value", "value": "name"}, {"name": "n"}]}]',
        '[{"topic": "t", "value": "\\u0061\\u0061"}]',
    ],
)
def test_what_only_looks_repeated_is_taken(messages: str) -> None:
    """Names as values, in strings, in several objects, and inside the caller's own data."""
    assert fields(PrepareRequest, f'{{"group": "g", "messages": {messages}}}') == []


def test_a_batch_is_judged_by_itself_and_its_items_by_themselves() -> None:
    item = '{"id": "a", "outcome": "commit", "outcome": "rollback"}'
    assert fields(BatchRequest, f'{{"end": [{item}], "end": []}}') == ["end"]
    assert fields(BatchRequest, f'{{"end": [{item}], "prepare": []}}') == []
    assert fields(EndRequest, '{"outcome": "commit", "outcome": "rollback"}') == ["outcome"]


def test_fields_that_are_given_as_null_or_empty_cost_no_second_reading() -> None:
    """Many clients write all fields that they know. One such message would have a whole batch read item by item."""

    def is_read_at_once(model: type[WholeBatch | WholeStreamFrame], text: str) -> bool:
        return VALIDATION.read_whole(model, text.encode(), lambda request: request) is not None

    header = {"name": "n", "value": None}
    message: dict[str, object] = {"topic": "t", "value": None, "key": None, "headers": [], "partition": None}
    messages = [message, message | {"headers": [header]}]
    prepare = {"group": "g", "messages": messages, "id": None, "check_after_s": None}
    end = {"id": "a", "outcome": "commit", "remark": None, "check_id": None}
    action = {"id": "b", "remark": None}
    batch = json.dumps({"prepare": [prepare], "end": [end], "check": [action], "resume": []})
    assert is_read_at_once(WholeBatch, batch)
    assert not is_read_at_once(WholeBatch, batch.replace('"key": null', '"key": null, "key": null', 1))
    assert not is_read_at_once(WholeBatch, batch.replace('"resume": []', '"resume": [], "resume": []'))
    numbered = {"n": 1, "traceparent": None}
    frame = json.dumps({"prepare": [prepare | numbered], "end": [end | numbered | {"confirm": None}], "checks": []})
    assert is_read_at_once(WholeStreamFrame, frame)
    short = [{"topic": "t", "value": None}, {"topic": "t", "value": None, "headers": [{"name": "n"}]}]
    bodies = [json.dumps(one).encode() for one in (prepare, {"group": "g", "messages": short})]
    read = [VALIDATION.read(PrepareRequest, body, VALIDATION.to_prepare) for body in bodies]
    assert read[0] == read[1]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
DATA = st.none() | TEXT | st.builds(lambda data: {"type": "JSON", "data": data}, st.lists(TEXT) | TEXT)
MESSAGES = st.fixed_dictionaries(
    {"topic": st.sampled_from(["t", "value"]), "value": DATA},
    optional={
        "key": DATA,
        "headers": st.lists(st.fixed_dictionaries({"name": st.just("name")}, optional={"value": DATA})),
    },
)


TWICE = st.sampled_from([("topic", '"t"'), ("value", "null"), ("value", '"\\\\"'), ("topic", '"\\u0074"')])


@given(st.lists(MESSAGES, min_size=1, max_size=3), st.booleans(), TWICE)
def test_a_name_that_is_repeated_anywhere_is_found(
    messages: list[object], is_ascii: bool, twice: tuple[str, str]
) -> None:
    """Whatever the strings hold: quotes, backslashes and escapes are no names."""
    body = json.dumps({"group": "g", "messages": messages, "id": named_id("i")}, ensure_ascii=is_ascii)
    assert fields(PrepareRequest, body) == []
    body = body.replace('"messages": [{', f'"messages": [{{"{twice[0]}": {twice[1]}, ', 1)
    assert fields(PrepareRequest, body) == [f"messages[0].{twice[0]}"]
