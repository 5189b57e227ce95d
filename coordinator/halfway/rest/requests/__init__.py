"""What comes in: bodies read, judged by the models and their schemas, converted. May import responses."""
