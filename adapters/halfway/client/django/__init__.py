"""halfway in a Django project. In INSTALLED_APPS, it adds the migration of the barrier's table."""

from halfway.client.django.producer import AtomicProducer, DjangoChecks, django_barrier

__all__ = ["AtomicProducer", "DjangoChecks", "django_barrier"]
