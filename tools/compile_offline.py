"""Compile every kernel build that AMD and Intel GPUs may take, without owning one; report registers and spills.

AMD: clang for amdgcn with ROCm's device libraries, to assembly whose metadata has the numbers.
Intel: ocloc (the compiler of the GPU driver), to a zebin whose .ze_info has them.
Which builds: those that `pyclquant.variants` does not refuse for the device's report in `tests/devices`,
through the same call as on a real device. Exit status 1 on a failed build or a spill.

Debian/Ubuntu packages: clang-15 rocm-device-libs intel-opencl-icd
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import chain, product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pyclquant.capabilities import Capabilities
from pyclquant.formats import FLOAT_DTYPES, FLOAT_MACROS, FORMATS, Layout
from pyclquant.kv import BlockView
from pyclquant.program import build_options, source
from pyclquant.variants import ACT, GEMV, KV, TILES, Blocks, Macros, Product, refusals, select
from pyclquant.w8a8 import CHUNK, FILES, SCALE_LAYOUTS

DEVICES = Path(__file__).resolve().parent.parent / "tests" / "devices"
CLANG = os.environ.get("CLANG", "clang-15")
SECONDS = 60.0
"""How long one build may take."""

SHAPE = (4096, 8, 128)
"""Of the K/V tensor: tokens, heads, head_dim."""

K = 4096
"""Rows and columns of the weight."""

LONG_K = 17408
"""Columns of the longest activations: the most vectors that a lane holds."""


@dataclass(frozen=True)
class Target:
    """A GPU to compile for.

    name: as the compiler calls it.  report: its file in tests/devices.
    like: the file of a device with the same driver, for what a partial report does not say.
    """

    name: str
    compiler: Callable[[Target, Path, Path, list[str]], list[Numbers]]
    report: str
    like: str = ""

    def capabilities(self) -> Capabilities:
        """What the report lets one expect of this GPU."""
        report = json.loads((DEVICES / f"{self.report}.json").read_text())
        if self.like:
            report = filled(report, json.loads((DEVICES / f"{self.like}.json").read_text()))
        return Capabilities.from_report(report)


@dataclass(frozen=True)
class Numbers:
    """What the compiler says of one kernel.

    registers: AMD vector registers a lane; Intel registers a thread that it may use (how many it does is not told)
    spills: AMD registers and bytes of scratch together; Intel bytes; 0 for none
    occupancy: AMD waves that fit a SIMD; Intel lanes of a thread (8 tells of register pressure)
    """

    kernel: str
    registers: int
    spills: int
    occupancy: int


@dataclass(frozen=True)
class Build:
    """One build to try."""

    target: Target
    variant: str
    file: str
    macros: Macros
    options: tuple[str, ...]

    @property
    def summary(self) -> str:
        """The macros that tell builds apart."""
        names = (
            "FORMAT",
            "X_TYPE",
            "SCALE_TYPE",
            "PER_TENSOR",
            "SILU",
            "SCALES",
            "TILE_M",
            "TILE_N",
            "VEC",
            "LANES",
            "WG",
            "CHUNKS",
            "DIVIDE",
            "HALF",
            "SHUFFLE",
            "SUBGROUP_SIZE",
        )
        return " ".join(f"{n}={self.macros[n]}" for n in names if n in self.macros)


@dataclass
class Result:
    """How a build went. error: the compiler's words, empty when it went well."""

    build: Build
    kernels: list[Numbers] = field(default_factory=list)
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether it compiled without a spill."""
        return not self.error and not any(k.spills for k in self.kernels)


class CompileError(Exception):
    """A compiler refused a build."""


def filled(report: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """`report` with what it does not know taken from `other`, nested objects alike."""
    result = dict(report)
    for key, value in other.items():
        if result.get(key) is None:
            result[key] = value
        elif isinstance(value, dict) and isinstance(result[key], dict):
            result[key] = filled(result[key], value)
    return result


def compiler_output(command: list[str]) -> str:
    """Run a compiler; its messages. Raises CompileError."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except FileNotFoundError:
        raise SystemExit(f"{command[0]}: expected an installed compiler (see this file's head), got none") from None
    except subprocess.TimeoutExpired:
        raise CompileError(f"took longer than {SECONDS:g} s") from None
    if done.returncode:
        raise CompileError((done.stdout + done.stderr).strip())
    return done.stdout + done.stderr


@cache
def device_libraries() -> str:
    """Folder of ROCm's device libraries."""
    for root in (Path("/usr/lib"), Path("/opt/rocm")):
        for path in sorted(root.glob("**/ocml.bc")):
            return str(path.parent)
    raise SystemExit("ocml.bc: expected ROCm's device libraries (package rocm-device-libs), got none")


def compile_amd(target: Target, file: Path, folder: Path, options: list[str]) -> list[Numbers]:
    """Compile for an AMD GPU. Raises CompileError."""
    assembly = folder / "out.s"
    amdgcn = ["-target", "amdgcn-amd-amdhsa", f"-mcpu={target.name}", f"--rocm-device-lib-path={device_libraries()}"]
    compiler_output([CLANG, "-x", "cl", "-cl-std=CL1.2", *amdgcn, *options, "-S", "-o", str(assembly), str(file)])
    text = assembly.read_text()
    occupancy = re.findall(r"^; Occupancy: (\d+)", text, re.M)
    scratch = re.findall(r"^; ScratchSize: (\d+)", text, re.M)
    kernels = []
    metadata = text.partition("\namdhsa.kernels:")[2].partition("\namdhsa.")[0]
    for number, block in enumerate(re.split(r"\n  - ", metadata)[1:]):  # in the order of the kernels
        value = dict(re.findall(r"^ {4}\.(\w+): +(\S+)$", block, re.M))
        spills = int(value["vgpr_spill_count"]) + int(value["sgpr_spill_count"]) + int(scratch[number])
        kernels.append(Numbers(value["name"], int(value["vgpr_count"]), spills, int(occupancy[number])))
    return kernels


def compile_intel(target: Target, file: Path, folder: Path, options: list[str]) -> list[Numbers]:
    """Compile for an Intel GPU. Raises CompileError."""
    # zebin: the only output whose metadata has the spills
    output = ["--format", "zebin", "-exclude_ir", "-output_no_suffix", "-out_dir", str(folder), "-output", "out"]
    messages = compiler_output(
        ["ocloc", "compile", "-file", str(file), "-device", target.name, "-options", " ".join(options), *output]
    )
    info = re.search(rb"^kernels:.*?(?=^kernels_misc_info:|\0|\Z)", (folder / "out").read_bytes(), re.M | re.S)
    if info is None:
        raise CompileError(f"no kernels in the .ze_info of ocloc's output: {messages}")
    kernels = []
    for block in info[0].decode().split("\n  - name:")[1:]:
        value = dict(re.findall(r"^ +(\w+): +(\S+)$", block, re.M))
        # memory of a thread holds what the compiler could not keep in registers: spills and private arrays
        memory = block.partition("per_thread_memory_buffers:")[2]
        spills = sum(int(size) for size in re.findall(r"^ +size: +(\d+)", memory, re.M))
        kernels.append(Numbers(block.split()[0], int(value["grf_count"]), spills, int(value["simd_size"])))
    return kernels


TARGETS = (
    Target("gfx906", compile_amd, "amd-gfx906-radeon-vii"),
    Target("gfx90a", compile_amd, "amd-gfx90a-mi250-partial", "amd-gfx906-radeon-vii"),
    Target("gfx1030", compile_amd, "amd-gfx1030-rx6800xt"),
    Target("skl", compile_intel, "intel-uhd-gen9-9b41"),
    Target("tgllp", compile_intel, "intel-uhd-gen9-9b41"),
    Target("dg2", compile_intel, "intel-arc-a750-partial", "intel-uhd-gen9-9b41"),
)


def kv_builds(target: Target, caps: Capabilities) -> Iterator[Build | str]:
    """Builds of the K/V kernels."""
    for variant in KV:
        refused = ""
        for fmt, x_type, restore in product(FORMATS.values(), FLOAT_DTYPES, (False, True)):
            for granularity in ("per_group",) if fmt.asymmetric else ("per_head", "per_tensor"):
                view = BlockView.of(Layout.of(SHAPE, fmt, granularity, None), fmt, granularity)
                itemsize = FLOAT_DTYPES[x_type].itemsize
                blocks = Blocks(view.dim, view.block, view.blocks, itemsize, fmt.pack, restore=restore)
                refused = refusals(KV, caps, blocks).get(variant.name, "")
                if refused:
                    break
                plan = select(KV, caps, blocks, variant.name)
                scale_type = "float16" if x_type == "float16" else "float32"  # used once a block: need not be crossed
                macros = {**view.macros(x_type, scale_type), **plan.defines()}
                yield Build(target, variant.name, "kv_dequantize.cl" if restore else "kv_quantize.cl", macros, plan.options)
        if refused:
            yield f"{target.name}: variant {variant.name} of the K/V kernels is not taken: {refused}"


def act_builds(target: Target, caps: Capabilities) -> Iterator[Build | str]:
    """Builds of the W8A8 quantizers, and of the search for NaN among weights."""
    for variant in ACT:
        refused = ""
        for x_type, (k, columns) in product(FLOAT_DTYPES, ((K, K), (K, CHUNK), (LONG_K, LONG_K))):
            blocks = Blocks(k, columns, 32 * k // columns, FLOAT_DTYPES[x_type].itemsize)
            refused = refusals(ACT, caps, blocks).get(variant.name, "")
            if refused:
                break
            plan = select(ACT, caps, blocks, variant.name)
            for silu in (0, 1):
                macros: Macros = {"SILU": silu, "X_TYPE": FLOAT_MACROS[x_type], **plan.defines()}
                yield Build(target, variant.name, "act_quant.cl", macros, plan.options)
            if x_type == "bfloat16":
                yield Build(target, variant.name, "weight_check.cl", {"X_TYPE": "BF16", **plan.defines()}, plan.options)
        if refused:
            yield f"{target.name}: variant {variant.name} of act_quant is not taken: {refused}"


def gemv_builds(target: Target, caps: Capabilities) -> Iterator[Build | str]:
    """Builds of the GEMV: every tile, and the smaller ones that hold fewer rows."""
    for variant in GEMV:
        refused = ""
        for rows, layout, x_type in product((1, 2, 4, *TILES), SCALE_LAYOUTS, FLOAT_DTYPES):
            shape = Product(rows, K, K, layout)
            refused = refusals(GEMV, caps, shape).get(variant.name, "")
            if refused:
                break
            plan = select(GEMV, caps, shape, variant.name)
            macros: Macros = {"SCALES": layout.upper(), "X_TYPE": FLOAT_MACROS[x_type], **plan.defines()}
            yield Build(target, variant.name, f"{FILES[plan.variant]}.cl", macros, plan.options)
        if refused:
            yield f"{target.name}: variant {variant.name} of the GEMV is not taken: {refused}"


def builds(target: Target) -> Iterator[Build | str]:
    """Every build of a target, each once; for a variant that the device is refused, a line with the reason."""
    caps = target.capabilities()
    seen: list[Build | str] = []
    for build in chain(kv_builds(target, caps), act_builds(target, caps), gemv_builds(target, caps)):
        if build not in seen:
            seen.append(build)
            yield build


def compiled(build: Build) -> Result:
    """Compile one build in a folder of its own."""
    options = build_options(build.macros, build.options)
    with tempfile.TemporaryDirectory(prefix="pyclquant-offline-") as name:
        file = Path(name) / build.file
        file.write_text(source(build.file))
        try:
            kernels = build.target.compiler(build.target, file, Path(name), options)
        except CompileError as error:
            return Result(build, error=str(error))
    if not kernels:
        return Result(build, error="no kernel in the compiler's output")
    return Result(build, kernels, too_narrow(build, kernels))


def too_narrow(build: Build, kernels: list[Numbers]) -> str:
    """Why lane shuffles would not reach the whole team, or nothing. AMD's waves have at least 32 lanes."""
    lanes = min((k.occupancy for k in kernels), default=0) if build.target.compiler is compile_intel else 32
    reduces = '"team.h"' in source(build.file)
    if reduces and build.macros.get("SHUFFLE") and int(build.macros["LANES"]) > lanes:
        return f"teams of {build.macros['LANES']} lanes shuffle within sub-groups of {lanes}"
    return ""


Row = tuple[Build, Numbers]


def table(rows: list[Row], every: bool) -> Table:
    """All kernels of all builds, or for each target, variant and kernel the build with the lowest occupancy."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for build, k in rows:
        groups.setdefault((build.target.name, build.variant, k.kernel), []).append((build, k))
    result = Table(box=None, pad_edge=False)
    for name in ("target", "variant", "kernel", "builds", "registers", "spills", "occupancy", "macros"):
        result.add_column(
            name, no_wrap=True, justify="right" if name in ("builds", "registers", "spills", "occupancy") else "left"
        )
    for key, members in groups.items():
        worst = max(members, key=lambda row: (row[1].spills, -row[1].occupancy, row[1].registers))
        for build, k in members if every else [worst]:
            count = 1 if every else len(members)
            result.add_row(*key, str(count), str(k.registers), str(k.spills), str(k.occupancy), build.summary)
    return result


def as_json(results: list[Result], refused: list[str]) -> str:
    """All that was found."""
    rows = [
        {
            "target": r.build.target.name,
            "variant": r.build.variant,
            "file": r.build.file,
            "macros": r.build.macros,
            "options": r.build.options,
            "kernels": [asdict(k) for k in r.kernels],
            "error": r.error,
        }
        for r in results
    ]
    return json.dumps({"builds": rows, "refused": refused}, indent=1)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", action="append", choices=[t.name for t in TARGETS], help="repeatable; default: all")
    parser.add_argument("--all", action="store_true", help="a row for every kernel of every build, not the worst of each")
    parser.add_argument("--json", action="store_true", help="print every build as JSON")
    arguments = parser.parse_args()
    todo = [b for t in TARGETS if t.name in (arguments.target or [t.name]) for b in builds(t)]
    refused = [b for b in todo if isinstance(b, str)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(compiled, [b for b in todo if isinstance(b, Build)]))
    bad = [r for r in results if not r.ok]
    if arguments.json:
        print(as_json(results, refused))
        return 1 if bad else 0
    console = Console(width=400, highlight=False, markup=False)
    console.print(table([(r.build, k) for r in results for k in r.kernels], arguments.all))
    for line in refused:
        console.print(line)
    for r in bad:
        console.print(f"{r.build.target.name} {r.build.file} {r.build.summary}: {r.error or 'spills'}")
    console.print(f"{len(results)} builds, {len(bad)} failed or spilled")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
