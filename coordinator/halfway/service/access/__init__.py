"""Access: authentication, permissions and keys, and how recently the keys were read. Imports no neighbour."""
