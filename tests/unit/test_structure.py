"""The size and the shape of the code may only shrink: each bound is a figure that was reached.

`python -m tests.support.structure.figures` prints the figures. Lower a bound when its figure falls. Raise one only for
something that users asked for, and name the price in the commit.
"""

import pytest

from tests.support.structure.figures import modules_in_circles, static_figures

BOUNDS = {
    "lines of coordinator and adapters": 40_647,
    "files of coordinator and adapters": 303,
    "lines of halfway/domain": 2_721,
    "lines of halfway/service": 8_904,
    "lines of halfway/rest": 6_738,
    "lines of halfway/runtime": 3_593,
    "lines of halfway/kafka": 8_777,
    "lines of halfway/checkback": 1_165,
    "lines of halfway/peers": 365,
    "lines of halfway/memory": 1_365,
    "lines of halfway/embedded": 1_392,
    "lines of halfway/client": 5_229,
    "lines of halfway/testing": 398,
    "lines of halfway/pipeline": 7_233,
    "lines of halfway/schemas": 77,
    "files of halfway/pipeline": 53,
    "lines of tests": 63_800,
    "lines of bench": 8_734,
    "bytes of pages": 388_349,
    "settings": 78,
    "REST operations": 26,
    "calls between instances": 18,
    "ports": 16,
    "methods of ports": 50,
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
