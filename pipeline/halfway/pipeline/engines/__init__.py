"""What runs the rules: Spark with its session and connector, or DuckDB; both decode values in the same way."""
