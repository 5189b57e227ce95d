import pytest

from halfway.embedded import EmbeddedConfig, EmbeddedKafka, EmbeddedKafkaError, ReservedPropertyError
from halfway.embedded.broker import RESERVED, Listener, Node, render_properties, server_properties

SINGLE = Node.single(port=19_092, controller_port=19_093)


def test_topics_are_never_made_by_accident() -> None:
    assert server_properties(SINGLE)["auto.create.topics.enable"] == "false"


def test_the_user_s_properties_win() -> None:
    properties = server_properties(SINGLE, {"group.min.session.timeout.ms": "6000", "log.retention.hours": "1"})
    assert properties["group.min.session.timeout.ms"] == "6000"
    assert properties["log.retention.hours"] == "1"


@pytest.mark.parametrize("name", RESERVED)
def test_a_property_that_the_embedded_broker_sets_itself_is_refused_by_name(name: str) -> None:
    with pytest.raises(ReservedPropertyError, match=name):
        server_properties(SINGLE, {name: "x"})


def test_a_reserved_property_is_refused_before_anything_runs() -> None:
    with pytest.raises(EmbeddedKafkaError, match=r"log\.dirs"):
        EmbeddedKafka(EmbeddedConfig(properties={"log.dirs": "elsewhere"}))


def test_of_three_nodes_each_topic_has_three_replicas_two_in_sync() -> None:
    node = Node(node_id=2, voters={1: 1001, 2: 1002, 3: 1003}, listeners={"PLAINTEXT": Listener(port=2002)})
    properties = server_properties(node)
    assert properties["node.id"] == "2"
    assert properties["controller.quorum.voters"] == "1@127.0.0.1:1001,2@127.0.0.1:1002,3@127.0.0.1:1003"
    assert properties["listeners"] == "PLAINTEXT://127.0.0.1:2002,CONTROLLER://127.0.0.1:1002"
    assert {value for name, value in properties.items() if name.endswith("replication.factor")} == {"3"}
    assert {value for name, value in properties.items() if name.endswith((".min.isr", ".insync.replicas"))} == {"2"}


def test_a_listener_can_advertise_the_port_of_a_proxy() -> None:
    node = Node(
        voters={1: 1001},
        listeners={"PLAINTEXT": Listener(port=2001), "PROXIED": Listener(port=2002, advertised_port=3002)},
    )
    properties = server_properties(node)
    assert properties["listeners"] == (
        "PLAINTEXT://127.0.0.1:2001,PROXIED://127.0.0.1:2002,CONTROLLER://127.0.0.1:1001"
    )
    assert properties["advertised.listeners"] == "PLAINTEXT://127.0.0.1:2001,PROXIED://127.0.0.1:3002"
    assert properties["inter.broker.listener.name"] == "PLAINTEXT"
    assert properties["listener.security.protocol.map"] == "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,PROXIED:PLAINTEXT"
    assert node.ports == (2001, 2002, 1001)


@pytest.mark.parametrize(
    "name,value,line",
    [
        ("plain", "1,2;a=b", "plain=1,2;a=b"),
        ("a b:c", " first", "a\\ b\\:c=\\ first"),
        ("path", "C:\\data\n", "path=C:\\\\data\\n"),
        ("umlaut", "é😀", "umlaut=\\u00e9\\ud83d\\ude00"),
    ],
)
def test_properties_are_written_as_java_reads_them(name: str, value: str, line: str) -> None:
    assert render_properties({name: value}) == line + "\n"
