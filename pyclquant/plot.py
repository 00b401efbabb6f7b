"""Figures of `pyclquant kv --plot` and `pyclquant bench --plot`. matplotlib is imported when one is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pyclquant.bench import Report
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
    """A bar for each operation and format in GB/s, with the device's read and copy floors as lines. Raises FileError."""
    fig, (ax,) = figure(f"Bytes read and written a second on {report.device}", [1])
    ops = list(dict.fromkeys(r.op for r in report.results))
    formats = list(dict.fromkeys(r.format for r in report.results))
    width = 0.8 / len(formats)
    for f, format in enumerate(formats):
        rows = [r for r in report.results if r.format == format and r.gb_s is not None]
        at = [ops.index(r.op) + (f - (len(formats) - 1) / 2) * width for r in rows]
        bars = ax.bar(at, [r.gb_s or 0.0 for r in rows], width * 0.92, color=COLOURS.get(format, GREY), label=format)
        ax.bar_label(bars, [f"{r.of_floor:.0%}" for r in rows], label_type="center", color="white", fontsize=9)
    for floor, style, name in ((report.read, "--", "read floor"), (report.copy, "-", "copy floor")):
        if floor is not None:
            ax.axhline(floor.gb_s, color=GREY, linewidth=1, linestyle=style, label=f"{name} {floor.gb_s:.4g} GB/s")
    ax.set_xticks(range(len(ops)), ops)
    ax.set(ylabel="GB/s (in the bars: share of the copy floor)", ylim=(0, None))
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    save(fig, path)
