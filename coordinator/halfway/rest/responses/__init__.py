"""What goes out: errors, as problem documents, and answers that are not read. Imports no neighbour."""
