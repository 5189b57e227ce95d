"""Answers, errors as problem documents, and what clients have not read yet. Imports no neighbour."""
