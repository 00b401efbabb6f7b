"""The tables that `pyclquant` prints for people, as rich renderables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from pyclquant import bench
from pyclquant.capabilities import Capabilities
from pyclquant.convert import Row as ConvertedRow
from pyclquant.convert import relative_rms
from pyclquant.device import Found
from pyclquant.evaluate import Row
from pyclquant.selftest import Result
from pyclquant.tune import Row as Tuned

EXTENSIONS = {
    "half_convert": "cl_khr_fp16",
    "half_arithmetic": "cl_khr_fp16",
    "subgroup": "cl_khr_subgroups",
    "subgroup_size": "cl_intel_required_subgroup_size",
    "shuffle_khr": "cl_khr_subgroup_shuffle",
    "shuffle_intel": "cl_intel_subgroups",
    "dot_khr": "cl_khr_integer_dot_product",
    "dot_arm": "cl_arm_integer_dot_product_int8",
}
"""Features that a driver reports as an extension."""

FP_CONFIG = {"denormals": "DENORM", "fma": "FMA", "divide_option": "CORRECTLY_ROUNDED_DIVIDE_SQRT"}
"""Features that a driver reports as a bit of its single_fp_config."""

SIZES = {"work_group": "max_work_group_size", "local_memory": "local_mem_size"}
"""Features that a driver reports as a number."""


def table(*columns: str, right: Iterable[str] = (), whole: Iterable[str] = ("format",)) -> Table:
    """An empty table with these headings; those in `right` are numbers, which like those in `whole` are never broken."""
    t = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", pad_edge=False)
    for column in columns:
        numeric = column in right
        t.add_column(column, justify="right" if numeric else "left", overflow="fold", no_wrap=numeric or column in whole)
    return t


def good(ok: bool) -> Text:
    """Yes or no in their colours."""
    return Text("yes", "green") if ok else Text("no", "red")


def number(value: float | None, digits: int = 1) -> str:
    """A figure with so many decimals; `-` for none."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:,.{digits}f}" if math.isfinite(value) else ("inf" if value > 0 else "-inf")


def size(nbytes: float) -> str:
    """Bytes in decimal units."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} GB"


# ---- probe ----


def claim(feature: str, reported: Mapping[str, Any]) -> str:
    """What the driver says about a feature, empty when it has no word for it."""
    if feature == "subgroup" and reported.get("sub_group_sizes"):
        return "yes"
    if feature in EXTENSIONS:
        return "yes" if EXTENSIONS[feature] in (reported.get("extensions") or []) else "no"
    if feature in FP_CONFIG:
        return "yes" if FP_CONFIG[feature] in (reported.get("single_fp_config") or []) else "no"
    return str(reported.get(SIZES[feature])) if feature in SIZES else ""


def summary(found: Found) -> str:
    """What the driver reports about a device as a whole, in three lines."""
    r = found.reported
    return "\n".join(
        (
            f"{r['device_type']}; vendor {r['vendor']}; driver {r['driver_version']}",
            f"{r['device_version']}; {r['opencl_c_version']}",
            f"{r['max_compute_units']} compute units; {size(r['global_mem_size'] or 0)} of memory",
        )
    )


def features(caps: Capabilities) -> Table:
    """Every probed feature: what the driver reports, whether it works, what was seen."""
    t = table("feature", "reported", "works", "seen")
    for name, verdict in caps.works.items():
        t.add_row(name, claim(name, caps.reported), good(verdict.ok), Text(verdict.reason))
    return t


def used(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """Operations, the variant that they take, and why not each other one. Operations alike share a row."""
    t = table("operation", "used", "refused", "because")
    choices = {op: (row["variant"], row["refused"]) for op, row in rows.items()}
    for op, row in rows.items():
        alike = [other for other in rows if choices[other] == choices[op]]
        if alike[0] != op:
            continue
        ops = "\n".join(alike)
        taken = Text(row["variant"] or "none", "green" if row["variant"] else "red")
        refused = list(row["refused"].items()) or [("", "")]
        t.add_row(ops, taken, refused[0][0], Text(refused[0][1]))
        for variant, reason in refused[1:]:
            t.add_row("", "", variant, Text(reason))
    return t


def sources(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Where the launch parameters of the operations come from, a line for each place."""
    places = dict.fromkeys(row["tuned"] for row in rows.values() if row["tuned"])
    return "\n".join(f"launch parameters of {', '.join(op for op in rows if rows[op]['tuned'] == p)}: {p}" for p in places)


# ---- kv ----


def kv_table(rows: Sequence[Row]) -> Table:
    """A row for each tensor and format, then a total for each format."""
    figures = ("before", "after", "ratio", "SQNR dB", "max error", "µs", "GB/s")
    t = table("tensor", "shape", "format", "scales", *figures, right=figures)
    previous = ""
    for row in rows:
        shape = "×".join(map(str, row.shape))
        name, shape = (Text(row.name), shape) if row.name != previous else (Text(), "")
        previous = row.name
        scales = row.granularity.removeprefix("per_") + (f" {row.group_size}" if row.group_size else "")
        t.add_row(
            name,
            shape,
            row.format,
            scales,
            size(row.bytes_in),
            size(row.bytes_out),
            ratio(row.bytes_in, row.bytes_out),
            number(row.errors.sqnr_db),
            f"{row.errors.max_abs_err:.3g}",
            number(row.quantize_us),
            number(row.gb_s, 2),
        )
    t.add_row()
    for format in dict.fromkeys(row.format for row in rows):
        mine = [row for row in rows if row.format == format]
        before, after = sum(row.bytes_in for row in mine), sum(row.bytes_out for row in mine)
        tensors = f"{len(mine)} tensor{'s' * (len(mine) != 1)}"
        t.add_row("total", tensors, format, "", size(before), size(after), ratio(before, after), style="bold")
    return t


def ratio(before: int, after: int) -> str:
    """How many times smaller."""
    return f"{before / after:.2f}" if after else "-"


# ---- convert ----


def convert_table(rows: Sequence[ConvertedRow], others: int) -> Table:
    """A row for each layer, then totals. others: bytes of the tensors that are no layers."""
    figures = ("before", "after", "ratio", "error", "SQNR dB")
    t = table("layer", "shape", *figures, "note", right=figures, whole=("shape",))

    def add(name: str, what: str, before: int, after: int, of: Sequence[ConvertedRow], note: str = "", style: str = "") -> None:
        error = relative_rms(of) if of else None
        figures = (size(before), size(after), ratio(before, after), percent(error), number(decibel(error)))
        t.add_row(Text(name), what, *figures, Text(note), style=style)

    for row in rows:
        note = "" if row.kept is None else f"in floats, as {row.kept}"
        mine = [row] if row.kept is None else []
        add(row.name, "×".join(map(str, row.shape)), row.bytes_in, row.bytes_out, mine, note)
    quantized = [row for row in rows if row.kept is None]
    parts = (
        ("quantized", quantized, 0),
        ("in floats", [row for row in rows if row.kept is not None], others),
        ("all", rows, others),
    )
    t.add_row()
    for name, part, more in parts:
        before, after = (sum(sizes) + more for sizes in ([row.bytes_in for row in part], [row.bytes_out for row in part]))
        add(name, f"{len(part)} layer{'s' * (len(part) != 1)}", before, after, part if part is quantized else [], style="bold")
    return t


def percent(share: float | None) -> str:
    """A share in hundredths; `-` for none."""
    return "-" if share is None else f"{share:.2%}"


def decibel(error: float | None) -> float | None:
    """Signal-to-noise ratio of a relative error; inf for no error."""
    if error is None:
        return None
    return -20 * math.log10(error) if error else math.inf


# ---- selftest and bench ----


def tuned_table(rows: Sequence[Tuned]) -> Table:
    """What was tuned: the parameters that were there, the fastest, and their times."""
    figures = ("now µs", "best µs", "gain", "tried")
    t = table("kernel", "size", "shape", "now", "best", *figures, right=figures)
    for row in rows:
        now, best = (" ".join(f"{name}={v}" for name, v in values.items()) for values in (row.present, row.best))
        times = (f"{row.present_us:.1f}", f"{row.best_us:.1f}", f"{row.present_us / row.best_us - 1:.0%}")
        t.add_row(row.kernel, row.size, row.shape, now, "" if best == now else best, *times, str(row.tried))
    return t


def selftest_table(results: Sequence[Result]) -> Table:
    """A row for each operation, variant and format or scale layout; one row for those that a variant refuses alike."""
    t = table("operation", "variant", "format, scales", "cases", "result", "detail", right=("cases",), whole=("format, scales",))
    refused: set[tuple[str, str, str]] = set()
    for r in results:
        if r.ok and not r.cases:
            row = (r.op, r.variant, r.detail.split(": ", 3)[-1])  # after "not run: force: VARIANT cannot run on NAME: "
            if row not in refused:
                t.add_row(*row[:2], "", "0", Text("not run", "yellow"), Text(row[2]))
            refused.add(row)
        else:
            verdict = Text("within bounds" if r.op == "gemv" else "equal", "green") if r.ok else Text("WRONG", "red")
            t.add_row(r.op, r.variant, r.format, str(r.cases), verdict, Text(r.detail))
    return t


def floor_table(report: bench.Report) -> Table:
    """The floors: bytes that a run moves, time, and the form of the kernel that won; and what a launch costs."""
    figures = ("bytes", "median", "GB/s")
    t = table("floor", *figures, "fastest form", right=figures)
    for f in report.floors:
        t.add_row(f"{f.kind} floor", size(f.nbytes), microseconds(f.median_us), number(f.gb_s), f.how)
    if report.launch_us is not None:
        t.add_row("launch", "", microseconds(report.launch_us), "", "an empty kernel of one work-item")
    if report.gops is not None:
        t.add_row("arithmetic", "", "", "", f"{number(report.gops)}e9 operations a second, float32 multiply-adds")
    return t


def microseconds(value: float | None, digits: int = 1) -> str:
    """A time with its unit; empty for none."""
    return "" if value is None else f"{number(value, digits)} µs"


def peer_names(results: Sequence[bench.Result]) -> list[str]:
    """Headings for the other libraries' times."""
    return list(dict.fromkeys(peer.name for r in results for peer in r.peers))


def of_peers(r: bench.Result, names: Sequence[str]) -> list[str]:
    """The times of the other libraries, `-` for what was not timed."""
    found = {peer.name: peer for peer in r.peers}
    return [(microseconds(found[name].median_us) or "-") if name in found else "" for name in names]


def peer_notes(results: Sequence[bench.Result]) -> list[str]:
    """What is to be said of the other libraries' times, each once: how they ran, or why not; of which, unless it is of all."""
    notes: dict[tuple[str, str], list[str]] = {}
    count = Counter(peer.name for r in results for peer in r.peers)
    for r in results:
        for peer in r.peers:
            if peer.note:
                of = f"{r.op} {r.format} {'×'.join(map(str, r.shape))}" + (f" M={r.rows}" if r.rows else "")
                notes.setdefault((peer.name, peer.note), []).append(of)
    return [
        f"{name}, {note}" + (f": {', '.join(dict.fromkeys(of))}" if len(of) < count[name] else "")
        for (name, note), of in notes.items()
    ]


def kv_bench_table(results: Sequence[bench.Result]) -> Table:
    """A row for each K/V operation and format."""
    names = peer_names(results)
    figures = ("median", "GB/s", "of copy", *names)
    t = table(
        "operation", "format", "variant", "shape", *figures, "result", right=figures, whole=("operation", "format", "shape")
    )
    for r in results:
        what = (r.op, r.format, r.variant, "×".join(map(str, r.shape)))
        if r.median_us is None:
            t.add_row(*what, *[""] * len(figures), Text(f"WRONG: {r.detail}", "red"))
            continue
        speed = (microseconds(r.median_us), number(r.gb_s), f"{r.of_floor:.1%}")
        t.add_row(*what, *speed, *of_peers(r, names), Text("right", "green"))
    return t


def w8a8_bench_table(results: Sequence[bench.Result]) -> Table:
    """A row for each W8A8 operation, scale layout and number of rows."""
    names = peer_names(results)
    figures = ("M", "median", "GB/s", "× floor", *names)
    t = table(
        "operation", "scales", "variant", "shape", *figures, "result", right=figures, whole=("operation", "scales", "shape")
    )
    for r in results:
        what = (r.op, r.format, r.variant, "×".join(map(str, r.shape)), str(r.rows))
        if r.median_us is None or r.of_floor is None:
            t.add_row(*what, *[""] * (len(figures) - 1), Text(f"WRONG: {r.detail}", "red"))
            continue
        speed = (microseconds(r.median_us), number(r.gb_s), number(1 / r.of_floor, 2))
        t.add_row(*what, *speed, *of_peers(r, names), Text("right", "green"))
    return t


def host_table(results: Sequence[bench.Result]) -> Table:
    """What the host spends on a call, for the operations of which that was measured."""
    rows = [r for r in results if r.host_us]
    calls = tuple(dict.fromkeys(call for r in rows for call in r.host_us or {}))
    figures = ("M", *(f"{call}()" for call in calls))
    t = table("host time of", "scales", "shape", *figures, right=figures, whole=("shape",))
    for r in rows:
        shape = "×".join(map(str, r.shape))
        t.add_row(r.op, r.format, shape, str(r.rows), *(microseconds((r.host_us or {}).get(call)) for call in calls))
    return t


def growth_table(lines: Sequence[bench.Growth]) -> Table:
    """The line through the times of each operation that was measured at several sizes."""
    figures = ("sizes", "from", "to", "launch", "GB/s", "worst", "there")
    t = table("time = launch + bytes / bandwidth", *figures, right=figures, whole=("time = launch + bytes / bandwidth",))
    for g in lines:
        sizes = [nbytes for nbytes, _ in g.line.points]
        what = (str(len(sizes)), size(sizes[0]), size(sizes[-1]), microseconds(g.line.launch * 1e6))
        t.add_row(g.name, *what, number(g.line.bandwidth * 1e-9), f"{g.line.worst:+.1%}", size(g.line.worst_nbytes))
    return t
