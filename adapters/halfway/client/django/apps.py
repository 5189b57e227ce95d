"""The application for INSTALLED_APPS."""

from django.apps import AppConfig


class HalfwayClientConfig(AppConfig):
    """The application. It has no models: its only table is the barrier's."""

    name = "halfway.client.django"
    label = "halfway_client"
    verbose_name = "halfway"
