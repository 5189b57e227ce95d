"""Where the records come from: topics in Kafka or an archive, on each engine, pinned partition by partition."""
