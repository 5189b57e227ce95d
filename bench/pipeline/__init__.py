"""What the Spark jobs cost."""
