"""Prepares and ends on a stream are answered as in REST, each with its number."""

import asyncio
import json

import aiohttp
import pytest
from structlog.testing import capture_logs

from halfway.http.requests.admission import ApiLimits
from tests.support.coordinator.stream_client import StreamClient, StreamLostError
from tests.support.ids import named_id
from tests.support.rest.client import RestWorld
from tests.support.waiting import GENEROUS_S, until_true
from tests.unit.http.conftest import NewWorld
from tests.unit.http.stream.conftest import Connects, Opens, Raw

MESSAGE = {"topic": "orders", "key": "k", "value": "v"}


async def prepared(stream: StreamClient, transaction_id: str) -> None:
    answer = await stream.prepare("shop", MESSAGE, id=transaction_id)
    assert answer.status == 201, answer


class TestAnswers:
    async def test_a_transaction_is_prepared_and_committed(self, world: RestWorld, stream: StreamClient) -> None:
        answer = await stream.prepare("shop", MESSAGE)
        assert answer.status == 201
        body = answer.document
        assert set(body) == {"id", "state", "group", "prepared_at", "next_check_at"}
        assert (body["state"], body["group"]) == ("prepared", "shop")

        ended = await stream.end(body["id"], "commit")
        assert (ended.status, ended.document) == (200, {"id": body["id"], "state": "committed", "changed": True})
        assert [record.value for record in world.memory.records("orders")] == [b"v"]

    async def test_errors_are_the_problems_of_rest(self, world: RestWorld, stream: StreamClient) -> None:
        """With the same members, except `instance`."""
        await prepared(stream, named_id("t-1"))
        await stream.end(named_id("t-1"), "rollback")
        for on_stream, in_rest in (
            (await stream.end(named_id("t-1"), "commit"), await world.end(named_id("t-1"), "commit")),
            (await stream.end("unknown", "commit"), await world.end("unknown", "commit")),
            (await stream.prepare("nobody", MESSAGE), await world.prepare(MESSAGE, group="nobody")),
            (await stream.prepare("shop", {"topic": "orders"}), await world.prepare({"topic": "orders"})),
            (
                await stream.prepare("shop", MESSAGE, id=named_id("t-1"), check_after_s=1),
                await world.prepare(id=named_id("t-1")),
            ),
        ):
            expected = {name: value for name, value in in_rest.body.items() if name != "instance"}
            assert (on_stream.status, on_stream.document) == (in_rest.status, expected)

    @pytest.mark.parametrize("name", ["n", "id", "outcome", "confirm"])
    async def test_a_name_that_an_operation_gives_twice_is_refused(self, raw: Raw, name: str) -> None:
        values = {"n": "1", "id": '"a"', "outcome": '"commit"', "confirm": "true"}
        fields = [f'"{one}": {value}' for one, value in [*values.items(), (name, values[name])]]
        await raw.send(f'{{"end": [{{{", ".join(fields)}}}]}}')
        (answer,) = (await raw.frame())["answers"]
        assert (answer["status"], answer["problem"]["errors"][0]["field"]) == (422, name)

    async def test_one_wrong_operation_does_not_disturb_the_others_of_its_frame(self, stream: StreamClient) -> None:
        answers = await asyncio.gather(
            stream.prepare("shop", MESSAGE, id=named_id("good")),
            stream.prepare("shop", MESSAGE, id="bad id"),
            stream.prepare("shop", {**MESSAGE, "partition": -1}),
            stream.end("bad id", "commit"),
            stream.end(named_id("t"), "perhaps"),
            stream.end(named_id("t"), "commit", confirm="no"),
            stream.subscribe("shop", -1),
        )
        assert [answer.status for answer in answers] == [201, 422, 422, 422, 422, 422, 422]
        fields = [answer.document["errors"][0]["field"] for answer in answers[1:]]
        assert fields == ["id", "messages[0].partition", "id", "outcome", "confirm", "max"]

    async def test_an_end_that_waits_holds_up_no_other_operation(self, world: RestWorld, stream: StreamClient) -> None:
        """Answers are sent as soon as they are known, regardless of the order of the frames."""
        await prepared(stream, named_id("t-1"))
        with world.memory.faults.lane_held():
            ending = asyncio.create_task(stream.end(named_id("t-1"), "commit"))
            await until_true(lambda: stream.in_flight == 1)
            assert (await stream.prepare("shop", MESSAGE)).status == 201
            assert not ending.done()
        assert (await ending).status == 200

    async def test_the_ends_of_all_connections_of_one_turn_share_a_kafka_transaction(
        self, world: RestWorld, opened: Opens
    ) -> None:
        streams = [await opened(world) for _ in range(3)]
        for number in range(30):
            await prepared(streams[0], named_id(f"t-{number}"))
        before = world.memory.observer.count("lane_committed")
        with world.memory.faults.lane_held():
            ending = [asyncio.create_task(streams[n % 3].end(named_id(f"t-{n}"), "commit")) for n in range(30)]
            await until_true(lambda: world.api.in_flight.taken == 30)
        assert [(await one).status for one in ending] == [200] * 30
        assert world.memory.observer.count("lane_committed") == before + 1

    async def test_operations_are_counted_by_their_status(self, world: RestWorld, stream: StreamClient) -> None:
        await prepared(stream, named_id("t-1"))
        await stream.end(named_id("t-1"), "commit", confirm=False)
        await stream.end("nobody", "commit")
        await stream.prepare("shop")
        assert {one: count for one, count in world.requests.counts.items() if one[0] in {"prepare", "end"}} == {
            ("prepare", 201): 1,
            ("end", 202): 1,
            ("end", 404): 1,
            ("prepare", 422): 1,
        }


class TestFrames:
    @pytest.mark.parametrize(
        "text, code, field",
        [
            ("", "empty_body", None),
            ("{", "malformed_json", None),
            pytest.param('{"end": ' + "[" * 2000, "malformed_json", None, id="deep"),
            ('{"end": []} x', "malformed_json", None),
            ("[]", "invalid_request", ""),
            ("{}", "invalid_request", ""),
            ('{"end": {}}', "invalid_request", "end"),
            ('{"ends": [{"n": 1}]}', "invalid_request", "ends"),
            ('{"end": [{"id": "t", "outcome": "commit"}]}', "invalid_request", "end[0]"),
            ('{"prepare": [{"n": 1.5}]}', "invalid_request", "prepare[0]"),
            ('{"prepare": [{"n": -1}]}', "invalid_request", "prepare[0]"),
            ('{"end": [{"n": 1}], "end": [{"n": 2}]}', "invalid_request", "end"),
            ('{"prepare": [7]}', "invalid_request", "prepare[0]"),
            ('{"checks": [{"n": "1", "group": "g", "max": 1}]}', "invalid_request", "checks[0]"),
            pytest.param(json.dumps({"end": [{"n": n} for n in range(1001)]}), "invalid_request", "", id="many"),
            ('{"end": [{"n": 1, "id": "t", "outcome": "commit"}, {"n": 1, "id": "u", "outcome": "commit"}]}',
             "invalid_request", "n"),
        ],
    )  # fmt: skip
    async def test_a_bad_frame_is_told_and_ends_the_connection(
        self, raw: Raw, text: str, code: str, field: str | None
    ) -> None:
        await raw.send(text)
        problem, closed = await raw.end()
        assert problem is not None
        assert (problem["error_code"], closed) == (code, 4400)
        if field is not None:
            assert problem["errors"][0]["field"] == field

    @pytest.mark.parametrize(
        "text, detail",
        [
            ("[1]", "the frame: this list is not valid: expected an object"),
            ("{}", "the frame: 0 operations: from 1 to 1000 in one frame"),
            ("{", "the frame is not one JSON document"),
            (
                '{"end": [{"id": "t"}]}',
                "end[0]: not an operation: expected an object with its number n, a whole number",
            ),
        ],
    )
    async def test_an_error_in_a_frame_speaks_of_the_frame(self, raw: Raw, text: str, detail: str) -> None:
        await raw.send(text)
        problem, _ = await raw.end()
        assert problem is not None
        assert detail in problem["detail"]

    async def test_an_error_in_an_operation_speaks_of_the_operation(self, raw: Raw) -> None:
        await raw.send('{"end": [{"n": 1, "id": "t", "outcome": "commit", "confirm": 1}]}')
        (answer,) = (await raw.frame())["answers"]
        assert answer["problem"]["detail"].startswith("confirm: 1 is not valid: expected true or false")

    async def test_bytes_that_are_not_utf_8_are_an_error_of_their_operation(self, raw: Raw) -> None:
        text = b'{"end": [{"n": 1, "id": "\xff", "outcome": "commit"}]}'
        await raw.socket.send_frame(text, aiohttp.WSMsgType.TEXT)
        (answer,) = (await raw.frame())["answers"]
        assert (answer["status"], answer["problem"]["error_code"]) == (400, "malformed_json")

    async def test_a_binary_message_ends_the_connection(self, raw: Raw) -> None:
        await raw.socket.send_bytes(b"{}")
        assert (await raw.end())[1] == 1003

    async def test_a_frame_that_is_too_large_ends_the_connection(
        self, new_world: NewWorld, connected: Connects
    ) -> None:
        """A frame of exactly the limit is read."""
        world = await new_world(ApiLimits(max_body_bytes=100_000))
        raw = await connected(world)
        frame = '{"end": [{"n": 1, "id": "t", "outcome": "commit"}]}'
        await raw.send(frame.ljust(100_000))
        assert (await raw.frame())["answers"][0]["status"] == 404
        await raw.send(frame.ljust(100_001))
        assert (await raw.end())[1] == 1009

    async def test_a_number_may_be_used_again_once_it_is_answered(self, raw: Raw) -> None:
        for _ in range(2):
            await raw.send('{"end": [{"n": 7, "id": "t", "outcome": "commit"}]}')
            (answer,) = (await raw.frame())["answers"]
            assert (answer["n"], answer["status"]) == (7, 404)

    async def test_a_number_that_is_in_flight_ends_the_connection_and_not_the_operation(
        self, world: RestWorld, raw: Raw, stream: StreamClient
    ) -> None:
        await prepared(stream, named_id("t-1"))
        with world.memory.faults.lane_held():
            await raw.send(f'{{"end": [{{"n": 1, "id": "{named_id("t-1")}", "outcome": "commit"}}]}}')
            await raw.send('{"end": [{"n": 1, "id": "t-2", "outcome": "commit"}]}')
            assert (await raw.end())[1] == 4400
        await until_true(lambda: world.memory.records("orders"))
        assert (await stream.end(named_id("t-1"), "commit")).document["changed"] is False

    async def test_all_operations_of_a_frame_are_done_however_it_is_cut(self, world: RestWorld, raw: Raw) -> None:
        """A message may arrive in fragments, and a number is any whole JSON number up to 2**53 - 1."""
        await raw.send(
            '{"prepare": [{"n": 9007199254740991, "group": "shop", "messages": [' + json.dumps(MESSAGE) + "]}]}"
        )
        (answer,) = (await raw.frame())["answers"]
        assert (answer["n"], answer["status"]) == (9007199254740991, 201)
        assert world.api.in_flight.taken == world.api.in_flight.bytes == 0


class TestOneWay:
    async def test_an_end_without_confirmation_is_answered_before_it_is_written(
        self, world: RestWorld, stream: StreamClient
    ) -> None:
        await prepared(stream, named_id("t-1"))
        with world.memory.faults.lane_held():
            answer = await stream.end(named_id("t-1"), "commit", confirm=False)
            assert (answer.status, answer.document) == (202, None)
            assert not world.memory.records("orders")
            assert world.api.in_flight.taken == 1
        await until_true(lambda: world.memory.records("orders"))
        await until_true(lambda: world.api.in_flight.taken == 0)

    async def test_an_error_that_is_known_at_once_is_answered_instead(self, stream: StreamClient) -> None:
        await prepared(stream, named_id("t-1"))
        await stream.end(named_id("t-1"), "rollback")
        assert (await stream.end(named_id("t-1"), "commit", confirm=False)).status == 409
        assert (await stream.end(named_id("t-1"), "perhaps", confirm=False)).status == 422

    @pytest.mark.parametrize("written", [True, False])
    async def test_one_that_is_lost_with_its_lane_is_resolved_by_check_back(
        self, world: RestWorld, opened: Opens, *, written: bool
    ) -> None:
        """The messages appear exactly once, whether the Kafka transaction of the lost lane was committed or not."""
        await world.put_shop(check={"mode": "pull"}, policy={"first_check_after_s": 5})
        stream = await opened(world)
        await prepared(stream, named_id("t-1"))
        world.memory.faults.lose_next_batch(written=written)
        assert (await stream.end(named_id("t-1"), "commit", confirm=False)).status == 202
        await until_true(lambda: len(world.coordinator.shards.served) == 2 and world.api.in_flight.taken == 0)
        world.memory.clock.advance(6)
        for shard in world.coordinator.shards.served:
            await world.coordinator.scan(shard, world.memory.clock.now_ms())
        if (await world.show(named_id("t-1"))).body["state"] == "prepared":
            await stream.subscribe("shop", 1)
            check = await asyncio.wait_for(stream.checks.get(), GENEROUS_S)
            assert (await stream.end(named_id("t-1"), "commit", check_id=check["check_id"])).status == 200
        assert [record.value for record in world.memory.records("orders")] == [b"v"]


class TestResumption:
    async def test_a_prepare_and_an_end_are_sent_again_on_a_new_connection(
        self, world: RestWorld, opened: Opens
    ) -> None:
        first, second = await opened(world), await opened(world)
        await prepared(first, named_id("t-1"))
        with world.memory.faults.lane_held():
            ending = asyncio.create_task(first.end(named_id("t-1"), "commit"))
            await until_true(lambda: world.api.in_flight.taken == 1)
            await first.abort()
            with pytest.raises(StreamLostError):
                await ending
        await until_true(lambda: world.memory.records("orders") and world.api.in_flight.taken == 0)
        again = await second.prepare("shop", MESSAGE, id=named_id("t-1"))
        assert (again.status, again.document["state"]) == (200, "committed")
        assert (await second.end(named_id("t-1"), "commit")).document == {
            "id": named_id("t-1"),
            "state": "committed",
            "changed": False,
        }
        assert len(world.memory.records("orders")) == 1

    async def test_nothing_is_left_of_a_connection_that_is_cut(self, world: RestWorld, opened: Opens) -> None:
        """Its operations are finished, and their places and bytes are free afterwards."""
        stream = await opened(world)
        await prepared(stream, named_id("t-1"))
        with world.memory.faults.lane_held():
            ending = asyncio.create_task(stream.end(named_id("t-1"), "commit"))
            await until_true(lambda: world.api.in_flight.taken == 1)
            await stream.abort()
            await until_true(lambda: not world.api.streams)
            assert world.api.in_flight.taken == 1
        await until_true(
            lambda: world.api.in_flight.taken == world.api.in_flight.bytes == world.api.admission.prepares == 0
        )
        assert len(world.memory.records("orders")) == 1
        with pytest.raises(StreamLostError):
            await ending


async def test_a_refused_operation_is_in_the_log_also_if_nobody_waits_for_its_answer(
    world: RestWorld, stream: StreamClient
) -> None:
    """With the request that opened the stream, the group, the id and the code."""
    with capture_logs() as logs:
        assert (await stream.prepare("bank", MESSAGE, id=named_id("o-1"))).status == 404
        assert (await stream.end(named_id("o-2"), "commit", confirm=False)).status == 202
        await until_true(lambda: len([line for line in logs if line["event"] == "request_refused"]) == 2)
    prepare, end = (line for line in logs if line["event"] == "request_refused")
    assert (prepare["operation"], prepare["group"], prepare["id"], prepare["error"]) == (
        "stream_prepare",
        "bank",
        named_id("o-1"),
        "unknown_group",
    )
    assert (end["operation"], end["id"], end["error"]) == ("stream_end", named_id("o-2"), "unknown_transaction")
    assert prepare["request_id"] == end["request_id"]
