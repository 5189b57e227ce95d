"""Creates the table of the messages that wait while halfway is away."""

from django.db import migrations

from halfway.client.django.migrations.create_barrier import CreateTable


class Migration(migrations.Migration):
    """The store's table, beside the barrier's."""

    dependencies = (("halfway_client", "create_barrier"),)
    operations = (CreateTable(store=True),)
