"""Jobs: one action on every transaction that a filter finds, at a fixed rate. Imports only records."""
