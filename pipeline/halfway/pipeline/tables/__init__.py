"""Where results are kept: folders, Delta tables, an Iceberg catalog."""
