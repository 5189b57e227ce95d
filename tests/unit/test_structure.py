"""The size and the shape of the code may only shrink: each bound is a figure that was reached.

`python -m tests.support.structure.figures` prints the figures. Lower a bound when its figure falls. Raise one only for
something that users asked for, and name the price in the commit.
"""

import pytest

from tests.support.structure.figures import modules_in_circles, static_figures

BOUNDS = {
    "lines of coordinator and adapters": 46_992,
    "files of coordinator and adapters": 182,
    "lines of halfway/protocol": 2_809,
    "lines of halfway/coordinator": 8_859,
    "lines of halfway/http": 5_886,
    "lines of halfway/app": 5_774,
    "lines of halfway/kafka": 10_244,
    "lines of halfway/checks": 1_149,
    "lines of halfway/peers": 358,
    "lines of halfway/simulated": 2_166,
    "lines of halfway/embedded": 1_292,
    "lines of halfway/client": 8_098,
    "lines of halfway/testing": 357,
    "lines of halfway/pipeline": 6_228,
    "lines of halfway/schemas": 107,
    "files of halfway/pipeline": 34,
    "lines of tests": 77_862,
    "lines of bench": 3_999,
    "bytes of pages": 204_765,
    "settings": 50,
    "REST operations": 22,
    "calls between instances": 10,
    "ports": 15,
    "methods of ports": 51,
    "modules in circles": 0,
}


# One worker counts for all.
@pytest.mark.xdist_group("structure")
@pytest.mark.parametrize("name", BOUNDS)
def test_a_figure_of_the_code_does_not_grow(name: str) -> None:
    """If this fails, first look for what the change makes unnecessary."""
    assert static_figures()[name] <= BOUNDS[name], modules_in_circles() if "circles" in name else name


@pytest.mark.xdist_group("structure")
def test_every_package_has_a_bound() -> None:
    """A new package cannot grow unseen."""
    packages = {name for name in static_figures() if name.startswith("lines of halfway/")}
    assert packages == {name for name in BOUNDS if name.startswith("lines of halfway/")}
