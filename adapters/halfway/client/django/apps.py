"""The application that INSTALLED_APPS names."""

from django.apps import AppConfig


class HalfwayClientConfig(AppConfig):
    """Has no models: its one table is the barrier's."""

    name = "halfway.client.django"
    label = "halfway_client"
    verbose_name = "halfway"
