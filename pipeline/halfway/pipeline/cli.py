"""The command line `halfway-pipeline`."""

from __future__ import annotations

import click

from halfway.pipeline.commands.audit import audit
from halfway.pipeline.commands.ledger import export, ledger
from halfway.pipeline.commands.report import report
from halfway.pipeline.commands.topics import archive, sweep


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="halfway")
def pipeline() -> None:
    """Spark jobs over halfway's topics, to see whether every transaction ended the way its producer meant.

    Kafka is reached as the coordinator reaches it: HALFWAY_KAFKA__BOOTSTRAP_SERVERS and its like, or --config.
    """


for command in (audit, sweep, ledger, report, export, archive):
    pipeline.add_command(command)


def main() -> None:
    """Run the command line."""
    pipeline(prog_name="halfway-pipeline")
