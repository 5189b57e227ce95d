"""Creates and verifies the internal topics, and looks up the real ones. May import records and clients."""
