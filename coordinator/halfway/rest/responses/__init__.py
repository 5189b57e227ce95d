"""Errors as problem documents, and answers that clients have not read yet. Imports no neighbour."""
