"""A coordinator for users' own tests: on a broker in memory, which starts at once, or on a real one.

Both have halfway's real REST interface, call check endpoints, and hand out checks, so a test can run on either.
`pytest_plugins = ["halfway.testing.fixtures"]` enables the pytest fixtures. See docs/python.md.
"""

try:
    from halfway.client.consumer import Record
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "halfway.testing needs halfway-client: pip install 'halfway-client[consumer]'", name=error.name
    ) from None

from halfway.testing.server import KafkaServer, MemoryServer, Server, ServerError

__all__ = ["KafkaServer", "MemoryServer", "Record", "Server", "ServerError"]
