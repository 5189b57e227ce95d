"""The size and the shape of the code may only shrink: each bound is a figure that was reached.

`python -m tests.support.structure.figures` prints the figures. Lower a bound when its figure falls. Raise one only for
something that users asked for, and name the price in the commit.
"""

import pytest

from tests.support.structure.figures import modules_in_circles, static_figures

BOUNDS = {
    "lines of coordinator and adapters": 45_202,
    "files of coordinator and adapters": 322,
    "lines of halfway/domain": 2_864,
    "lines of halfway/service": 10_161,
    "lines of halfway/rest": 7_298,
    "lines of halfway/runtime": 4_263,
    "lines of halfway/kafka": 10_088,
    "lines of halfway/checkback": 1_168,
    "lines of halfway/peers": 376,
    "lines of halfway/memory": 1_370,
    "lines of halfway/embedded": 1_392,
    "lines of halfway/client": 5_824,
    "lines of halfway/testing": 398,
    "lines of halfway/pipeline": 7_421,
    "lines of halfway/schemas": 83,
    "files of halfway/pipeline": 51,
    "lines of tests": 70_510,
    "lines of bench": 4_000,
    "bytes of pages": 421_814,
    "settings": 85,
    "REST operations": 27,
    "calls between instances": 18,
    "ports": 16,
    "methods of ports": 54,
    "modules in circles": 12,
}


@pytest.mark.parametrize("name", BOUNDS)
def test_a_figure_of_the_code_does_not_grow(name: str) -> None:
    """If this fails, first look for what the change makes unnecessary."""
    assert static_figures()[name] <= BOUNDS[name], modules_in_circles() if "circles" in name else name


def test_every_package_has_a_bound() -> None:
    """A new package cannot grow unseen."""
    packages = {name for name in static_figures() if name.startswith("lines of halfway/")}
    assert packages == {name for name in BOUNDS if name.startswith("lines of halfway/")}
