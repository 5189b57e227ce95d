"""Fatal errors of real Kafka clients: librdkafka's own hook for tests raises them without a broker."""

import ctypes
from pathlib import Path
from typing import Final

from confluent_kafka import Producer, cimpl

_HANDLE: Final = object.__basicsize__
"""Where confluent-kafka's clients keep librdkafka's handle: it is their first member."""


def fail_for_good(producer: Producer, code: int) -> None:
    """Make a client fail with a fatal error, as a broker's answer would."""
    [library] = (Path(str(cimpl.__file__)).parent.parent / "confluent_kafka.libs").glob("librdkafka*")
    raise_fatal = ctypes.CDLL(str(library)).rd_kafka_test_fatal_error
    raise_fatal.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p]
    handle = ctypes.c_void_p.from_address(id(producer) + _HANDLE)
    assert raise_fatal(handle, code, b"by a test") == 0
