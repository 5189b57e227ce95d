"""Errors of a job. Each message says what to do."""

from __future__ import annotations


class PipelineError(Exception):
    """A job cannot be done. The message has the cause and the remedy."""


class JavaError(PipelineError):
    """There is no Java for Spark."""


class SessionError(PipelineError):
    """The jobs cannot run in this kind of Spark session."""


class ConnectorError(PipelineError):
    """Spark's Kafka connector is not available."""


class AccessError(PipelineError):
    """Kafka cannot be reached, or a setting for reaching it cannot be used."""


class SourceError(PipelineError):
    """The topics, the archive or the tables of a job do not exist or are not complete."""


class AlertError(PipelineError):
    """A result cannot be reported: wrong rules, a file that cannot be written, or a webhook that fails."""
