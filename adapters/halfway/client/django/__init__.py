"""halfway in a Django project. In INSTALLED_APPS, it adds the migration of the barrier's table."""

from halfway.client.django.barrier import django_barrier
from halfway.client.django.endpoint import DjangoChecks
from halfway.client.django.producer import AtomicProducer

__all__ = ["AtomicProducer", "DjangoChecks", "django_barrier"]
