"""Figures of `pyclquant kv --plot` and `pyclquant bench --plot`. matplotlib is imported when one is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pyclquant.bench import Floor, Report, Result
from pyclquant.errors import PyclquantError
from pyclquant.evaluate import EDGES, Row
from pyclquant.files import check_output, replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
COLOURS = {"fp8_e4m3fn": "#0072b2", "fp8_e5m2": "#e69f00", "int8": "#009e73", "int4": "#cc3d7a"}
"""Okabe and Ito's, which stay apart for the colour-blind."""
GREY = "#555555"


def check_plot(path: Path) -> None:
    """Raises PyclquantError when matplotlib is missing, FileError when `path` cannot be written: before long work."""
    if find_spec("matplotlib") is None:
        raise PyclquantError("--plot: expected matplotlib, which is not installed; pip install 'pyclquant[plot]'")
    check_output(path, SUFFIXES)


def figure(title: str, widths: Sequence[float]) -> tuple[Figure, list[Axes]]:
    """An empty figure with panels side by side."""
    from matplotlib.figure import Figure

    fig = Figure(figsize=(11, 4.8), dpi=150, layout="constrained")
    fig.suptitle(title, fontsize=11)
    axes = fig.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="#dddddd", linewidth=0.6)
        ax.set_axisbelow(True)
    return fig, list(axes)


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
    """K/V as bars in GB/s, W8A8 as time over that of its floor against M; what was wrong is left out. Raises FileError."""
    tensors = [r for r in report.results if r.of_floor and r.rows is None]
    projections = [r for r in report.results if r.of_floor and r.rows is not None]
    fig, axes = figure(f"pyclquant on {report.device}", [1] * (bool(tensors) + bool(projections)))
    if tensors:
        plot_tensors(axes[0], tensors, report.floors)
    if projections:
        plot_projections(axes[-1], projections)
    save(fig, path)


def plot_tensors(ax: Axes, results: Sequence[Result], floors: Sequence[Floor]) -> None:
    """A bar for each operation and format in GB/s, with the floors of the largest buffers as lines."""
    ops = list(dict.fromkeys(r.op for r in results))
    formats = list(dict.fromkeys(r.format for r in results))
    width = 0.8 / len(formats)
    for f, format in enumerate(formats):
        rows = [r for r in results if r.format == format]
        at = [ops.index(r.op) + (f - (len(formats) - 1) / 2) * width for r in rows]
        bars = ax.bar(at, [r.gb_s or 0.0 for r in rows], width * 0.92, color=COLOURS.get(format, GREY), label=format)
        ax.bar_label(bars, [f"{r.of_floor:.0%}" for r in rows], label_type="center", color="white", fontsize=9)
    for kind, style in (("read", "--"), ("copy", "-")):
        floor = max((f for f in floors if f.kind == kind), key=lambda f: f.nbytes)
        ax.axhline(floor.gb_s, color=GREY, linewidth=1, linestyle=style, label=f"{kind} floor {floor.gb_s:.4g} GB/s")
    ax.set_xticks(range(len(ops)), ops)
    ax.set(ylabel="GB/s (in the bars: share of the copy floor)", ylim=(0, None))
    ax.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=3)


def plot_projections(ax: Axes, results: Sequence[Result]) -> None:
    """A line for each operation and scale layout: how many times as long as its floor it takes, against M."""
    ops = list(dict.fromkeys(r.op for r in results))
    for op, layout in dict.fromkeys((r.op, r.format) for r in results):
        rows = sorted((r.rows or 0, 1 / (r.of_floor or 1)) for r in results if (r.op, r.format) == (op, layout))
        colour = list(COLOURS.values())[ops.index(op) % len(COLOURS)]
        style = "-" if layout == "per_row" else ":"
        ax.plot(*zip(*rows, strict=True), marker="o", linestyle=style, color=colour, label=f"{op} {layout}")
    ax.axhline(1, color=GREY, linewidth=1)
    ticks = sorted({r.rows or 0 for r in results})
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [str(t) for t in ticks])
    ax.set(xlabel="rows of activations", ylabel="time over that of a plain read or copy", ylim=(0, None))
    ax.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
