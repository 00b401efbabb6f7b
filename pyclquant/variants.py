"""Which form of a kernel a device runs: tables, fastest first, and a pure function over them.

A variant is a point (VEC, LANES, reduction) of one kernel body, see `cl/common.h`. Each row of a table
says when it cannot run and when it can but should not; `select()` takes the first row that neither
excludes. What the probe prints and what a launch uses come from the same call. A new variant is a row.
The sizes of its launch that change no bit of a result are parameters of `pyclquant.tuned`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

from pyclquant import tuned
from pyclquant.capabilities import Capabilities
from pyclquant.errors import UnsupportedDeviceError

Macros = dict[str, str | int]


@dataclass(frozen=True)
class Blocks:
    """What a kernel over blocks of a row has to know of its arrays to choose vectors.

    dim, block, blocks: as in `cl/kv_quantize.cl`.  itemsize: bytes of a float-side element.
    codes_per_byte: 2 for int4.  align: a power of two that divides every element offset.
    restore: dequantize, not quantize.  rows: that share a scale (of weights).
    """

    dim: int
    block: int
    blocks: int
    itemsize: int
    codes_per_byte: int = 1
    align: int = 1 << 20
    restore: bool = False
    rows: int = 1

    @property
    def whole(self) -> bool:
        """Whether a row is one block."""
        return self.dim == self.block

    def vec(self, limit: int, align: int) -> int:
        """The widest vector up to `limit` elements that no block and, with its `align`, no offset cuts."""
        common = self.dim | self.block | align | 1 << 20
        return int(min(limit, common & -common))


@dataclass(frozen=True)
class Plan:
    """How a kernel over blocks is launched. vec, lanes, wg: macros of `cl/common.h`.  tuned: where its parameters are from."""

    variant: str
    vec: int
    lanes: int
    wg: int
    blocks_per_team: int
    macros: Mapping[str, str | int]
    options: tuple[str, ...] = ()
    tuned: str = ""

    def defines(self) -> Macros:
        """Macros of the build."""
        return {"VEC": self.vec, "LANES": self.lanes, "WG": self.wg, **self.macros}

    def halved(self) -> Plan:
        """With half the work-group, for a built kernel that takes no more; teams shrink only when they must."""
        wg = self.wg // 2
        lanes = min(self.lanes, wg)
        fewer: Macros = {"CHUNKS": 0} if lanes < self.lanes else {}
        if "SPREAD" in self.macros:
            fewer["SPREAD"] = min(int(self.macros["SPREAD"]), wg // lanes)
        return replace(self, wg=wg, lanes=lanes, macros={**self.macros, **fewer})

    def global_size(self, blocks: int) -> int:
        """Work-items that serve `blocks` blocks."""
        teams = -(-blocks // self.blocks_per_team)
        return -(-teams // (self.wg // self.lanes)) * self.wg


@dataclass(frozen=True)
class Product:
    """What a GEMV kernel has to know of its arrays. rows: of activations in one launch.  n, k: of the weights.

    scale_layout: per_row or block_128.  align: a power of two that divides the address of every row of codes, in bytes.
    """

    rows: int
    n: int
    k: int
    scale_layout: str = "per_row"
    align: int = 128


S = TypeVar("S", Blocks, Product)

Find = Callable[[Capabilities, Blocks, str], tuned.Tuned]
"""Launch parameters of a variant of an operation over blocks."""


@dataclass(frozen=True)
class Variant(Generic[S]):
    """A row of a table. answer: the feature by which the probe says whether this variant gives right bits.
    unsupported: why it cannot run, or None.  unsuited: why a faster row is expected to exist.
    """

    name: str
    answer: str
    unsupported: Callable[[Capabilities, S], str | None]
    unsuited: Callable[[Capabilities, S], str | None]
    plan: Callable[[Capabilities, S], Plan]


def division(caps: Capabilities) -> tuple[Macros, tuple[str, ...]]:
    """The cheapest division that this device rounds correctly, and its build options.

    A GPU takes the fma form first: the reciprocal of a scale is shared by its whole block.
    """
    native = next((caps.works[f] for f in ("divide", "divide_option") if caps.ok(f)), None)
    if caps.ok("divide_fma") and not (native and caps.is_cpu):
        return {"DIVIDE": "DIVIDE_FMA"}, ()
    if native:
        return {"DIVIDE": "DIVIDE_NATIVE"}, tuple(native.options.split())
    return {"DIVIDE": "DIVIDE_INT"}, ()


def shuffle(caps: Capabilities) -> tuple[Macros, int, str] | None:
    """Macros, lanes and build options of the lane shuffle that works, NVIDIA's first; None without one.

    Where a kernel cannot ask for its sub-group size, the compiler may choose a narrower one than the probe
    saw: no team is wider than 8 lanes there.
    """
    for number, feature in ((3, "shuffle_nv"), (1, "shuffle_khr"), (2, "shuffle_intel")):
        if caps.ok(feature):
            verdict = caps.works[feature]
            macros: Macros = {"SHUFFLE": number}
            lanes = int(verdict.value or 1)
            if caps.ok("subgroup_size"):
                macros["SUBGROUP_SIZE"] = int(caps.works["subgroup_size"].value or 0)
            elif feature != "shuffle_nv":
                lanes = min(lanes, 8)
            return macros, lanes, verdict.options
    return None


def power_of_two(n: int) -> int:
    """The smallest power of two that is not less than n."""
    return 1 << max(0, n - 1).bit_length()


def vendor_macros(caps: Capabilities) -> Macros:
    """Conversions that the device has in hardware and that gave the right bits."""
    return {"HALF": int(caps.ok("half_convert")), "CONVERT_NV": int(caps.ok("nv_convert"))}


def work_group(caps: Capabilities, most: int) -> int:
    """The largest power of two up to `most` that the device takes as a work-group."""
    return min(most, 1 << (caps.max_work_group_size.bit_length() - 1))


def kv_tuned(caps: Capabilities, blocks: Blocks, variant: str) -> tuned.Tuned:
    """Launch parameters of a K/V kernel."""
    op = "kv_dequantize" if blocks.restore else "kv_quantize"
    return tuned.find(caps, f"{op}/{variant}", "int4" if blocks.codes_per_byte == 2 else tuned.ANY)


def act_tuned(caps: Capabilities, blocks: Blocks, variant: str) -> tuned.Tuned:
    """Launch parameters of a W8A8 quantizer."""
    return tuned.find(caps, f"act_quant/{variant}", "block_128" if blocks.block == 128 else tuned.ANY)


def plan_base(caps: Capabilities, blocks: Blocks, find: Find = kv_tuned) -> Plan:
    """One element a work-item (int4: one byte); a work-group reduces in local memory."""
    how = find(caps, blocks, "base")
    vec = blocks.codes_per_byte
    wg = work_group(caps, how["wg"])
    lanes = min(wg, power_of_two(-(-blocks.block // vec)))
    divide, options = division(caps)
    return Plan("base", vec, lanes, wg, 1, {"ALIGNED": 0, **divide}, options, how.source)


def gpu_vec(blocks: Blocks) -> int:
    """Elements in 16 bytes of the float side, or fewer where a block or an offset cuts them."""
    return blocks.vec(16 // blocks.itemsize, blocks.align)


def plan_vector(caps: Capabilities, blocks: Blocks, shuffled: bool = False) -> Plan:
    """Aligned vectors; teams reduce in local memory, or inside a sub-group by lane shuffles.

    Each vector that a lane takes is a load in flight, and the work of finding a scale is shared by as many times more elements.
    Measured on an H200, [1048576, 128] bfloat16, of the copy floor, with 1, 2, 4 vectors a lane:
    quantize fp8 0.67, 0.87, 0.96, int8 0.67, 0.90, 0.97; dequantize fp8 0.93, 0.94, 0.53. Dequantize int4
    (group 64) reaches 0.89 as a loop over 2 vectors; held, its narrow loads reach 0.67.
    An Intel GPU has 64 registers a lane in sub-groups of 16: with 4 vectors of 8 its compiler spills.
    """
    variant = "vector_shuffle" if shuffled else "vector"
    how = kv_tuned(caps, blocks, variant)
    vec = gpu_vec(blocks)
    wg = work_group(caps, how["wg"])
    divide, options = division(caps)
    macros: Macros = {"ALIGNED": 1, **divide, **vendor_macros(caps)}
    most_lanes = min(how["lanes"], wg)
    if shuffled:
        found = shuffle(caps)
        assert found is not None, "unsupported_shuffle refuses this"
        macros.update(found[0])
        most_lanes = min(most_lanes, found[1])
        options += tuple(found[2].split())
    vectors = -(-blocks.block // vec)
    lanes = min(most_lanes, power_of_two(-(-vectors // how["vectors"])))
    chunks, rest = divmod(vectors, lanes)
    macros["CHUNKS"] = chunks if how["held"] and blocks.whole and rest == 0 and chunks <= how["vectors"] else 0
    return Plan(variant, vec, lanes, wg, 1, macros, options, how.source)


def row_vec(caps: Capabilities, blocks: Blocks) -> int:
    """The widest vector of 32-bit elements whose built-ins work and that no block cuts."""
    works = max((n for n in (2, 4, 8, 16) if caps.ok(f"vector{n}")), default=1)
    return max(blocks.vec(works, 0), blocks.codes_per_byte)  # int4 takes pairs even of odd rows


def row_items(caps: Capabilities, each: int) -> int:
    """So many work-items for each core: enough for all to finish together."""
    return each * int(caps.reported.get("max_compute_units") or 1)


def plan_row(caps: Capabilities, blocks: Blocks, find: Find = kv_tuned) -> Plan:
    """One work-item walks whole rows; a few work-items for each core, so that all finish together."""
    how = find(caps, blocks, "row")
    divide, options = division(caps)
    macros: Macros = {"ALIGNED": 0, **divide}
    each = max(1, -(-blocks.blocks // row_items(caps, how["items"])))
    return Plan("row", row_vec(caps, blocks), 1, 1, each, macros, options, how.source)


CACHED_BYTES = 32 << 20
"""Read and written by an operation; its output may still be in a cache when the next one asks for it. Beyond, stores that pass
the caches by spare reading each line before it is overwritten."""


def plan_kv_row(caps: Capabilities, blocks: Blocks) -> Plan:
    """Short rows of bfloat16 go two elements in a word: PAIRS and STREAM of `cl/common.h`, which names the conditions.

    FP8 codes of large tensors are looked up where x86 can: X86_BF16 of `cl/kv_quantize.cl`.
    """
    plan = plan_row(caps, blocks)
    number, rest = divmod(blocks.block, plan.vec)
    fits = plan.vec >= 8 and blocks.itemsize == 2 and blocks.whole and rest == 0 and number <= 16
    fits = fits and number % (4 if blocks.codes_per_byte == 1 else 2) == 0
    if not fits or caps.missing("fma", "fma_speed", "denormals"):
        return plan
    nbytes = blocks.blocks * blocks.block * (blocks.itemsize + 1)
    streams = nbytes > CACHED_BYTES and blocks.align % 64 == 0
    looks_up = nbytes > CACHED_BYTES and not blocks.restore and caps.ok("x86_look_up")
    spelling = {"X86_BF16": caps.works["x86_bf16"].value or 0} if looks_up else {}
    return replace(plan, macros={**plan.macros, "PAIRS": number, "STREAM": int(streams), **spelling})


def unsupported_base(caps: Capabilities, blocks: Blocks) -> str | None:
    """Every OpenCL 1.2 device that runs a kernel at all and can address the arrays."""
    small = blocks.blocks * blocks.block < 2**29  # fewer than 2^31 bytes: 32-bit indices do
    return caps.missing("base") if small else caps.missing("base", "index64")


def unsupported_row(caps: Capabilities, blocks: Blocks) -> str | None:
    """Walking rows needs nothing more than the base."""
    return unsupported_base(caps, blocks)


def unsupported_vector(caps: Capabilities, blocks: Blocks) -> str | None:
    """Aligned vectors of at least 8 bytes, and work-groups worth the name."""
    vec = gpu_vec(blocks)
    if vec * blocks.itemsize < 8 or vec < blocks.codes_per_byte:
        return (
            f"rows of {blocks.dim}, blocks of {blocks.block} and offsets in multiples of {blocks.align} elements "
            f"allow aligned vectors of {vec * blocks.itemsize} bytes, 8 are needed"
        )
    if caps.max_work_group_size < 32:
        return f"work-groups of {caps.max_work_group_size}, 32 are needed"
    return unsupported_base(caps, blocks) or caps.missing(f"vector{vec}")


def unsupported_shuffle(caps: Capabilities, blocks: Blocks) -> str | None:
    """A lane shuffle that works, beside what vectors need."""
    if shuffle(caps) is None:
        return "; ".join(str(caps.missing(f)) for f in ("shuffle_nv", "shuffle_khr", "shuffle_intel"))
    return unsupported_vector(caps, blocks)


def never(caps: Capabilities, shape: object) -> str | None:
    """No reason."""
    return None


def unsuited_to_cpu(caps: Capabilities, shape: object) -> str | None:
    """Side by side is the wrong way to read on a CPU."""
    return "a CPU driver: work-items that read side by side are slower than rows" if caps.walks_rows else None


def unsuited_to_gpu(caps: Capabilities, shape: object) -> str | None:
    """Rows are the wrong way to read on a GPU."""
    return None if caps.walks_rows else "work-items run side by side here, and must read side by side"


KV: tuple[Variant[Blocks], ...] = (
    Variant("vector_shuffle", "kv_vector_shuffle", unsupported_shuffle, unsuited_to_cpu, partial(plan_vector, shuffled=True)),
    Variant("vector", "kv_vector", unsupported_vector, unsuited_to_cpu, plan_vector),
    Variant("row", "kv_row", unsupported_row, unsuited_to_gpu, plan_kv_row),
    Variant("base", "kv_base", unsupported_base, never, plan_base),
)
"""Quantize and dequantize."""


# ---- W8A8 ----


def held_chunks(blocks: Blocks, vec: int, lanes: int, most: int) -> int:
    """Vectors of a tile that a lane holds between finding the scale and dividing by it; 0 when they are more than `most`.

    An Intel GPU has 64 registers a lane in sub-groups of 16: its compiler spills with two. AMD's spills with nine on gfx90a.
    """
    chunks = -(-blocks.block // (vec * lanes))
    return chunks if blocks.rows == 1 and chunks <= most else 0


def plan_tiles(caps: Capabilities, blocks: Blocks) -> Plan:
    """Aligned vectors; a whole work-group for a long row, since a decode step has few of them."""
    how = act_tuned(caps, blocks, "vector")
    vec = gpu_vec(blocks)
    wg = work_group(caps, how["wg"])
    divide, options = division(caps)
    lanes = min(wg, power_of_two(-(-blocks.block // vec)))
    chunks = held_chunks(blocks, vec, lanes, how["most_held"])
    macros: Macros = {"ALIGNED": 1, "CHUNKS": chunks, **divide, **vendor_macros(caps)}
    return Plan("vector", vec, lanes, wg, 1, macros, options, how.source)


def plan_act_row(caps: Capabilities, blocks: Blocks) -> Plan:
    """As for K/V; short tiles are held."""
    plan = plan_row(caps, blocks, act_tuned)
    chunks = held_chunks(blocks, plan.vec, 1, act_tuned(caps, blocks, "row")["most_held"])
    return replace(plan, macros={**plan.macros, "CHUNKS": chunks})


ACT: tuple[Variant[Blocks], ...] = (
    Variant("vector", "act_vector", unsupported_vector, unsuited_to_cpu, plan_tiles),
    Variant("row", "act_row", unsupported_row, unsuited_to_gpu, plan_act_row),
    Variant("base", "act_base", unsupported_base, never, partial(plan_base, find=act_tuned)),
)
"""Quantize activations and weights; check weights."""


K_PARTS = 4
"""Of K, summed apart by the matrix units; see `cl/gemv_w8a8_mma.cl`."""

TILES = (8, 16, 32, 64, 128)
"""Most rows of activations of each tile of the GEMV; larger batches are served in launches of the last."""


def tile_rows(rows: int) -> int:
    """Rows of the tile that serves `rows` rows, 1 to 128."""
    return next(t for t in TILES if rows <= t)


def arithmetic(caps: Capabilities) -> Macros:
    """How products are summed and weights decoded; see FMA in `cl/common.h` and DENORMALS in `cl/gemv.h`.

    The product of two codes is exact, so that both forms of a sum give the same bits.
    """
    fma = caps.ok("fma") and caps.ok("fma_speed")
    kept = caps.ok("denormals") and (caps.ok("fma_denormals") or not fma)
    return {"FMA": int(fma), "DENORMALS": int(kept), "HALF": int(caps.ok("half_convert"))}


def register_rows(rows: int) -> int:
    """Rows of activations whose sums a work-item holds: rows rounded up to a power of two, 8 at the most."""
    return min(8, power_of_two(rows))


def gemv_size(p: Product, tile_m: int) -> str:
    """The size class of a GEMV: its scales and the rows of activations of its tile."""
    return f"{p.scale_layout} {tile_m}"


MANY_ROWS = 48
"""Rows of weights for each compute unit, from which on groups of 32 keep the units about equally busy."""


def mma_size(caps: Capabilities, p: Product, tile_m: int) -> str:
    """The size class of a GEMV by matrix units."""
    many = p.n >= MANY_ROWS * int(caps.reported.get("max_compute_units") or 1)
    return f"{gemv_size(p, tile_m)} {tuned.MANY}" if many else gemv_size(p, tile_m)


def plan_gemv_base(caps: Capabilities, p: Product) -> Plan:
    """Word by word, a work-group for each row of weights."""
    wg = work_group(caps, 64)
    tile_m = min(register_rows(p.rows), wg)
    macros: Macros = {"TILE_M": tile_m, "TILE_N": 1, "ALIGNED": 0, "BUFFERS": 1, **arithmetic(caps)}
    return Plan("base", 1, wg, wg, 1, macros)


def plan_gemv_vector(caps: Capabilities, p: Product) -> Plan:
    """16 bytes a lane, 32 lanes a row, several rows a team: each is a load in flight.

    An Intel GPU has 64 registers a lane in sub-groups of 16: two rows there.
    """
    tile_m = register_rows(p.rows)
    how = tuned.find(caps, "gemv/vector", gemv_size(p, tile_m))
    room = caps.local_memory // (16 * tile_m * 32 * 4)  # spans of activations
    spans = max(1, min(how["spans"], room // 2))
    wg = work_group(caps, how["wg"])
    tiles: Macros = {"TILE_M": tile_m, "TILE_N": how["tile_n"], "SPANS": spans, "SPREAD": min(how["spread"], wg // 32)}
    tiles["BUFFERS"] = min(2, max(1, room // spans))
    macros: Macros = {"ALIGNED": 1, **tiles, **arithmetic(caps)}
    return Plan("vector", 4, 32, wg, how["tile_n"], macros, (), how.source)


def walk_tiles(caps: Capabilities, p: Product, variant: str, vec: int, macros: Macros) -> Plan:
    """A work-item walks a few rows of weights, as many as keep the sums in registers. macros: with TILE_M.

    PoCL 3.1 takes half a microsecond for a work-item; cores that walk far apart read slower: one row, N = K = 8192, of the read
    floor: 1.12 with 4 MB an item, 1.04 with 1 MB, 0.98 with 256 kB, 0.93 with 64 kB.
    """
    how = tuned.find(caps, f"gemv/{variant}", gemv_size(p, int(macros["TILE_M"])))
    tile_n = how["tile_n"]
    tiles = max(1, min(how["item_bytes"] // (tile_n * p.k), p.n // (tile_n * row_items(caps, how["items"]))))
    return Plan(variant, vec, 1, 1, tile_n * tiles, {**macros, "TILE_N": tile_n, **arithmetic(caps)}, (), how.source)


def plan_gemv_row(caps: Capabilities, p: Product) -> Plan:
    """Products of float32, in the widest vectors that work."""
    vec = max((n for n in (2, 4, 8, 16) if caps.ok(f"vector{n}")), default=1)
    return walk_tiles(caps, p, "row", vec, {"TILE_M": register_rows(p.rows)})


def plan_gemv_row_bf16(caps: Capabilities, p: Product) -> Plan:
    """Products of bfloat16, 64 codes of each row at a time.

    Tiles of four rows and four load least, as activations of more rows are further away: 8 rows, N = K = 8192, PoCL 3.1: 3.9 ms,
    with eight rows and two 5.2 ms.
    """
    spelling = caps.works["x86_bf16"].value or 0
    return walk_tiles(caps, p, "row_bf16", 16, {"TILE_M": min(4, power_of_two(p.rows)), "X86_BF16": spelling})


def plan_gemv_mma(caps: Capabilities, p: Product) -> Plan:
    """Teams of warps that fill their own rings of chunks in local memory; what does not fit the device shrinks.

    A decode step has few rows: the four parts of K are teams of one work-group. More rows fill the registers with sums and
    local memory with activations: there the parts are work-groups, and each tile of activations is loaded by fewer.
    """
    tile_m = tile_rows(p.rows)
    how = tuned.find(caps, "gemv/mma", mma_size(caps, p, tile_m))
    warps_k, warps_n, warps_m = how["warps_k"], how["warps_n"], min(how["warps_m"], tile_m // 8)
    memory = caps.local_memory
    while True:
        wg = 32 * warps_k * warps_n * warps_m
        tile_n = 16 * how["tiles_n"] * warps_n
        room = memory // warps_k
        stages = min(how["stages"], room // (128 * (tile_n + tile_m)))
        if stages >= 2 and 4 * tile_m * (tile_n + 5) <= room and wg <= caps.max_work_group_size:
            break
        if warps_k > 1:
            warps_k = 1
        elif warps_n > 1:
            warps_n //= 2
        else:
            warps_m //= 2
    warps: Macros = {"WARPS_K": warps_k, "WARPS_N": warps_n, "WARPS_M": warps_m, "STAGES": stages}
    macros: Macros = {"TILE_M": tile_m, "TILE_N": tile_n, **warps, "MMA_NV": 1, "HALF": int(caps.ok("half_convert"))}
    return Plan("mma", 1, wg, wg, tile_n, macros, (), how.source)


def unsupported_gemv(caps: Capabilities, p: Product) -> str | None:
    """Every device that runs a kernel and can address the weights."""
    return caps.missing("base") if p.n * p.k < 2**31 else caps.missing("base", "index64")


def unsupported_gemv_vector(caps: Capabilities, p: Product) -> str | None:
    """Aligned loads of 16 bytes, work-groups of teams, and local memory for 8 rows of activations: a variant takes any rows."""
    if p.align < 16:
        return f"weights at multiples of {p.align} bytes, 16 are needed"
    if caps.max_work_group_size < 64:
        return f"work-groups of {caps.max_work_group_size}, 64 are needed"
    memory = caps.local_memory
    needed = 16 * register_rows(8) * 32 * 4
    if memory < needed:
        return f"{memory} bytes of local memory, {needed} are needed"
    return unsupported_gemv(caps, p) or caps.missing("vector4")


def unsupported_gemv_row_bf16(caps: Capabilities, p: Product) -> str | None:
    """Dot products of bfloat16 that gave the right bits."""
    return caps.missing("x86_bf16") or unsupported_gemv(caps, p)


def unsupported_gemv_mma(caps: Capabilities, p: Product) -> str | None:
    """Matrix units that gave the right products."""
    if missing := caps.missing("nv_mma"):
        return missing
    if p.align < 16:
        return f"weights at multiples of {p.align} bytes, 16 are needed"
    if caps.max_work_group_size < 32:
        return f"work-groups of {caps.max_work_group_size}, 32 are needed"
    memory = caps.local_memory
    needed = 2 * 128 * (32 + TILES[-1])
    if memory < needed:
        return f"{memory} bytes of local memory, {needed} are needed"
    return unsupported_gemv(caps, p)


GEMV: tuple[Variant[Product], ...] = (
    Variant("mma", "gemv_mma", unsupported_gemv_mma, never, plan_gemv_mma),
    Variant("vector", "gemv_vector", unsupported_gemv_vector, unsuited_to_cpu, plan_gemv_vector),
    Variant("row_bf16", "gemv_row_bf16", unsupported_gemv_row_bf16, unsuited_to_gpu, plan_gemv_row_bf16),
    Variant("row", "gemv_row", unsupported_gemv, unsuited_to_gpu, plan_gemv_row),
    Variant("base", "gemv_base", unsupported_gemv, never, plan_gemv_base),
)
"""W8A8 GEMV."""


# ---- selection ----


def cannot(row: Variant[S], caps: Capabilities, shape: S) -> str | None:
    """Why a row cannot run: by its own rule, or because the probe saw it give wrong bits or die."""
    reason = row.unsupported(caps, shape)
    if reason is None and row.answer in caps.works:
        reason = caps.missing(row.answer)
    return reason


def refusals(table: tuple[Variant[S], ...], caps: Capabilities, shape: S) -> dict[str, str]:
    """Variant -> why it is not taken, whether it cannot or should not; those without a reason are absent."""
    rows = ((v.name, cannot(v, caps, shape) or v.unsuited(caps, shape)) for v in table)
    return {name: reason for name, reason in rows if reason}


def select(table: tuple[Variant[S], ...], caps: Capabilities, shape: S, force: str | None = None) -> Plan:
    """The plan of the first row that has no reason against it, or of the row called `force`.

    Raises UnsupportedDeviceError with the reason of each row; a forced row only needs to be able to run.
    """
    if force is not None:
        row = next((v for v in table if v.name == force), None)
        if row is None:
            raise UnsupportedDeviceError(f"force: expected one of {', '.join(v.name for v in table)}, got {force!r}")
        reason = cannot(row, caps, shape)
        if reason:
            raise UnsupportedDeviceError(f"force: {force} cannot run on {caps.reported.get('name')}: {reason}")
        return row.plan(caps, shape)
    refused = refusals(table, caps, shape)
    for row in table:
        if row.name not in refused:
            return row.plan(caps, shape)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    raise UnsupportedDeviceError(f"device: expected one that runs a kernel, got {caps.reported.get('name')} ({reasons})")
