"""The ports on Apache Kafka: topics, codec, half writer, lane, ownership, registry."""
