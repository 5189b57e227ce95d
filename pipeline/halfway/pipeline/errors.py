"""What can go wrong with a job, each with a message that a person can act on."""

from __future__ import annotations


class PipelineError(Exception):
    """A job cannot do what was asked; the message says why and what to do."""


class JavaError(PipelineError):
    """There is no Java that Spark can run on."""


class ConnectorError(PipelineError):
    """Spark's Kafka connector could not be had."""


class AccessError(PipelineError):
    """Kafka cannot be reached, or a setting for reaching it cannot be used."""


class SourceError(PipelineError):
    """The topics, the archive or the table that a job reads are not there or not whole."""


class TellingError(PipelineError):
    """What was found cannot be told as it was asked."""
