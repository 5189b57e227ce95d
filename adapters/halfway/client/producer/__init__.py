"""What a producer service calls: the clients with and without an event loop, transactions, listeners."""
