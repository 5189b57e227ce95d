"""The error of a job."""


class PipelineError(Exception):
    """A job cannot be done. The message has the cause and the remedy."""
