"""librdkafka's clients: configuration, logs, transactional ids, threads, and posting to the event loop.

Imports no sibling folder.
"""
