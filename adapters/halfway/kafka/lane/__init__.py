"""The lane, the one writer of Kafka transactions, and its quarantine. May import topics, records and clients."""
