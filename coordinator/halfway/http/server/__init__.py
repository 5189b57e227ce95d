"""The server: connections, events, and the ports for clients, peers and the platform. May import the other folders."""
