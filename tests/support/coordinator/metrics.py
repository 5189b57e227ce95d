"""What a coordinator counts, as a scraper gets it."""

from prometheus_client.parser import text_string_to_metric_families

from tests.support.coordinator.rest_client import Rest


async def samples(rest: Rest) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Give every sample of the metrics by its name and its labels."""
    status, text = await rest.health("/metrics")
    assert status == 200, text
    return parsed(text)


def parsed(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Give every sample of a page of metrics by its name and its labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(found: dict[tuple[str, frozenset[tuple[str, str]]], float], words: str, **labels: str) -> float:
    """Add up the samples whose name has each of the words and which have these labels."""
    return sum(
        value
        for (name, given), value in found.items()
        if all(word in name for word in words.split()) and set(labels.items()) <= given
    )
