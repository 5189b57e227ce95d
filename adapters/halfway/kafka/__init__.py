"""The implementation of the service's ports on Apache Kafka.

The folders import downwards only: ownership, then lane and log, topics, records, clients.
"""
