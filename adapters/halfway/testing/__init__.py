"""A coordinator for users' own tests: over ports in memory, which starts at once, or over a Kafka broker.

Both speak halfway's real REST, ask check endpoints, and hand out checks; a test is written once and passes against
either. `pytest_plugins = ["halfway.testing.fixtures"]` gives pytest's fixtures; docs/testing.md tells how.
"""

try:
    from halfway.client.consumer import Record
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "halfway.testing needs halfway-client: pip install 'halfway-client[consumer]'", name=error.name
    ) from None

from halfway.testing.kafka import KafkaServer
from halfway.testing.memory import MemoryServer
from halfway.testing.server import Server, ServerError

__all__ = ["KafkaServer", "MemoryServer", "Record", "Server", "ServerError"]
