"""The HTTP interface: handlers, request and response models, problems, OpenAPI."""
