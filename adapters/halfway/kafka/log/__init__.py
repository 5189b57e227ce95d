"""The internal topics read and appended to, and the registries kept in them. May import topics, records and clients."""
