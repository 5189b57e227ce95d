"""What this instance knows: its shards, their payloads, the groups, when each check is due. Imports no neighbour."""
