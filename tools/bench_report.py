"""Every measurement behind README's figures on one device, in one call: Markdown tables and the JSON beside them.

    python tools/bench_report.py --device nvidia --out DIR      # bench.md, bench.json, figures when matplotlib is there

Each section is one run of `pyclquant.bench`: results are compared with the reference before they are timed, medians of
rounds that take turns, buffers rotated beyond the caches, floors and peers in the same run. GPUs get large shapes, CPU
drivers smaller ones. Exit status 1 when a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pyclquant import bench, plot
from pyclquant.bench import Job, Report, Result
from pyclquant.bench_work import Spec
from pyclquant.cli import bench_json, plain
from pyclquant.device import Device
from pyclquant.tables import number, peer_names, peer_notes, size
from pyclquant.variants import GEMV, Product, cannot

ROWS = {True: (1, 8, 32, 128), False: (1, 8, 16, 32, 64, 128)}
"""Of activations, for the products, on CPUs and on GPUs."""
WEIGHTS = {True: ((8192, 8192), (1024, 5120)), False: ((8192, 8192), (16384, 5120), (5120, 17408), (1024, 5120))}
"""N and K, likewise."""
VOCABULARY = (248064, 5120)
"""N and K of the last projection of a large model: on GPUs, one row."""
ACTIVATIONS = (256, 17408)
"""Rows and columns for the quantizers of activations."""
HOST = (1024, 5120)
"""N and K of the projection whose host time is measured."""
GROWING = {True: (8192, 8192), False: (65536, 8192)}
"""The largest weight of the table of growth."""
GROWING_K = {True: 17408, False: 69632}
"""The longest activations there."""


@dataclass(frozen=True)
class Section:
    """A run and the tables that it gives. peers: whether NumPy and torch are timed beside it."""

    name: str
    title: str
    jobs: tuple[Job, ...]
    tables: Callable[[Report], Iterator[str]]
    peers: bool = True


def gemv_variants(dev: Device) -> tuple[str | None, ...]:
    """What is forced: on a GPU each variant that puts work-items side by side, on a CPU what the device takes."""
    if dev.capabilities.is_cpu:
        return (None,)
    usual = Product(8, 8192, 8192)
    return tuple(v.name for v in GEMV if v.name not in ("row", "base") and cannot(v, dev.capabilities, usual) is None)


def sections(dev: Device) -> tuple[Section, ...]:
    """All of them, by what the device is."""
    cpu = dev.capabilities.is_cpu
    tensor = bench.default_shape(dev.capabilities)
    rows, columns = ACTIVATIONS
    forced = gemv_variants(dev)
    found = [
        Section("kv", f"K/V quantizers, {list(tensor)}", (("kv", Spec(tensor)),), kv_tables),
        Section("act_quant", f"Quantizers of activations, {list(ACTIVATIONS)}", (act_job(rows, columns),), act_tables),
    ]
    for n, k in WEIGHTS[cpu]:
        spec = Spec(weight=(n, k), rows=ROWS[cpu], variants=forced)
        found.append(Section(f"gemv_{n}x{k}", f"GEMV, {n} × {k}", (("gemv", spec),), gemv_tables))
    if not cpu:
        n, k = VOCABULARY
        spec = Spec(weight=VOCABULARY, rows=(1,), variants=forced)
        found.append(Section(f"gemv_{n}x{k}", f"GEMV, {n} × {k}", (("gemv", spec),), gemv_tables))
    n, k = HOST
    spec = Spec(weight=HOST, rows=(1, 8))
    found.append(Section("proj", f"Whole projection and its host time, {n} × {k}", (("proj", spec),), proj_tables))
    growing = {
        "kv": bench.specs("kv", Spec(), [tensor], sweep=True),
        "act_quant": bench.specs("act_quant", Spec(rows=(rows,)), [(1, GROWING_K[cpu])], sweep=True),
        "gemv": bench.specs("gemv", Spec(rows=(1, 8)), [GROWING[cpu]], sweep=True),
    }
    for op, specs in growing.items():
        jobs = tuple((op, spec) for spec in specs)
        found.append(Section(f"growth_{op}", f"Growth in bytes, {op}", jobs, growth_tables, peers=False))
    return tuple(found)


def act_job(rows: int, columns: int) -> Job:
    """All four quantizers of activations."""
    return "act_quant", Spec(weight=(1, columns), rows=(rows,))


# ---- Markdown ----


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def us(value: float | None) -> str:
    """Microseconds with three digits, in a larger unit from a thousand on."""
    if value is None:
        return "-"
    for unit in ("µs", "ms"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} s"


def beside(r: Result, names: Sequence[str]) -> list[str]:
    """Times of the other libraries, with how they ran."""
    found = {peer.name: peer for peer in r.peers}
    return [us(found[name].median_us) if name in found else "" for name in names]


def floors(report: Report) -> str:
    """The floors, and the cost of a launch."""
    rows = [[f"{f.kind} floor", size(f.nbytes), us(f.median_us), number(f.gb_s), f.how] for f in report.floors]
    found = table(("floor", "bytes", "time", "GB/s", "fastest form"), rows) + f"\nAn empty kernel: {us(report.launch_us)}."
    if report.gops:
        found += f" Float32 multiply-adds: {number(report.gops, 0)} billion operations a second."
    return found + "\n"


def kv_tables(report: Report) -> Iterator[str]:
    """A row for each operation and format."""
    names = peer_names(report.results)
    rows = []
    for r in report.results:
        figures = [us(r.median_us), number(r.gb_s), f"{r.of_floor:.1%}"] if r.of_floor else wrong(r)
        rows.append([r.op, r.format, r.variant, *figures, *beside(r, names)])
    yield table(("operation", "format", "variant", "time", "GB/s", "of the copy floor", *names), rows)
    yield floors(report)


def wrong(r: Result) -> list[str]:
    """What stands in place of three figures."""
    return [f"WRONG: {r.detail}", "", ""]


def act_tables(report: Report) -> Iterator[str]:
    """A row for each operation and layout, with the parts that a launch and the bytes have."""
    names = peer_names(report.results)
    launch = report.launch_us or 0.0
    rows = []
    for r in report.results:
        figures = wrong(r)
        if r.median_us and r.floor_us:
            over = (r.median_us - launch) / r.floor_us
            figures = [us(r.median_us), us(r.floor_us), f"{over:.2f}, {r.median_us / r.floor_us:.2f}"]
        rows.append([r.op, r.format, r.variant, *figures, *beside(r, names)])
    ratio = "(time − empty kernel) / floor, time / floor"
    yield table(("operation", "scales", "variant", "time", "copy floor of its bytes", ratio, *names), rows)
    yield floors(report)


def gemv_tables(report: Report) -> Iterator[str]:
    """A row for each number of rows, a column for each layout and variant: the time, and over that of the read floor."""
    names = peer_names(report.results)
    columns = list(dict.fromkeys((r.format, r.variant) for r in report.results))
    rows = []
    for m in dict.fromkeys(r.rows for r in report.results):
        mine = {(r.format, r.variant): r for r in report.results if r.rows == m}
        cells = [product_cell(mine[c]) if c in mine else "" for c in columns]
        peers = {peer.name: peer for r in reversed(mine.values()) for peer in r.peers}  # the first layout's
        rows.append([str(m), *cells, *(us(peers[name].median_us) if name in peers else "" for name in names)])
    yield table(("M", *(" ".join(c) for c in columns), *names), rows)
    yield floors(report)


def product_cell(r: Result) -> str:
    """Its time, and over that of its floor."""
    return f"{us(r.median_us)}, {1 / r.of_floor:.2f}" if r.of_floor else f"WRONG: {r.detail}"


def proj_tables(report: Report) -> Iterator[str]:
    """A row for each layout and number of rows."""
    names = peer_names(report.results)
    rows = []
    for r in report.results:
        host = r.host_us or {}
        calls = [us(host.get("enqueue")), us(host.get("proj"))]
        rows.append([r.format, str(r.rows), r.variant, product_cell(r), *calls, *beside(r, names)])
    yield table(("scales", "M", "variant", "on the device, / floor", "host: prepared", "host: direct", *names), rows)
    yield floors(report)


def growth_tables(report: Report) -> Iterator[str]:
    """The lines: time = launch + bytes / bandwidth."""
    rows = []
    for g in report.growth:
        sizes = [nbytes for nbytes, _ in g.line.points]
        what = [g.name, str(len(sizes)), f"{size(sizes[0])} to {size(sizes[-1])}", us(g.line.launch * 1e6)]
        rows.append([*what, number(g.line.bandwidth * 1e-9), f"{g.line.worst:+.1%} at {size(g.line.worst_nbytes)}"])
    yield "The line time = launch + bytes / bandwidth with the least squares of relative deviations:\n"
    yield table(("operation", "sizes", "bytes", "launch", "GB/s", "worst deviation"), rows)
    yield from (f"WRONG: {r.op} {r.format} {list(r.shape)}: {r.detail}\n" for r in report.results if not r.correct)


# ---- the machine ----


def installed(name: str) -> str | None:
    """The version of a package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def processor() -> str:
    """Name of the CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def machine(dev: Device) -> dict[str, Any]:
    """Date, device, driver, host, its load (others' work, which spoils the figures of CPUs) and versions."""
    r = dev.capabilities.reported
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "device": r["name"],
        "platform": r["platform_name"],
        "driver": r["driver_version"],
        "host": f"{processor()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "load": round(os.getloadavg()[0], 1),
        "versions": {
            "python": platform.python_version(),
            **{n: v for n in ("pyclquant", "numpy", "torch", "pyopencl") if (v := installed(n))},
        },
    }


def heading(about: dict[str, Any]) -> str:
    """The same for people."""
    versions = ", ".join(f"{name} {v}" for name, v in about["versions"].items())
    return (
        f"# {about['device']}, {about['date']}\n"
        f"\n{about['platform']}, driver {about['driver']}. Host: {about['host']}, load {about['load']} before. {versions}.\n"
        f"\n`{' '.join(['python', *sys.argv])}`. Medians; NumPy on the host; peers as installed.\n"
    )


# ---- the call ----


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--device", help="as of pyclquant; default: the best")
    p.add_argument("--out", type=Path, help="folder for bench.md, bench.json and figures; default: print alone")
    p.add_argument("--only", action="append", metavar="SECTION", help="a section whose name begins so; repeat")
    p.add_argument("--seconds", type=float, default=0.15, help="for each operation, floor and peer (default %(default)s)")
    p.add_argument("--no-peers", action="store_true", help="time neither NumPy nor torch")
    p.add_argument("--small", action="store_true", help="tiny shapes: a trial of the tool, whose figures mean nothing")
    return p


def smaller(job: Job) -> Job:
    """The same on shapes of kilobytes."""
    op, spec = job
    return op, replace(
        spec,
        shape=(max(4, spec.shape[0] // 4096), *spec.shape[1:]),
        weight=(max(16, spec.weight[0] // 64), max(1, spec.weight[1] // 2048) * 128),
        rows=tuple(r for r in spec.rows if r <= 8) or (8,),
    )


def chosen(dev: Device, only: Sequence[str] | None, small: bool) -> list[Section]:
    """The sections of a call."""
    found = [s for s in sections(dev) if not only or s.name.startswith(tuple(only))]
    return [replace(s, jobs=tuple(dict.fromkeys(map(smaller, s.jobs)))) for s in found] if small else found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    args = parser().parse_args(arguments)
    dev = Device.pick(args.device, profiling=True)
    about = machine(dev)
    text = [heading(about)]
    if args.small:
        text[0] += "\nShapes are tiny, whatever the titles say: a trial of the tool.\n"
    print(text[0], flush=True)
    kept: dict[str, Any] = {**about, "seconds": args.seconds, "sections": {}}
    good = True
    for section in chosen(dev, args.only, args.small):
        start = time.perf_counter()
        report = bench.run(dev, section.jobs, args.seconds, section.peers and not args.no_peers)
        took = time.perf_counter() - start
        good &= report.correct
        parts = [f"## {section.title}\n", *section.tables(report)]
        parts += [f"- {note}\n" for note in peer_notes(report.results)]
        print("\n".join(parts), f"\n({took:.0f} s)\n", sep="", flush=True)
        text.append("\n".join(parts))
        kept["sections"][section.name] = {"title": section.title, "took_s": took, **bench_json(report)}
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            if find_spec("matplotlib") and report.floors:
                plot.plot_bench(report, args.out / f"{section.name}.png")
            (args.out / "bench.md").write_text("\n".join(text))
            (args.out / "bench.json").write_text(json.dumps(plain(kept), indent=1, allow_nan=False))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
