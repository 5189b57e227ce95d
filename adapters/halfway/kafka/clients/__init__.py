"""librdkafka's clients: configuration, logs, transactional ids, the way back to the event loop.

Imports no neighbour.
"""
