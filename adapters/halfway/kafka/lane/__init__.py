"""The lane, which writes every change after a prepare, and its quarantine. May import topics, records and clients."""
