"""The server: connections, admission, and the ports for clients, peers and the platform. May import every neighbour."""
