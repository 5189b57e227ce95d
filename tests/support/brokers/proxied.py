"""A broker with more listeners, each of which can only be reached through its own proxy."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from halfway.embedded import EmbeddedConfig, EmbeddedKafka
from halfway.embedded.broker import CLIENT_LISTENER, HOST, Listener, Node, pick_port
from tests.support.brokers.jvm import MORTAL, STARTED_WITHIN_S, short_lived
from tests.support.brokers.proxy import KafkaProxy


class ProxiedKafka(EmbeddedKafka):
    """`bootstrap_servers` bypasses all proxies; `through` goes through one.

    Stop, kill and pause it like any embedded broker: the proxies stay.
    """

    def __init__(self, *names: str, data_dir: Path | None = None, properties: Mapping[str, str] | None = None) -> None:
        super().__init__(
            EmbeddedConfig(
                data_dir=data_dir,
                jvm_options=short_lived(),
                properties={**MORTAL, **(properties or {})},
                startup_timeout_s=STARTED_WITHIN_S,
            )
        )
        self.proxies: dict[str, KafkaProxy] = {}
        self._taken: set[int] = set()
        for name in names or ("PROXIED",):
            self.proxies[name] = KafkaProxy(self._port(), self._port())
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        super().__enter__()
        for proxy in self.proxies.values():
            self._stack.enter_context(proxy)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        super().__exit__()

    @property
    def proxy(self) -> KafkaProxy:
        """The first proxy."""
        return next(iter(self.proxies.values()))

    def through(self, proxy: KafkaProxy) -> str:
        """Return the bootstrap servers behind a proxy."""
        return f"{HOST}:{proxy.port}"

    def _port(self) -> int:
        port = pick_port(self._taken)
        self._taken.add(port)
        return port

    def _pick_node(self) -> Node:
        open_port = self._port() if self._node is None else self._node.ports[0]
        return Node(
            voters={1: self._port()},
            listeners={
                CLIENT_LISTENER: Listener(port=open_port),
                **{
                    name: Listener(port=proxy.upstream, advertised_port=proxy.port)
                    for name, proxy in self.proxies.items()
                },
            },
        )
