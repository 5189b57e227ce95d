"""The ports on Apache Kafka.

The folders import downwards only: ownership, then lane and log, topics, records, clients.
"""
