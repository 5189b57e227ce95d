"""Our own broker with a second listener that requires a password, and with access control lists."""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from confluent_kafka.admin import (  # type: ignore[attr-defined]  # they are there
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from halfway.embedded import EmbeddedConfig, EmbeddedKafka
from halfway.embedded.broker import CLIENT_LISTENER, CONTROLLER_LISTENER, HOST, Listener, Node, pick_port
from tests.support.brokers.jvm import STARTED_WITHIN_S, STEADY, short_lived

GUARDED_LISTENER = "GUARDED"
USERS = {"entitled": "right-password", "stranger": "other-password"}
_JAAS = "org.apache.kafka.common.security.plain.PlainLoginModule required " + " ".join(
    f'user_{name}="{password}"' for name, password in USERS.items()
)
_ANSWER_WITHIN_S = 60.0


class GuardedKafka(EmbeddedKafka):
    """Clients of the listener without a password may do everything; users of the other need ACLs."""

    def __init__(self, data_dir: Path, properties: Mapping[str, str] | None = None) -> None:
        super().__init__(
            EmbeddedConfig(
                data_dir=data_dir,
                jvm_options=short_lived(),
                startup_timeout_s=STARTED_WITHIN_S,
                properties={
                    "listener.security.protocol.map": (
                        f"{CONTROLLER_LISTENER}:PLAINTEXT,{CLIENT_LISTENER}:PLAINTEXT,{GUARDED_LISTENER}:SASL_PLAINTEXT"
                    ),
                    "sasl.enabled.mechanisms": "PLAIN",
                    f"listener.name.{GUARDED_LISTENER.lower()}.plain.sasl.jaas.config": f"{_JAAS};",
                    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
                    "super.users": "User:ANONYMOUS",
                    **STEADY,
                    **(properties or {}),
                },
            )
        )
        self._guarded_port = pick_port()

    @property
    def guarded_servers(self) -> str:
        return f"{HOST}:{self._guarded_port}"

    def _pick_node(self) -> Node:
        open_port = pick_port({self._guarded_port}) if self._node is None else self._node.ports[0]
        return Node(
            voters={1: pick_port({self._guarded_port, open_port})},
            listeners={CLIENT_LISTENER: Listener(port=open_port), GUARDED_LISTENER: Listener(port=self._guarded_port)},
        )

    def allow(self, user: str, resource: ResourceType, name: str, *operations: AclOperation) -> None:
        """Allow a user an operation on everything whose name begins with `name` (`*`: on everything)."""
        pattern = ResourcePatternType.LITERAL if name == "*" else ResourcePatternType.PREFIXED
        self._create(
            AclBinding(resource, name, pattern, f"User:{user}", "*", operation, AclPermissionType.ALLOW)
            for operation in operations
        )

    def deny(self, user: str, name: str, operation: AclOperation, resource: ResourceType = ResourceType.TOPIC) -> None:
        """Deny a user an operation on one topic (or other resource), regardless of other ACLs."""
        self._create([_denial(AclBinding, user, resource, name, operation)])

    def stop_denying(
        self, user: str, name: str, operation: AclOperation, resource: ResourceType = ResourceType.TOPIC
    ) -> None:
        """Remove a denial."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers})
        denial = _denial(AclBindingFilter, user, resource, name, operation)
        for done in admin.delete_acls([denial], request_timeout=_ANSWER_WITHIN_S).values():
            done.result(_ANSWER_WITHIN_S)
        _wait(lambda: not admin.describe_acls(denial).result(_ANSWER_WITHIN_S), f"{denial} to go")

    def _create(self, acls: Iterable[AclBinding]) -> None:
        """Return when the broker applies them: the controller has them a moment earlier."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers})
        bindings = list(acls)
        for done in admin.create_acls(bindings, request_timeout=_ANSWER_WITHIN_S).values():
            done.result(_ANSWER_WITHIN_S)
        _wait(lambda: {*bindings} <= {*admin.describe_acls(_ANY).result(_ANSWER_WITHIN_S)}, f"{bindings}")


_ANY = AclBindingFilter(
    ResourceType.ANY,
    None,  # type: ignore[arg-type]  # any name, principal and host, as the library has it
    ResourcePatternType.ANY,
    None,  # type: ignore[arg-type]
    None,  # type: ignore[arg-type]
    AclOperation.ANY,
    AclPermissionType.ANY,
)


def _wait(until: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _ANSWER_WITHIN_S
    while not until():
        assert time.monotonic() < deadline, f"the broker does not know of {what}"
        time.sleep(0.05)


B = TypeVar("B", AclBinding, AclBindingFilter)


def _denial(kind: type[B], user: str, resource: ResourceType, name: str, operation: AclOperation) -> B:
    return kind(resource, name, ResourcePatternType.LITERAL, f"User:{user}", "*", operation, AclPermissionType.DENY)


def credentials(user: str, password: str) -> dict[str, str]:
    """Return the settings with which a coordinator authenticates."""
    return {
        "HALFWAY_KAFKA__SECURITY_PROTOCOL": "SASL_PLAINTEXT",
        "HALFWAY_KAFKA__SASL_MECHANISM": "PLAIN",
        "HALFWAY_KAFKA__SASL_USERNAME": user,
        "HALFWAY_KAFKA__SASL_PASSWORD": password,
    }
