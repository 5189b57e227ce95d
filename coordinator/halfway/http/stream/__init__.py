"""One WebSocket connection for many operations (docs/api.md). May import handlers, requests and responses."""
