"""Settings, the command line and the one composition root."""
