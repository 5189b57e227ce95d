"""The types of the client: annotations that a type checker uses, and messages that stay as they are."""

import inspect
import typing
from importlib.resources import files

from halfway.client import Halfway, Message, SyncHalfway
from halfway.client.barrier import Barrier
from halfway.client.django import django_barrier
from halfway.client.producer.sync import Settings


def test_the_client_for_threads_knows_every_setting() -> None:
    named = inspect.signature(Halfway).parameters.values()
    settings = {one.name: one.annotation for one in named if one.kind is one.KEYWORD_ONLY}
    settings["barrier"] = "Barrier | None"  # an AsyncBarrier belongs to an event loop
    known = {name: hint.__forward_arg__ for name, hint in Settings.__annotations__.items()}
    assert known == settings
    assert inspect.signature(SyncHalfway).parameters["settings"].annotation == "Unpack[Settings]"


def test_the_barrier_of_django_knows_every_setting() -> None:
    own, known = inspect.signature(django_barrier).parameters, inspect.signature(Barrier).parameters
    for name in ("table", "retention_s"):
        assert (own[name].annotation, own[name].default) == (known[name].annotation, known[name].default)
    assert typing.Any not in {one.annotation for one in own.values()}


def test_both_packages_say_that_they_are_typed() -> None:
    assert all(files(name).joinpath("py.typed").is_file() for name in ("halfway.client", "halfway.testing"))


def test_the_calls_for_threads_take_the_parameters_of_the_asynchronous_ones() -> None:
    for name in ("register", "start", "prepare", "end", "show", "check_secrets", "check_verifier"):
        assert inspect.signature(getattr(SyncHalfway, name)) == inspect.signature(getattr(Halfway, name))
        assert not inspect.iscoroutinefunction(getattr(SyncHalfway, name))


def test_a_message_keeps_the_value_that_it_was_made_with() -> None:
    """A caller may fill one dict again for the next message; both are sent later, with the session's commit."""
    line = {"items": [1]}
    first = Message(topic="orders", value=line)
    line["items"].append(2)
    assert first.as_json()["value"] == {"type": "JSON", "data": {"items": [1]}}
    assert first.value == {"items": [1]}
