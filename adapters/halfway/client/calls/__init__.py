"""How a call reaches a coordinator: HTTP at any of its URLs, retries, batches, the key."""
