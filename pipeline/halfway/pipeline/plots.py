"""Plots as SVG to stand in a page: nothing is loaded from elsewhere."""

from __future__ import annotations

import io
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

_COLOURS: Final = ("#2a7f8e", "#d1603d", "#7a6fb0", "#8a8a8a")
_WIDTH: Final = 8.0
_HEIGHT: Final = 2.9


def histogram(edges: Sequence[float], counts: Sequence[int], quantiles: Sequence[float]) -> str:
    """Return how long transactions took, on a logarithmic scale of ms, with p50, p95 and p99."""
    figure, axes = _axes()
    axes.bar(
        edges[:-1],
        counts,
        width=[b - a for a, b in pairwise(edges)],
        align="edge",
        color=_COLOURS[0],
    )
    axes.set_xscale("log")
    for name, value in zip(("p50", "p95", "p99"), quantiles, strict=True):
        axes.axvline(max(1, value), color=_COLOURS[1], linewidth=1)
        axes.annotate(name, (max(1, value), axes.get_ylim()[1]), fontsize=8, color=_COLOURS[1])
    axes.set_xlabel("time from prepare to outcome, ms")
    axes.set_ylabel("transactions")
    return _svg(figure, "histogram")


def stacked(times: Sequence[datetime], series: Mapping[str, Sequence[int]], step: str) -> str:
    """Return counts over time, one above the other."""
    figure, axes = _axes()
    width = {"minute": 1 / 1440, "hour": 1 / 24, "day": 1.0}[step]
    below = [0] * len(times)
    for colour, (name, counts) in zip(_COLOURS, series.items(), strict=False):
        axes.bar(times, counts, bottom=below, width=width, align="edge", color=colour, label=name)
        below = [low + count for low, count in zip(below, counts, strict=True)]
    axes.set_ylabel(f"outcomes by {step}")
    axes.legend(frameon=False, fontsize=8)
    figure.autofmt_xdate()
    return _svg(figure, "stacked")


def bars(rows: Mapping[str, Sequence[int]], names: Sequence[str]) -> str:
    """Return horizontal bars, each in parts."""
    figure, axes = _axes()
    labels = list(reversed(list(rows)))
    left = [0] * len(labels)
    for part, (colour, name) in enumerate(zip(_COLOURS, names, strict=False)):
        counts = [rows[label][part] for label in labels]
        axes.barh(labels, counts, left=left, color=colour, label=name)
        left = [start + count for start, count in zip(left, counts, strict=True)]
    axes.set_xlabel("transactions")
    axes.legend(frameon=False, fontsize=8)
    return _svg(figure, "bars")


def lines(rows: Mapping[str, tuple[float, float]], names: tuple[str, str]) -> str:
    """Return for each row the way from one number to another, on a logarithmic scale of ms."""
    figure, axes = _axes()
    labels = list(reversed(list(rows)))
    for label in labels:
        low, high = (max(1.0, float(value)) for value in rows[label])
        axes.plot([low, high], [label, label], color="#cccccc", zorder=1)
    for part, name in enumerate(names):
        axes.scatter([max(1.0, float(rows[label][part])) for label in labels], labels, color=_COLOURS[part], label=name)
    axes.set_xscale("log")
    axes.set_xlabel("time from prepare to outcome, ms")
    axes.legend(frameon=False, fontsize=8)
    return _svg(figure, "lines")


def _axes() -> tuple[Any, Any]:
    # A figure of its own, not pyplot's: nothing is kept between plots, and no display is looked for.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    return figure, axes


def _svg(figure: Any, name: str) -> str:
    import matplotlib as mpl

    out = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    # What stands before the element (XML declaration, document type) has no place in a page, and in a page with several
    # plots each needs ids of its own.
    element = re.sub(r"\A.*?(?=<svg)", "", out.getvalue(), flags=re.DOTALL)
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\1{name}-", element)
