"""The state of this instance: its shards, their payloads, the groups, and the next checks. Imports no neighbour."""
