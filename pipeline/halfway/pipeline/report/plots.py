"""Plots as SVG inside a page, which loads nothing else."""

from __future__ import annotations

import io
import re
import warnings
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

_COLOURS: Final = ("#2a7f8e", "#d1603d", "#7a6fb0", "#8a8a8a")
_WIDTH: Final = 8.0
_HEIGHT: Final = 2.6
_ROW: Final = 0.27
"""The height of a row of a plot in inches."""
_LABEL: Final = 40
"""The largest number of characters of a name."""
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_SECOND, _MINUTE, _HOUR, _DAY = 1_000, 60_000, 3_600_000, 86_400_000
_TICKS: Final = (
    *(1, 10, 100, _SECOND, 10 * _SECOND, _MINUTE, 10 * _MINUTE),
    *(_HOUR, 6 * _HOUR, _DAY, 7 * _DAY, 30 * _DAY, 365 * _DAY),
)


def duration(ms: float) -> str:
    """Return a time in the unit that is easiest to read."""
    for unit, size in (("d", _DAY), ("h", _HOUR), ("min", _MINUTE), ("s", _SECOND)):
        if ms >= size:
            return f"{ms / size:.3g} {unit}"
    return f"{ms:.3g} ms"


def histogram(edges: Sequence[float], series: Mapping[str, Sequence[int]], quantiles: Sequence[float]) -> str:
    """Return the durations of transactions by cause, on a logarithmic scale, with p50 and p99."""
    figure, axes = _axes(_HEIGHT)
    below = [0] * (len(edges) - 1)
    widths = [b - a for a, b in pairwise(edges)]
    for colour, (name, counts) in zip(_COLOURS, series.items(), strict=False):
        if any(counts):
            axes.bar(edges[:-1], counts, bottom=below, width=widths, align="edge", color=colour, label=name)
        below = [low + count for low, count in zip(below, counts, strict=True)]
    _durations(axes, edges[0], edges[-1])
    for name, value, side in zip(("p50", "p99"), quantiles, ("right", "left"), strict=True):
        at = max(1, value)
        axes.axvline(at, color="#444444", linewidth=1, linestyle=":")
        text = f"{name} {duration(value)}"
        axes.text(at, 1.01, text, ha=side, va="bottom", fontsize=8, transform=axes.get_xaxis_transform())
    axes.set_xlabel("time from prepare to outcome", fontsize=8)
    axes.set_ylabel("transactions", fontsize=8)
    axes.legend(frameon=False, fontsize=8, title="ended by", title_fontsize=8)
    return _svg(figure, "histogram")


def stacked(times: Sequence[datetime], series: Mapping[str, Sequence[int]], step: str) -> str:
    """Return stacked counts over time (UTC)."""
    import matplotlib.dates
    from matplotlib.ticker import MaxNLocator

    dates: Any = matplotlib.dates  # which has no types
    figure, axes = _axes(_HEIGHT)
    width = {"minute": 1 / 1440, "hour": 1 / 24, "day": 1.0}[step]
    below = [0] * len(times)
    for colour, (name, counts) in zip(_COLOURS, series.items(), strict=False):
        axes.bar(times, counts, bottom=below, width=width, align="edge", color=colour, label=_words(name))
        below = [low + count for low, count in zip(below, counts, strict=True)]
    locator = dates.AutoDateLocator(tz="UTC")
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator, tz="UTC"))
    axes.xaxis.get_offset_text().set_size(8)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlabel("time of the outcome, UTC", fontsize=8)
    axes.set_ylabel(f"transactions a {step}", fontsize=8)
    figure.legend(frameon=False, fontsize=8, loc="outside upper right", ncols=len(series))
    return _svg(figure, "stacked")


def bars(rows: Mapping[str, Sequence[int]], names: Sequence[str]) -> str:
    """Return horizontal bars in parts, with their counts."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = _axes(_ROW * (len(rows) + 3))
    labels = list(reversed(list(rows)))
    left = [0] * len(labels)
    for part, (colour, name) in enumerate(zip(_COLOURS, names, strict=False)):
        counts = [rows[label][part] for label in labels]
        axes.barh(range(len(labels)), counts, left=left, color=colour, label=_words(name))
        left = [start + count for start, count in zip(left, counts, strict=True)]
    for position, label in enumerate(labels):
        text = ", ".join(f"{count:,} {_words(name)}" for count, name in zip(rows[label], names, strict=True) if count)
        axes.annotate(
            text or "none", (left[position], position), (4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set_xlim(right=max(1, *left) * 1.4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _names(axes, labels)
    axes.set_xlabel("transactions", fontsize=8)
    return _svg(figure, "bars")


def lines(rows: Sequence[tuple[str, float, float]], names: tuple[str, str]) -> str:
    """Return a line from one time to another for each row, on a logarithmic scale of ms."""
    figure, axes = _axes(_ROW * (len(rows) + 3))
    turned = [(label, max(1.0, low), max(1.0, high)) for label, low, high in reversed(rows)]
    for position, (_, low, high) in enumerate(turned):
        axes.plot([low, high], [position, position], color="#cccccc", zorder=1)
    for part, name in enumerate(names):
        axes.scatter([row[part + 1] for row in turned], range(len(turned)), color=_COLOURS[part], label=name)
    _durations(axes, min(low for _, low, _ in turned) / 2, max(high for *_, high in turned) * 2)
    _names(axes, [label for label, *_ in turned])
    axes.set_ylim(-0.6, len(turned) - 0.4)
    axes.set_xlabel("time from prepare to outcome", fontsize=8)
    figure.legend(frameon=False, fontsize=8, loc="outside upper right", ncols=len(names))
    return _svg(figure, "lines")


def _names(axes: Any, names: Sequence[str]) -> None:
    """Label the rows. Names are shown as they are, never read as a formula."""
    plain = [_CONTROL.sub(" ", name) for name in names]
    short = [name if len(name) <= _LABEL else f"{name[: _LABEL - 1]}…" for name in plain]
    axes.set_yticks(range(len(short)), short, parse_math=False)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _durations(axes: Any, low: float, high: float) -> None:
    """Label the horizontal axis with times."""
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    ticks = [tick for tick in _TICKS if low <= tick <= high]
    axes.set_xticks(ticks, [duration(tick) for tick in ticks])
    axes.set_xticks([], minor=True)


def _axes(height: float) -> tuple[Any, Any]:
    # Not a figure of pyplot, which would keep it and look for a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    return figure, axes


def _svg(figure: Any, name: str) -> str:
    import matplotlib as mpl

    out = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}), warnings.catch_warnings():
        # Text stays text, in the fonts of the browser. The fonts of this machine do not matter.
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    # An XML declaration and a document type do not belong inside a page, and in a page with several plots each needs
    # ids of its own.
    element = re.sub(r"\A.*?(?=<svg)", "", out.getvalue(), flags=re.DOTALL)
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\1{name}-", element)
