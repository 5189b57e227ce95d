"""The records of the internal topics: encoded, decoded, validated. May import clients."""
