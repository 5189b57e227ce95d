"""One WebSocket connection for many operations (docs/stream.md). May import handlers, requests and responses."""
