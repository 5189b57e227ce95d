"""What the command line runs: read, apply a transform, write."""
