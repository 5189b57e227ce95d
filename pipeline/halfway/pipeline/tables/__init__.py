"""Where results are kept: folders and Delta tables."""
