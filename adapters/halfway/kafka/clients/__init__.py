"""librdkafka's clients: configuration, logs, transactional ids, threads, the way back to the event loop.

Imports no neighbour.
"""
