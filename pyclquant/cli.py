"""The command `pyclquant`: tables for people, --json for programs; exit code 0 fine, 1 failed, 2 bad usage."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import pyopencl as cl
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import pyclquant
from pyclquant import bench, convert, evaluate, files, icd, kv, plot, selftest, tables, tune, tuned, variants, w8a8
from pyclquant.arrays import on_host
from pyclquant.bench_work import Spec, block_options
from pyclquant.capabilities import Capabilities
from pyclquant.device import ENVIRONMENT, Device, Discovery, Found, candidates, capabilities, discover, preference, verdict_key
from pyclquant.errors import PyclquantError
from pyclquant.formats import DEFAULT_GROUP_SIZE, FLOAT_DTYPES, FORMATS, GRANULARITIES, Layout, float_dtype, get_format

app = typer.Typer(
    help="Portable OpenCL quantizers for LLM inference: what a device can do, how fast, and how exactly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        envvar=ENVIRONMENT,
        metavar="WHICH",
        help="PLATFORM:DEVICE as `probe` numbers them, gpu, cpu, or a part of a name; default: the best.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON alone, for programs.")]
FormatOption = Annotated[
    list[str] | None,
    typer.Option("--format", metavar="NAME", help=f"Of {', '.join(FORMATS)}; repeat or join by commas; default: all."),
]
GranularityOption = Annotated[
    str | None,
    typer.Option(help=f"One scale per what: {', '.join(GRANULARITIES)}; default per_head; int4 is always per_group."),
]
GroupSizeOption = Annotated[
    int | None, typer.Option(metavar="N", help=f"Elements of a group, with per_group and int4; default {DEFAULT_GROUP_SIZE}.")
]
PlotOption = Annotated[Path | None, typer.Option("--plot", metavar="OUT.png", help="Draw a figure (needs matplotlib).")]

TYPICAL = (4096, 8, 128)
"""Tokens, heads and head_dim of the bfloat16 tensor for which `probe` tells the variants."""
TYPICAL_WEIGHT = (4096, 4096)
"""N and K of the projection for which it does."""
TYPICAL_ROWS = (1, 32)
"""Rows of activations for which it does."""
ALL_VARIANTS = tuple(dict.fromkeys(v for names in bench.VARIANTS.values() for v in names))
OTHER_SPELLINGS = {"per-row": "per_row", "block128": "block_128", "block-128": "block_128"}
"""Of scale layouts."""
W8A8_OPS = tuple(op for op in bench.OPS if op != "kv")
"""Families of `bench` that --rows and --scales are for."""


def version(show: bool) -> None:
    """Print the version and end."""
    if show:
        typer.echo(f"pyclquant {pyclquant.__version__}")
        raise typer.Exit


@app.callback()
def root(
    show: Annotated[bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """What all commands have in common: nothing but --version."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line, sys.argv by default, and exit. An error that a user can cause is one line on stderr."""
    run_and_exit(lambda: app(None if arguments is None else list(arguments), prog_name="pyclquant"))


def run_and_exit(command: Callable[[], object]) -> NoReturn:
    """Run a command line of any program here, as `main` does."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=cl.CompilerWarning)  # logs of builds that went well
            warnings.showwarning = lambda message, *_: typer.echo(f"pyclquant: {message}", err=True)
            command()
    except PyclquantError as error:
        reason = str(error)
    except cl.MemoryError as error:
        reason = f"device: expected enough memory for this work, got: {error}"
    except cl.Error as error:
        reason = f"device: expected the driver to do this work, got: {error}"
    except MemoryError as error:
        reason = f"host: expected enough memory for this work, got: {error}"
    typer.echo(f"pyclquant: {reason}", err=True)
    sys.exit(1)


# ---- what the commands share ----


def plain(value: Any) -> Any:
    """As JSON takes it: lists, and null for what JSON has no number for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def print_json(value: object) -> None:
    """JSON on stdout."""
    typer.echo(json.dumps(plain(value), indent=1, allow_nan=False))


def console() -> Console:
    """Where tables go; wide enough for them when nobody says how wide it is."""
    return Console(highlight=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120)


@contextlib.contextmanager
def steps(quiet: bool, total: int | None = None) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr, if that is a terminal: the function given is called with the name of each step that begins."""
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    columns = (SpinnerColumn(), BarColumn(24), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        done = -1

        def step(name: str) -> None:
            nonlocal done
            done += 1
            bar.update(task, completed=done, description=name)

        yield step


@contextlib.contextmanager
def telling(found: Found, quiet: bool, fresh: bool = False) -> Iterator[None]:
    """Say on stderr that a device is being probed, if it is going to be."""
    kept = (icd.cache_dir() / "probe" / f"{verdict_key(found.reported)}.json").is_file()
    text = f"probing {found.label}, once, to find out what works on it (up to a minute)"
    if quiet or (kept and not fresh):
        yield
    elif sys.stderr.isatty():
        with Console(stderr=True).status(escape(text)):
            yield
    else:
        typer.echo(text, err=True)
        yield


def pick(selector: str | None, quiet: bool) -> Device:
    """`Device.pick` with a profiling queue, telling when it probes."""
    best = min(candidates(discover(), selector), key=preference)
    with telling(best, quiet):
        return Device.pick(selector, profiling=True)


@contextlib.contextmanager
def usage(option: str) -> Iterator[None]:
    """Turns a refused value of an option into bad usage."""
    try:
        yield
    except PyclquantError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def joined(values: Sequence[str] | None) -> tuple[str, ...]:
    """The values of an option that is repeated or joined by commas, each once."""
    return tuple(dict.fromkeys(v.strip() for value in values or () for v in value.split(",") if v.strip()))


def chosen_blocks(
    formats: Sequence[str] | None, granularity: str | None, group_size: int | None
) -> tuple[tuple[str, ...], str | None, int]:
    """Formats (all by default), granularity and group size of the options, checked."""
    names = joined(formats) or tuple(FORMATS)
    with usage("--format"):
        chosen = [get_format(name) for name in names]
    if granularity is not None and granularity not in GRANULARITIES:
        raise typer.BadParameter(f"expected one of {', '.join(GRANULARITIES)}, got {granularity!r}", param_hint="--granularity")
    if group_size is not None and granularity != "per_group" and not any(f.asymmetric for f in chosen):
        raise typer.BadParameter("expected only with --granularity per_group or --format int4", param_hint="--group-size")
    size = DEFAULT_GROUP_SIZE if group_size is None else group_size
    with usage("--group-size"):
        for fmt in chosen:
            Layout.of((1, 1), fmt, **block_options(fmt, granularity, size))
    return names, granularity, size


# ---- commands ----


def variants_used(caps: Capabilities) -> dict[str, dict[str, Any]]:
    """For each operation the variant that a launch on a typical tensor takes, None without one, and why not others."""
    fmt = FORMATS["fp8_e4m3fn"]
    view = kv.BlockView.of(Layout.of(TYPICAL, fmt, "per_head", None), fmt, "per_head")
    itemsize = FLOAT_DTYPES["bfloat16"].itemsize
    n, k = TYPICAL_WEIGHT
    used = {}
    for op, restore in (("kv_quantize", False), ("kv_dequantize", True)):
        used[op] = variant_used(variants.KV, caps, variants.Blocks(view.dim, view.block, view.blocks, itemsize, restore=restore))
    used["act_quant"] = variant_used(variants.ACT, caps, variants.Blocks(k, k, TYPICAL_ROWS[0], itemsize))
    for rows in TYPICAL_ROWS:
        used[f"gemv M={rows}"] = variant_used(variants.GEMV, caps, variants.Product(rows, n, k))
    return used


def variant_used(table: tuple[variants.Variant[variants.S], ...], caps: Capabilities, shape: variants.S) -> dict[str, Any]:
    """The variant of a table that is taken, None without one, why not others, and where its launch parameters are from."""
    variant, source = None, ""
    with contextlib.suppress(PyclquantError):
        plan = variants.select(table, caps, shape)
        variant, source = plan.variant, plan.tuned
    return {"variant": variant, "refused": variants.refusals(table, caps, shape), "tuned": source}


def by_default(discovery: Discovery) -> Found | None:
    """The device that `Device.pick()` tries first."""
    with contextlib.suppress(PyclquantError):
        return min(candidates(discovery, os.environ.get(ENVIRONMENT) or None), key=preference)
    return None


@app.command()
def probe(
    device: Annotated[str | None, typer.Option("--device", metavar="WHICH", help="Only devices that this matches.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Probe again, whatever is known.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Tell what each device reports, what works on it, what is used and why."""
    discovery = discover(fresh)
    if as_json and not discovery.found:
        print_json({"pyclquant": pyclquant.__version__, "devices": [], "notes": discovery.notes})
    chosen = candidates(discovery, device)
    default = by_default(discovery)
    rows = []
    for found in chosen:
        with telling(found, as_json, fresh):
            caps = capabilities(found, fresh)
        used = variants_used(caps)
        r = found.reported
        rows.append(
            {
                "platform": r["platform_name"],
                "name": r["name"],
                "vendor": r["vendor"],
                "driver": r["driver_version"],
                "type": r["device_type"],
                "reported": r,
                "works": {name: verdict.json() for name, verdict in caps.works.items()},
                "used": used,
            }
        )
        if not as_json:
            out = console()
            out.print(f"{found.label}{'  (taken by default)' if found is default else ''}", style="bold cyan", markup=False)
            out.print(tables.summary(found), markup=False)
            for t in (tables.features(caps), tables.used(used)):
                out.print(t)
                out.print()
            out.print(tables.sources(used) + "\n", markup=False)
    if as_json:
        print_json({"pyclquant": pyclquant.__version__, "devices": rows, "notes": discovery.notes})
    else:
        for note in discovery.notes:
            console().print(f"note: {note}", markup=False)


@app.command("kv")
def kv_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="K/V tensors: .safetensors, .npy or .npz.")],
    format: FormatOption = None,
    granularity: GranularityOption = None,
    group_size: GroupSizeOption = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="OUT.safetensors", help="Write the quantized tensors; needs one --format."),
    ] = None,
    plot_file: PlotOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Quantize the tensors of a file: size, error and time in each format."""
    formats, granularity, size = chosen_blocks(format, granularity, group_size)
    if output is not None:
        if len(formats) != 1:
            raise typer.BadParameter(f"expected exactly one --format to write, got {', '.join(formats)}", param_hint="-o")
        distinct(file, output)
    if plot_file is not None:
        plot.check_plot(plot_file)
    tensors = files.open_tensors(file)
    dev = pick(device, as_json)
    rows: list[evaluate.Row] = []
    quantized: dict[str, kv.Quantized] = {}
    with steps(as_json, len(tensors)) as step:
        for name, x in tensors:
            step(name)
            for row, q in evaluate.evaluate(dev, name, x, formats, granularity, size):
                rows.append(row)
                if output is not None:
                    quantized[name] = q.get()
    if output is not None:
        files.save_quantized(output, quantized, {row.name: row.dtype for row in rows}, tensors.metadata)
    if plot_file is not None:
        plot.plot_kv(rows, dev.name, plot_file)
    if as_json:
        print_json({"device": dev.name, "tensors": [kv_json(row) for row in rows]})
        return
    out = console()
    out.print(f"{file} on {dev.name}", style="bold cyan", markup=False)
    out.print(tables.kv_table(rows))
    for entry in tensors.skipped:
        out.print(f"note: left out, neither {' nor '.join(FLOAT_DTYPES)}: {entry}", markup=False)
    for written in (output, plot_file):
        if written is not None:
            out.print(f"wrote {written}", markup=False)


def distinct(file: Path, output: Path) -> None:
    """Raises FileError when `output` cannot be written, and bad usage when it is the file that is read."""
    if files.check_output(output) == Path(os.path.realpath(file)):
        raise typer.BadParameter(f"expected another file than the one that is read, got {output}", param_hint="-o")


def kv_json(row: evaluate.Row) -> dict[str, Any]:
    """A row of `kv --json`."""
    keys = ("name", "shape", "dtype", "format", "granularity", "group_size", "bytes_in", "bytes_out")
    return {
        **{key: getattr(row, key) for key in keys},
        "sqnr_db": row.errors.sqnr_db,
        "max_abs_err": row.errors.max_abs_err,
        "variant": row.variant,
        "quantize_us": row.quantize_us,
        "dequantize_us": row.dequantize_us,
    }


@app.command()
def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE.safetensors", help="What `kv -o` wrote.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="BACK.safetensors", help="Where to write the tensors.")],
    dtype: Annotated[
        str | None, typer.Option(help=f"Of {', '.join(FLOAT_DTYPES)}; default: the one that each tensor had.")
    ] = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring back the tensors that `kv -o` wrote."""
    if dtype is not None:
        with usage("--dtype"):
            float_dtype(dtype)
    distinct(file, output)
    stored = files.read_quantized(file)
    dev = pick(device, as_json)
    back = {}
    with steps(as_json, len(stored.tensors)) as step:
        for name, q in stored.tensors.items():
            step(name)
            back[name] = on_host(kv.dequantize(dev, q, dtype or stored.dtypes[name]))
    files.save_tensors(output, back, stored.metadata)
    if as_json:
        rows = [{"name": name, "shape": a.shape, "dtype": a.dtype.name} for name, a in back.items()]
        print_json({"device": dev.name, "tensors": rows})
    else:
        console().print(f"wrote {len(back)} tensors to {output}", markup=False)


@app.command("convert")
def convert_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="config.json, and floats in .safetensors.")],
    output: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="A new name: the FP8 checkpoint appears there when whole.")],
    scales: Annotated[
        str,
        typer.Option(
            metavar="LAYOUT",
            help="per_row (as compressed-tensors has it) or block_128 (as transformers' fp8 and DeepSeek-V3); "
            f"also {' and '.join(OTHER_SPELLINGS)}.",
        ),
    ],
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help=f"Leave layers with such names in floats, as {', '.join(convert.IGNORED)} are; repeat for more.",
        ),
    ] = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Quantize the linear layers of a checkpoint to FP8, in the form that other programs read: size and error of each."""
    with usage("--scales"):
        layout = w8a8.check_layout(OTHER_SPELLINGS.get(scales, scales))
    plan = convert.plan(model, output, layout, ignore or ())
    dev = pick(device, as_json)
    with ending_in_order(), steps(as_json, len(plan.checkpoint.tensors)) as step:
        rows = convert.run(dev, plan, step)
    others = sum(entry.nbytes for entry in plan.checkpoint.tensors.values()) - sum(row.bytes_in for row in rows)
    if as_json:
        print_json({"device": dev.name, "scales": layout, "other_bytes": others, "layers": [convert_json(row) for row in rows]})
        return
    out = console()
    out.print(f"{model} on {dev.name}, scales {layout}", style="bold cyan", markup=False)
    out.print(tables.convert_table(rows, others))
    out.print("error: root mean square, over that of the weights", markup=False)
    out.print(f"wrote {output}", markup=False)


def convert_json(row: convert.Row) -> dict[str, Any]:
    """A row of `convert --json`; no error of a layer that stays in floats."""
    error = row.relative_rms if row.kept is None else None
    keys = ("name", "shape", "dtype", "bytes_in", "bytes_out", "kept")
    return {**{key: getattr(row, key) for key in keys}, "relative_rms": error, "sqnr_db": tables.decibel(error)}


@contextlib.contextmanager
def ending_in_order() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as an exception does, so that it cleans up; unless somebody else minds them."""

    def end(number: int, _: object) -> NoReturn:
        sys.exit(128 + number)

    mine = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_DFL]
    for s in mine:
        signal.signal(s, end)
    try:
        yield
    finally:
        for s in mine:
            signal.signal(s, signal.SIG_DFL)


@app.command("selftest")
def selftest_command(device: DeviceOption = None, as_json: JsonOption = False) -> None:
    """Compare every kernel that the device can run with the reference: equal bytes, sums of products within bounds."""
    dev = pick(device, as_json)
    with steps(as_json, sum(1 for _ in selftest.steps())) as step:
        results = selftest.run(dev, step)
    ok = all(r.ok for r in results) and any(r.cases for r in results)
    if as_json:
        print_json({"device": dev.name, "ok": ok, "results": [asdict(r) for r in results]})
    else:
        out = console()
        out.print(dev.name, style="bold cyan", markup=False)
        out.print(tables.selftest_table(results))
        good = "all as the reference: bytes equal, sums of products within their bounds"
        out.print(good if ok else "NOT as the reference", style="bold")
    raise typer.Exit(0 if ok else 1)


@app.command("bench")
def bench_command(
    op: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=f"Of {', '.join(bench.OPS)}; repeat or join by commas; default: all.")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZES",
            help="With --op; repeat. kv: ROWS,DIM or TOKENS,HEADS,DIM; default 262144,128 on CPUs, 1048576,128 on GPUs. "
            f"gemv and proj: N,K of the weights; act_quant: K or N,K; default {','.join(map(str, Spec.weight))}.",
        ),
    ] = None,
    sweep: Annotated[
        bool,
        typer.Option(
            "--sweep",
            help="Each shape, a half of it, a quarter and so on (N of gemv and proj, K of act_quant; kv: by fours), "
            "and the line time = launch + bytes / bandwidth through the times.",
        ),
    ] = False,
    rows: Annotated[
        list[str] | None,
        typer.Option(
            metavar="M",
            help=f"Rows of activations of act_quant, gemv, proj: 1 to {w8a8.MAX_ROWS}; repeat or join by commas; "
            f"default {','.join(map(str, Spec.rows))}.",
        ),
    ] = None,
    scales: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LAYOUT",
            help=f"Of act_quant, gemv, proj: {', '.join(w8a8.SCALE_LAYOUTS)}; repeat or join by commas; default: both.",
        ),
    ] = None,
    format: FormatOption = None,
    dtype: Annotated[str, typer.Option(help=f"Of the float side: {', '.join(FLOAT_DTYPES)}.")] = "bfloat16",
    granularity: GranularityOption = None,
    group_size: GroupSizeOption = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"Force {', '.join(ALL_VARIANTS)}; repeat or join by commas; operations without any are left out.",
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="Time for each operation and each floor.")] = 1.0,
    no_peers: Annotated[bool, typer.Option("--no-peers", help="Time neither NumPy nor torch.")] = False,
    plot_file: PlotOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time each operation against the device's own read and copy, NumPy on the host, and torch, if that is installed, on
    the same device.

    kv: K/V tensors to codes and back.

    act_quant: activations to codes, also fused with SiLU.

    gemv: the W8A8 product of activations that are codes already.

    proj: both, with the host's time for a prepared and for a direct call.
    """
    forced = joined(variant)
    ops = chosen_ops(op, forced)
    for option, given, having in (
        ("--format", format, ("kv",)),
        ("--granularity", granularity, ("kv",)),
        ("--group-size", group_size, ("kv",)),
        ("--rows", rows, W8A8_OPS),
        ("--scales", scales, W8A8_OPS),
    ):
        if given is not None and not set(ops) & set(having):
            raise typer.BadParameter(f"expected only with --op {', '.join(having)}, got {', '.join(ops)}", param_hint=option)
    with usage("--dtype"):
        float_dtype(dtype)
    formats, granularity, size = chosen_blocks(format, granularity, group_size)
    layouts = joined(scales) or w8a8.SCALE_LAYOUTS
    with usage("--scales"):
        for layout in layouts:
            w8a8.check_layout(layout)
    counts = parse_rows(joined(rows)) or Spec.rows
    shapes = [parse_shape(text, ops) for text in shape or ()]
    if plot_file is not None:
        plot.check_plot(plot_file)
    dev = pick(device, as_json)
    spec = Spec((1, 1), formats, dtype, granularity, size, (None,), Spec.weight, counts, layouts)
    jobs = []
    for name in ops:
        mine = replace(spec, variants=tuple(v for v in forced if v in bench.VARIANTS[name]) or (None,))
        default = bench.default_shape(dev.capabilities) if name == "kv" else Spec.weight
        jobs += [(name, s) for s in bench.specs(name, mine, shapes or [default], sweep)]
    with steps(as_json) as step:
        report = bench.run(dev, jobs, seconds, not no_peers, step)
    if plot_file is not None and report.floors:
        plot.plot_bench(report, plot_file)
    if as_json:
        how = {"dtype": dtype, "granularity": granularity or "per_head", "group_size": size, "seconds": seconds}
        print_json({"pyclquant": pyclquant.__version__, **how, **bench_json(report)})
    else:
        print_bench(report, spec)
    raise typer.Exit(0 if report.correct else 1)


def chosen_ops(names: Sequence[str] | None, variants: Sequence[str]) -> tuple[str, ...]:
    """Families of bench.OPS, all by default; of these the ones that have one of the variants. All are of one at least."""
    ops = joined(names) or tuple(bench.OPS)
    for name in ops:
        if name not in bench.OPS:
            raise typer.BadParameter(f"expected one of {', '.join(bench.OPS)}, got {name!r}", param_hint="--op")
    known = dict.fromkeys(v for name in ops for v in bench.VARIANTS[name])
    for variant in variants:
        if variant not in known:
            raise typer.BadParameter(f"expected one of {', '.join(known)}, got {variant!r}", param_hint="--variant")
    return tuple(name for name in ops if not variants or set(variants) & set(bench.VARIANTS[name]))


def parse_shape(text: str, ops: Sequence[str]) -> tuple[int, ...]:
    """Positive sizes, joined by commas: two or three of kv; N,K of the others, K alone if they are act_quant alone."""
    if "kv" in ops and len(ops) > 1:
        raise typer.BadParameter("expected with --op: kv takes ROWS,DIM, the others N,K", param_hint="--shape")
    parts = text.split(",")
    what, least, most = "N,K", 2, 2
    if ops == ("kv",):
        what, least, most = "ROWS,DIM or TOKENS,HEADS,DIM", 2, 3
    elif ops == ("act_quant",):
        what, least, most = "K or N,K", 1, 2
    if not (least <= len(parts) <= most and all(p.strip().isdecimal() and int(p) > 0 for p in parts)):
        raise typer.BadParameter(f"expected {what}, all positive, got {text!r}", param_hint="--shape")
    sizes = tuple(int(p) for p in parts)
    if "kv" not in ops and sizes[-1] % w8a8.CHUNK:
        raise typer.BadParameter(f"expected K a multiple of {w8a8.CHUNK}, got {sizes[-1]}", param_hint="--shape")
    return sizes


def parse_rows(values: Sequence[str]) -> tuple[int, ...]:
    """Numbers of rows of activations."""
    for v in values:
        if not (v.isdecimal() and 1 <= int(v) <= w8a8.MAX_ROWS):
            raise typer.BadParameter(f"expected 1 to {w8a8.MAX_ROWS}, got {v!r}", param_hint="--rows")
    return tuple(dict.fromkeys(int(v) for v in values))


def bench_json(report: bench.Report) -> dict[str, Any]:
    """`bench --json`."""
    return {
        "device": report.device,
        "launch_us": report.launch_us,
        "gops": report.gops,
        "floors": [asdict(floor) for floor in report.floors],
        "results": [asdict(row) for row in report.results],
        "growth": [growth_json(growth) for growth in report.growth],
    }


def growth_json(growth: bench.Growth) -> dict[str, Any]:
    """A line of `bench --json`."""
    line = growth.line
    return {
        **{key: getattr(growth, key) for key in ("op", "format", "variant", "rows")},
        "launch_us": line.launch * 1e6,
        "gb_s": line.bandwidth * 1e-9,
        "worst": line.worst,
        "worst_nbytes": line.worst_nbytes,
        "points": [{"nbytes": nbytes, "median_us": seconds * 1e6} for nbytes, seconds in line.points],
    }


def print_bench(report: bench.Report, spec: Spec) -> None:
    """The report for people."""
    out = console()
    out.print(report.device, style="bold cyan", markup=False)
    out.print(tables.floor_table(report))
    tensors = [r for r in report.results if r.rows is None]
    if tensors:
        scales = f"scales {spec.granularity or 'per_head'}, int4 per_group {spec.group_size}"
        text = f"{spec.dtype}, {scales}; GB/s count bytes read and written"
        out.print(f"\n{text}", markup=False)
        out.print(tables.kv_bench_table(tensors))
    projections = [r for r in report.results if r.rows is not None]
    if projections:
        text = f"M rows of {spec.dtype}; × floor: time over that of a plain read (act_quant: copy) of the same bytes"
        out.print(f"\n{text}", markup=False)
        out.print(tables.w8a8_bench_table(projections))
    if any(r.host_us for r in projections):
        out.print()
        out.print(tables.host_table(projections))
    if report.growth:
        out.print()
        out.print(tables.growth_table(report.growth))
    for note in tables.peer_notes(report.results):
        out.print(f"note: {note}", markup=False)


# ---- tune ----

TUNED_OPS = (*tune.OPS, *dict.fromkeys(op for ops in tune.OPS.values() for op in ops if op not in tune.OPS))
"""What --op of `tune` takes by itself; each of an operation's variants, too."""


@app.command("tune")
def tune_command(
    op: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"Of {', '.join(TUNED_OPS)}: the variant that the device takes; or one of them, such as gemv/vector; "
            f"repeat or join by commas; default: {', '.join(tune.OPS)}.",
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES",
            help=f"With --op. kv: ROWS,DIM, default {','.join(map(str, tune.Choice.tensor))}; act_quant, gemv: N,K, "
            f"default {','.join(map(str, tune.Choice.weight))}.",
        ),
    ] = None,
    rows: Annotated[
        list[str] | None,
        typer.Option(
            metavar="M",
            help=f"Rows of activations, 1 to {w8a8.MAX_ROWS}; repeat or join by commas; default: all size classes.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="OUT.json", help=f"Default: your own file, which {tuned.ENVIRONMENT} may name."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Try only what is next to the present parameters.")] = False,
    seconds: Annotated[float | None, typer.Option(min=0.0, help="Begin nothing else after so many seconds.")] = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the launch parameters that are fastest on a device and keep them in your own file (needs kernel-tuner).

    No parameter changes a bit of a result; each candidate's is compared with the reference before it is timed, caches cold.
    """
    path = output or tuned.user_file()
    if path is None:
        raise typer.BadParameter(f"expected a file while {tuned.ENVIRONMENT} is off", param_hint="--output")
    choice = chosen_tuning(op, shape, rows, quick, seconds)
    tune_into(path, "device", choice, device, as_json, "pyclquant tune")


def chosen_tuning(
    op: Sequence[str] | None, shape: str | None, rows: Sequence[str] | None, quick: bool, seconds: float | None
) -> tune.Choice:
    """The choice that options mean, checked."""
    names = joined(op) or tuple(tune.OPS)
    for name in names:
        if name not in TUNED_OPS and name not in tune.SPACES:
            raise typer.BadParameter(f"expected one of {', '.join((*TUNED_OPS, *tune.SPACES))}, got {name!r}", param_hint="--op")
    families = tuple(dict.fromkeys(name.partition("/")[0].partition("_")[0] for name in names))
    sizes = parse_shape(shape, tuple("act_quant" if f == "act" else f for f in families)) if shape is not None else ()
    choice = tune.Choice(names, rows=parse_rows(joined(rows)) or None, quick=quick)
    if seconds is not None:
        choice = replace(choice, seconds=seconds)
    if not sizes:
        return choice
    return replace(choice, tensor=sizes) if "kv" in families else replace(choice, weight=(sizes[0], sizes[-1]))


def tune_into(path: Path, level: str, choice: tune.Choice, device: str | None, as_json: bool, by: str) -> None:
    """Tune and update a file under the device's key of a level; exit code 1 when something could not be tuned."""
    tune.check_installed()
    content = tune.open_file(path)
    tune.write(path, content)
    dev = pick(device, as_json)
    key = tune.key_of(dev, level)
    with steps(as_json) as step:
        report = tune.run(dev, choice, step)
    tune.write(path, tune.updated(content, dev, level, report.rows, by))
    if as_json:
        print_json({"device": dev.name, "level": level, "key": key, "output": str(path), **asdict(report)})
    else:
        out = console()
        out.print(dev.name, style="bold cyan", markup=False)
        out.print(tables.tuned_table(report.rows))
        for row in report.rows:
            for values, why in row.left_out.items():
                out.print(f"left out: {row.kernel} {row.size} {values}: {why}", markup=False)
        for name in report.skipped:
            out.print(f"no time for {name}", markup=False)
        for name, why in report.failed.items():
            out.print(f"failed: {name}: {why}", markup=False)
        out.print(f"wrote {path} ({level} {key})", markup=False)
    raise typer.Exit(1 if report.failed or not report.rows else 0)
