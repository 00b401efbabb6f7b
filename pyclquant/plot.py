"""Figures of `pyclquant kv --plot` and `pyclquant bench --plot`. matplotlib is imported when one is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pyclquant.bench import PRODUCTS, Floor, Growth, Report, Result
from pyclquant.errors import PyclquantError
from pyclquant.evaluate import EDGES, Row
from pyclquant.files import check_output, replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
COLOURS = {
    "fp8_e4m3fn": "#0072b2",
    "fp8_e5m2": "#e69f00",
    "int8": "#009e73",
    "int4": "#cc3d7a",
    "per_row": "#0072b2",
    "block_128": "#d55e00",
}
"""Of formats and scale layouts: Okabe and Ito's, which stay apart for the colour-blind."""
GREY = "#555555"


def check_plot(path: Path) -> None:
    """Raises PyclquantError when matplotlib is missing, FileError when `path` cannot be written: before long work."""
    if find_spec("matplotlib") is None:
        raise PyclquantError("--plot: expected matplotlib, which is not installed; pip install 'pyclquant[plot]'")
    check_output(path, SUFFIXES)


def figure(title: str, widths: Sequence[float], rows: int = 1, height: float = 4.8) -> tuple[Figure, list[Axes]]:
    """An empty figure with rows of panels side by side."""
    from matplotlib.figure import Figure

    fig = Figure(figsize=(11, height * rows), dpi=150, layout="constrained")
    fig.suptitle(title, fontsize=11)
    axes = list(fig.subplots(rows, len(widths), squeeze=False, width_ratios=widths).flat)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="#dddddd", linewidth=0.6)
        ax.set_axisbelow(True)
    return fig, axes


def save(fig: Figure, path: Path) -> None:
    """Write a figure, all or nothing. Raises FileError."""
    with replacing(path, SUFFIXES) as beside:
        fig.savefig(beside)


def plot_kv(rows: Sequence[Row], device: str, path: Path) -> None:
    """Error against size, a point for each tensor and format, and the errors' histograms by format. Raises FileError."""
    rows = [row for row in rows if row.bytes_in]
    tensors = len({row.name for row in rows})
    fig, (size, spread) = figure(f"Quantization error of {tensors} tensors on {device}", [1, 1.3])
    for format in dict.fromkeys(row.format for row in rows):
        mine = [row for row in rows if row.format == format]
        points = [(8 * r.bytes_out / math.prod(r.shape), r.errors.sqnr_db) for r in mine if math.isfinite(r.errors.sqnr_db)]
        if points:
            bits, sqnr = zip(*points, strict=True)
            size.scatter(bits, sqnr, s=40, color=COLOURS[format], alpha=0.6, linewidth=0)
            size.annotate(
                format, (max(bits), sum(sqnr) / len(sqnr)), (8, 0), textcoords="offset points", va="center", color=COLOURS[format]
            )
        histogram = np.sum([r.errors.histogram for r in mine], axis=0)
        exact = sum(r.errors.exact for r in mine)
        percent = 100 / max(1, exact + int(histogram.sum()))
        label = f"{format}, {exact * percent:.1f} % exact"
        spread.stairs(histogram * percent, 10.0**EDGES, color=COLOURS[format], linewidth=1.8, label=label)
        spread.stairs(histogram * percent, 10.0**EDGES, color=COLOURS[format], alpha=0.1, fill=True)
    for before in sorted({8 * row.bytes_in / math.prod(row.shape) for row in rows}):
        size.axvline(before, color=GREY, linewidth=1, linestyle="--")
        size.text(before, 0.02, "before ", color=GREY, ha="right", transform=size.get_xaxis_transform())
    size.set(xlabel="stored bits a value, scales included", ylabel="SQNR in dB (higher is better)", xlim=(0, None))
    size.set_title("Error against size", fontsize=10, loc="left")
    top = 1.2 * spread.get_ylim()[1]  # leaves the legend its place
    spread.set(xscale="log", xlabel="|error| / RMS of the tensor", ylabel="values in a bin, %", ylim=(0, top))
    spread.set_title("Histograms of the error (8 bins a decade)", fontsize=10, loc="left")
    spread.legend(frameon=False, loc="upper left", ncols=2)
    save(fig, path)


def plot_bench(report: Report, path: Path) -> None:
    """A roofline, and what the run has more: bars of K/V, products against rows, costs against size; nothing of what was wrong.

    Raises FileError.
    """
    right = [r for r in report.results if r.of_floor]
    tensors = [r for r in right if r.rows is None]
    projections = [r for r in right if r.rows is not None]
    panels: list[Callable[[Axes], None]] = [lambda ax: plot_roofline(ax, right, report)]
    if tensors and len({r.shape for r in tensors}) == 1:
        panels.append(lambda ax: plot_tensors(ax, tensors, report.floors))
    if len({r.rows for r in projections}) > 1 and len({r.shape[-1] for r in projections}) == 1 and not report.growth:
        panels.append(lambda ax: plot_projections(ax, projections))
    for family in dict.fromkeys(g.op.split("_")[0] for g in report.growth):
        lines = [g for g in report.growth if g.op.split("_")[0] == family]
        panels.append(partial(plot_growth, lines=lines, report=report))
    side_by_side = min(2, len(panels))
    fig, axes = figure(f"pyclquant on {report.device}", [1] * side_by_side, -(-len(panels) // side_by_side), 5.6)
    for ax, panel in zip(axes, panels, strict=False):
        panel(ax)
    for ax in axes[len(panels) :]:
        ax.remove()
    save(fig, path)


def below(ax: Axes, columns: int = 1) -> None:
    """The legend, where it hides nothing."""
    ax.legend(frameon=False, fontsize=7.5, loc="upper left", bbox_to_anchor=(-0.02, -0.13), ncols=columns)


def logarithmic(axis: Axis) -> None:
    """Plain numbers at 1, 2, 5 of each decade, at 1 alone over more than two decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 150 * low else (1.0,), numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def marks(format: str, others: Sequence[object], other: object) -> dict[str, Any]:
    """Colour by format or scale layout, marker by what else tells series apart."""
    marker = "osD^vP*X<>"[list(dict.fromkeys(others)).index(other) % 10]
    return {"color": COLOURS[format], "marker": marker, "markersize": 5, "alpha": 0.85}


def plot_roofline(ax: Axes, results: Sequence[Result], report: Report) -> None:
    """Operations a second against operations a byte under the measured roofs: a line for what differs in rows alone.

    Of several sizes the largest is drawn. A floor of buffers a tenth as large as others is none: its time is mostly launch.
    """
    largest: dict[tuple[str, str, str, int | None], Result] = {}
    for r in sorted(results, key=lambda r: r.nbytes):
        largest[r.op, r.format, r.variant, r.rows] = r
    series: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for r in largest.values():
        point = r.operations / r.nbytes, r.operations / (r.median_us or math.inf) * 1e-3
        series.setdefault((r.op, r.format, r.variant), []).append(point)
    points = [p for values in series.values() for p in values]
    left, right = 0.5 * min(x for x, _ in points), 3 * max(x for x, _ in points)
    floors = [f for f in report.floors if 10 * f.nbytes > max(other.nbytes for other in report.floors)]
    for kind, style in (("read", "--"), ("copy", "-")):
        floor = max((f for f in floors if f.kind == kind), key=lambda f: f.nbytes, default=None)
        if floor:
            reach = [left, max(left, min(right, report.gops / floor.gb_s if report.gops else right))]
            label = f"{kind} floor, {floor.gb_s:,.4g} GB/s"
            ax.plot(reach, [x * floor.gb_s for x in reach], style, color=GREY, label=label)
    if report.gops:
        start = min(right, max(left, report.gops / max(f.gb_s for f in floors)))
        label = f"float32 units, {report.gops:,.0f} billion operations a second"
        ax.plot([start, right], [report.gops] * 2, ":", color="black", label=label)
    others = [(op, variant) for op, _, variant in series]
    for (op, format, variant), values in series.items():
        look = marks(format, others, (op, variant))
        ax.plot(*zip(*sorted(values), strict=True), linewidth=0.8, label=f"{op} {format} {variant}", **look)
    ax.set(xscale="log", yscale="log", xlim=(left, right), xlabel="operations a byte read or written")
    ax.set(ylabel="billion operations a second")
    logarithmic(ax.xaxis)
    logarithmic(ax.yaxis)
    ax.grid(axis="both", color="#dddddd", linewidth=0.6)
    ax.set_title("Roofline", fontsize=10, loc="left")
    below(ax, 2)


def plot_tensors(ax: Axes, results: Sequence[Result], floors: Sequence[Floor]) -> None:
    """A bar for each operation, variant and format in GB/s, with the floors of the largest buffers as lines."""
    several = len({r.variant for r in results}) > 1
    names = [f"{r.op}\n{r.variant}" if several else r.op for r in results]
    ops = list(dict.fromkeys(names))
    formats = list(dict.fromkeys(r.format for r in results))
    width = 0.8 / len(formats)
    for f, format in enumerate(formats):
        rows = [(name, r) for name, r in zip(names, results, strict=True) if r.format == format]
        at = [ops.index(name) + (f - (len(formats) - 1) / 2) * width for name, _ in rows]
        bars = ax.bar(at, [r.gb_s or 0.0 for _, r in rows], width * 0.92, color=COLOURS[format], label=format)
        labels = [f"{r.of_floor:.0%}" for _, r in rows]
        ax.bar_label(bars, labels, label_type="center", color="white", fontsize=min(9, 24 / len(ops)))
    for kind, style in (("read", "--"), ("copy", "-")):
        floor = max((f for f in floors if f.kind == kind), key=lambda f: f.nbytes)
        ax.axhline(floor.gb_s, color=GREY, linewidth=1, linestyle=style, label=f"{kind} floor {floor.gb_s:.4g} GB/s")
    ax.set_xticks(range(len(ops)), ops)
    ax.set(ylabel="GB/s (in the bars: share of the copy floor)", ylim=(0, None))
    ax.set_title(f"Speed, {list(results[0].shape)}", fontsize=10, loc="left")
    below(ax, 2)


def plot_projections(ax: Axes, results: Sequence[Result]) -> None:
    """A line for each operation, layout, variant and N: how many times as long as its floor it takes, against rows."""
    several = len({r.shape for r in results if r.op in PRODUCTS}) > 1
    series: dict[tuple[str, ...], list[tuple[int, float]]] = {}
    for r in results:
        name = (r.op, r.format, r.variant, *(["×".join(map(str, r.shape))] if several and r.op in PRODUCTS else []))
        series.setdefault(name, []).append((r.rows or 0, 1 / (r.of_floor or 1)))
    others = [(name[0], *name[2:]) for name in series]
    for name, points in series.items():
        look = marks(name[1], others, (name[0], *name[2:]))
        ax.plot(*zip(*sorted(points), strict=True), label=" ".join(name), **look)
    ax.axhline(1, color=GREY, linewidth=1)
    ticks = sorted({r.rows or 0 for r in results})
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [str(t) for t in ticks])
    ax.set(xlabel="rows of activations", ylabel="time over that of a plain read (act_quant: copy)", yscale="log")
    logarithmic(ax.yaxis)
    ax.set_title("Time over the floor", fontsize=10, loc="left")
    below(ax, 2)


def plot_growth(ax: Axes, lines: Sequence[Growth], report: Report) -> None:
    """Time against bytes, with the lines fitted, and the floors' own times."""
    others = [(g.op, g.variant, g.rows) for g in lines]
    for g in lines:
        nbytes, seconds = (np.array(values) for values in zip(*g.line.points, strict=True))
        look = marks(g.format, others, (g.op, g.variant, g.rows))
        over = np.geomspace(nbytes[0], nbytes[-1], 64)
        fitted = f"{g.line.launch * 1e6:.3g} µs + bytes / {g.line.bandwidth * 1e-9:,.4g} GB/s, {g.line.worst:+.0%} at worst"
        ax.plot(over / 1e6, [g.line.seconds(x) * 1e6 for x in over], color=look["color"], linewidth=1)
        ax.plot(nbytes / 1e6, seconds * 1e6, linestyle="", label=f"{g.name}: {fitted}", **look)
    kinds = {r.floor for r in report.results if r.op in {g.op for g in lines}}
    ends = [g.line.points[n][0] for g in lines for n in (0, -1)]
    floors = sorted((f.nbytes, f.median_us) for f in report.floors if f.kind in kinds)
    inside = [(nbytes / 1e6, us) for nbytes, us in floors if min(ends) <= nbytes * 1.1 <= max(ends) * 1.2]
    if inside:
        label = f"{' or '.join(sorted(kinds))} floor of so many bytes"
        ax.plot(*zip(*inside, strict=True), "--", color=GREY, linewidth=1, label=label)
    ax.set(xscale="log", yscale="log", xlabel="MB read and written", ylabel="µs")
    logarithmic(ax.xaxis)
    logarithmic(ax.yaxis)
    ax.grid(axis="both", color="#dddddd", linewidth=0.6)
    ax.set_title("Cost against size: time = launch + bytes / bandwidth", fontsize=10, loc="left")
    below(ax)
