"""The commands of `halfway-pipeline`, each with its options."""
