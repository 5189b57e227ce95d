"""Topics: the internal ones created and verified, the real ones looked up. May import records and clients."""
