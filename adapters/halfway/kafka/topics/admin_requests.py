"""Sends requests with an admin client, waits for the results, and maps failures to errors that name the remedy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Any, Final, TypeVar

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import ClusterMetadata  # type: ignore[attr-defined] # public, but not for mypy

from halfway.kafka.clients.config import KafkaConfig, acl_command, acl_flags, named_variables
from halfway.kafka.clients.seam import Admin
from halfway.protocol.errors import ConfigurationError, KafkaUnavailableError

T = TypeVar("T")

_POLL_S: Final = 0.02
_NO_BROKER_S: Final = 0.2
_METADATA_S: Final = 5.0
"""How long an abandoned client may stay alive."""
_BUILT_IN_TOPIC: Final = "__consumer_offsets"
_REFUSED_CONNECTION: Final = frozenset(
    {
        KafkaError._AUTHENTICATION,  # noqa: SLF001 - the names of librdkafka's own errors start so
        KafkaError._SSL,  # noqa: SLF001
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.UNSUPPORTED_SASL_MECHANISM,
        KafkaError.ILLEGAL_SASL_STATE,
    }
)
_DENIED: Final = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
    }
)
_INVALID: Final = frozenset(
    {
        KafkaError.POLICY_VIOLATION,
        KafkaError.INVALID_REPLICATION_FACTOR,
        KafkaError.INVALID_CONFIG,
        KafkaError.INVALID_PARTITIONS,
        KafkaError.TOPIC_EXCEPTION,
    }
)
_CLOSED: Final = (
    "each broker closes the connection; if it expects a login or TLS, set HALFWAY_KAFKA__SECURITY_PROTOCOL and the "
    "HALFWAY_KAFKA__SASL_… and HALFWAY_KAFKA__SSL_… settings"
)
_MISSING: Final = KafkaError.UNKNOWN_TOPIC_OR_PART
_EXISTS: Final = KafkaError.TOPIC_ALREADY_EXISTS


def admin_client(config: KafkaConfig, **over: Any) -> Admin:
    """Return an admin client, which connects later; ConfigurationError if librdkafka refuses one of the properties."""
    with _refused_properties(config):
        return config.make_admin(**over)


def demand_properties(config: KafkaConfig) -> None:
    """Raise ConfigurationError if librdkafka refuses a property for consumers or producers, which connect later.

    A thread that makes its client then would only fail again and again.
    """
    with _refused_properties(config):
        config.make_consumer().close()
        config.make_producer().poll(0)


@contextmanager
def _refused_properties(config: KafkaConfig) -> Iterator[None]:
    try:
        yield
    except KafkaException as exception:
        text = exception.args[0].str()
        variables = named_variables(text, config.properties)
        raise ConfigurationError(f"a Kafka property cannot be used: {text}: correct {variables}") from exception


class _ReportedErrors:
    """The errors that a client reported. They are not kept in `AdminRequests`: a cycle would keep its threads alive."""

    def __init__(self) -> None:
        self.refusal: KafkaError | None = None
        self.last: KafkaError | None = None
        self.all_down = False

    def cause(self, otherwise: str) -> str:
        """Return why there is no answer, as far as the client has reported it."""
        if self.last is not None:
            return self.last.str()
        return _CLOSED if self.all_down else otherwise

    def record(self, error: KafkaError) -> None:
        if error.code() == KafkaError._ALL_BROKERS_DOWN:  # noqa: SLF001
            self.all_down = True  # after errors that say why; or brokers have closed connections, which is none
        else:
            self.last = error
        if error.code() in _REFUSED_CONNECTION:
            self.refusal = error


class AdminRequests:
    """An admin client. Requests block until they are done or cancelled, or until `deadline` (`time.monotonic()`)."""

    def __init__(self, config: KafkaConfig, deadline: float, cancelled: Callable[[], bool]) -> None:
        """Create the client; it connects with its first request."""
        self._config = config
        self.deadline = deadline
        self.cancelled = cancelled
        self._errors = _ReportedErrors()
        self.admin = self.new_client()

    def new_client(self, **over: Any) -> Admin:
        """Return another client; its errors are recorded together with those of the first."""
        return admin_client(self._config, error_cb=self._errors.record, **over)

    @property
    def bootstrap(self) -> str:
        """Return the addresses of the brokers, for error messages."""
        return self._config.properties["bootstrap.servers"]

    def left(self) -> float:
        """Return for how many more seconds a request may run."""
        return max(0.5, self.deadline - time.monotonic())

    def check(self) -> None:
        """Raise KafkaUnavailableError if the requests were cancelled."""
        if self.cancelled():
            raise KafkaUnavailableError("the internal topics are no longer wanted")

    def brokers(self) -> list[int]:
        """Return the ids of the live brokers; wait until there is one.

        This requests metadata, not a description of the cluster: librdkafka aborts the process if a description names
        no broker, as it does while the controller has fenced the only one. The topic is one that Kafka itself creates.
        Raises KafkaUnavailableError: there was no live broker by the deadline, or Kafka did not answer.
        """
        while True:
            self.check()
            answer: Future[ClusterMetadata] = Future()
            request = partial(_request_metadata, self.admin, min(_METADATA_S, self.left()), answer)
            threading.Thread(target=request, name="halfway-metadata", daemon=True).start()
            try:
                brokers = self.result(answer, "Describe", "the cluster").brokers
            except KafkaUnavailableError:
                if time.monotonic() > self.deadline:
                    raise
            else:
                if brokers:
                    return sorted(brokers)
                if time.monotonic() > self.deadline:
                    raise KafkaUnavailableError(f"Kafka at {self.bootstrap} has no live broker")
            time.sleep(_NO_BROKER_S)
            # A client that gets metadata without a broker forgets its own broker, and sends no request for minutes.
            self.admin = self.new_client()

    def _wait(self, future: Future[T], admin: Admin, until: float) -> T:
        """Wait for a request's result, and serve the client's events, which report refused credentials."""
        while not future.done():
            self.check()
            if time.monotonic() > until:
                raise KafkaUnavailableError(self._no_answer("no answer in time"))
            wait([future], _POLL_S)
            admin.poll(0)
            if self._errors.refusal is not None:
                raise ConfigurationError(
                    f"Kafka at {self.bootstrap} refuses the connection: {self._errors.refusal.str()}: check the "
                    "credentials, HALFWAY_KAFKA__SECURITY_PROTOCOL and the "
                    "HALFWAY_KAFKA__SASL_… and HALFWAY_KAFKA__SSL_… settings"
                )
        return future.result()

    def result(
        self, future: Future[Any], operation: str, thing: str, admin: Admin | None = None, until: float = inf
    ) -> Any:
        """Return a request's result, or raise our own error; a missing or existing topic raises KafkaException."""
        try:
            return self._wait(future, admin or self.admin, until)
        except KafkaException as exception:
            error = exception.args[0]
            if error.code() in (_MISSING, _EXISTS):
                raise
            if error.code() in _DENIED:
                raise ConfigurationError(
                    f"Kafka denies halfway {operation} on {thing} ({error.str()}): allow it with "
                    + acl_command(self._config, acl_flags(self._config, thing), [operation])
                ) from exception
            if error.code() in _INVALID:
                raise ConfigurationError(
                    f"Kafka refuses {operation} on {thing}: {error.str()}: create it yourself, or change "
                    "HALFWAY_REPLICATION_FACTOR, HALFWAY_SHARDS or HALFWAY_KAFKA_PREFIX"
                ) from exception
            raise KafkaUnavailableError(self._no_answer(error.str()), operation=operation) from exception

    def _no_answer(self, otherwise: str) -> str:
        return f"Kafka at {self.bootstrap} did not answer: {self._errors.cause(otherwise)}"


def _request_metadata(admin: Admin, timeout_s: float, answer: Future[ClusterMetadata]) -> None:
    try:
        answer.set_result(admin.list_topics(_BUILT_IN_TOPIC, timeout=timeout_s))
    except Exception as error:  # noqa: BLE001 - the waiting caller must get it, whatever it is
        answer.set_exception(error)
