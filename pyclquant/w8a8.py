"""W8A8 projections for decode: FP8 weights, activations quantized to FP8 on the way, 1 to 256 rows.

    w = w8a8.Weight(dev, [q, k, v])     # segments stacked by rows, per_row or block_128 scales
    y = w8a8.proj(dev, x, w)            # x [M, K] -> y [M, N]

Codes are fp8_e4m3fn. `scale_layout` per_row: a scale for each row of weights and each row of activations; block_128: one
for each 128 x 128 block of weights and each 128 columns of a row of activations. Source: the seed `w8a8_decode.rs`;
`pyclquant.reference` is the specification.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pyopencl as cl
import pyopencl.array as cla

from pyclquant.arrays import (
    AnyArray,
    alignment,
    check_array,
    check_device_array,
    check_matrix,
    expect,
    kernel_arguments,
    on_device,
    on_host,
)
from pyclquant.device import Device
from pyclquant.errors import ContextError, DTypeError, PyclquantError, ShapeError
from pyclquant.formats import EPS, FLOAT_DTYPES, FLOAT_MACROS, FORMATS, check_eps, float_dtype
from pyclquant.program import Bound, Launch
from pyclquant.variants import ACT, GEMV, K_PARTS, TILES, Blocks, Macros, Plan, Product, row_items

Events = Sequence[cl.Event] | None

SCALE_LAYOUTS = ("per_row", "block_128")
MAX_ROWS = 256
"""Most rows of activations in a call."""
LAUNCH_ROWS = TILES[-1]
"""Most rows of activations in a launch."""
CHUNK = 128
"""Columns, and rows of weights, that share a scale in block_128; K is a multiple of it."""
PITCH = 8
"""Row pitches and offsets of activations are multiples of this many elements."""
SEGMENT_ROWS = {"per_row": 16, "block_128": 128}
"""Rows of every segment but the last are a multiple of this."""
MAX_SEGMENTS = 3

E4M3 = FORMATS["fp8_e4m3fn"].codes_dtype
F32 = FLOAT_DTYPES["float32"]


# ---- weights ----


class Segment(NamedTuple):
    """A quantized weight. codes: [n, K] float8_e4m3fn.  scales: float32, per_row [n], block_128 [ceil(n / 128), K / 128]."""

    codes: AnyArray
    scales: AnyArray

    @property
    def scale_layout(self) -> str:
        """What the scales' number of axes says."""
        return "per_row" if self.scales.ndim == 1 else "block_128"


class Weight:
    """Up to three segments, stacked by rows into one output, read where they are.

    n, k: rows of all segments, columns.  scale_layout: per_row or block_128.
    boundaries: where the second and the third segment begin in the output; n for one that there is not.
    segments: codes and scales of each, on the device.
    """

    segments: tuple[tuple[cla.Array, cla.Array], ...]

    def __init__(self, dev: Device, segments: Sequence[Segment | tuple[AnyArray, AnyArray]] | Segment) -> None:
        """Check and, where they are NumPy arrays, copy the segments: one Segment, or one to three (codes, scales).

        Waits for the device: codes are searched for NaN. Raises ShapeError, DTypeError, ContextError.
        """
        given = [segments] if isinstance(segments, Segment) else [Segment(*s) for s in segments]
        self.k, self.scale_layout = check_segments(dev, given)
        self.segments = tuple((on_device(dev, s.codes, "codes"), on_device(dev, s.scales, "scales")) for s in given)
        for i, (codes, _) in enumerate(self.segments):
            check_codes(dev, codes, f"segment {i}")
        self.context = dev.context
        self.repeated: dict[tuple[object, ...], Repeated | None] = {}
        rows = [int(codes.shape[0]) for codes, _ in self.segments]
        self.n = sum(rows)
        self.boundaries = (rows[0], sum(rows[:2]))

    def __repr__(self) -> str:
        return f"<pyclquant.w8a8.Weight [{self.n}, {self.k}] {self.scale_layout}, {len(self.segments)} segments>"

    def remember(self, key: tuple[object, ...], repeated: Repeated | None) -> None:
        """Keep the launches of a call of `proj`, or None of one that was seen once; the oldest of 32 give way."""
        while len(self.repeated) >= 32:
            self.repeated.pop(next(iter(self.repeated)), None)
        self.repeated[key] = repeated

    def segment(self, i: int) -> Weight:
        """Segment i alone; its outputs have the same bits as within the whole. Raises ShapeError."""
        if not 0 <= i < len(self.segments):
            raise ShapeError(f"segment: expected 0 to {len(self.segments) - 1}, got {i}")
        alone = object.__new__(Weight)
        alone.k, alone.scale_layout, alone.context = self.k, self.scale_layout, self.context
        alone.segments = (self.segments[i],)
        alone.repeated = {}
        alone.n = int(self.segments[i][0].shape[0])
        alone.boundaries = (alone.n, alone.n)
        return alone


def check_segments(dev: Device, segments: Sequence[Segment]) -> tuple[int, str]:
    """K and the scale layout of segments that fit together. Raises ShapeError, DTypeError, ContextError."""
    if not 1 <= len(segments) <= MAX_SEGMENTS:
        raise ShapeError(f"segments: expected 1 to {MAX_SEGMENTS}, got {len(segments)}")
    for i, s in enumerate(segments):
        for a, what, dtype in ((s.codes, "codes", E4M3), (s.scales, "scales", F32)):
            if check_array(dev, a, f"segment {i} {what}").dtype != dtype:
                raise DTypeError(f"segment {i} {what}: expected {dtype}, got {a.dtype}")
        if s.codes.ndim != 2:
            raise ShapeError(f"segment {i} codes: expected [n, K], got shape {tuple(s.codes.shape)}")
        if s.scales.ndim not in (1, 2):
            raise ShapeError(f"segment {i} scales: expected [n] or [ceil(n / 128), K / 128], got shape {tuple(s.scales.shape)}")
    k, layout = int(segments[0].codes.shape[1]), segments[0].scale_layout
    if k <= 0 or k % CHUNK:
        raise ShapeError(f"segment 0 codes: expected K a positive multiple of {CHUNK}, got K={k}")
    for i, s in enumerate(segments):
        n = int(s.codes.shape[0])
        if s.codes.shape[1] != k or s.scale_layout != layout:
            raise ShapeError(
                f"segment {i}: expected K={k} and {layout} scales as of segment 0, got K={s.codes.shape[1]} and {s.scale_layout}"
            )
        if n == 0:
            raise ShapeError(f"segment {i} codes: expected at least one row, got shape {tuple(s.codes.shape)}")
        if i + 1 < len(segments) and n % SEGMENT_ROWS[layout]:
            raise ShapeError(f"segment {i} codes: expected a multiple of {SEGMENT_ROWS[layout]} rows before another, got {n}")
        expect(s.scales, f"segment {i} scales", scales_shape(n, k, layout), F32)
        scales = on_host(s.scales)
        wrong = ~(np.isfinite(scales) & (scales >= 0))
        if wrong.any():
            where = tuple(int(j) for j in np.argwhere(wrong)[0])
            raise ShapeError(f"segment {i} scales: expected finite and not negative, got {scales[where]} at {where}")
    if sum(int(s.codes.shape[0]) for s in segments) >= 2**31:
        raise ShapeError("segments: expected fewer than 2**31 rows in all")
    return k, layout


def scales_shape(n: int, k: int, scale_layout: str) -> tuple[int, ...]:
    """Of the scales of a weight [n, k]."""
    return (n,) if scale_layout == "per_row" else (-(-n // CHUNK), k // CHUNK)


def check_codes(dev: Device, codes: cla.Array, name: str) -> None:
    """Raises ShapeError when a weight code is NaN; waits for the device."""
    n, k = codes.shape
    blocks = Blocks(k, k, n, 2, align=alignment((codes, 1)))  # like 2-byte elements: 8 codes a lane
    plan = dev.plan(ACT, blocks)
    first = cla.to_device(dev.queue, np.full(1, 0xFFFFFFFF, np.uint32))
    arguments = [*kernel_arguments(codes), first.base_data, np.uint32(n), np.uint64(k), np.uint32(plan.blocks_per_team)]
    launch = Launch("weight_check.cl", "weight_check", plan, {"X_TYPE": "BF16"}, arguments, n)
    first.add_event(dev.programs.launch(launch, codes.events))
    row = int(first.get()[0])
    if row < n:
        bad = (on_host(codes[row]).view(np.uint8) & 0x7F) == 0x7F
        raise ShapeError(f"{name} codes: expected finite weights, got NaN at ({row}, {int(np.argmax(bad))})")


def check_layout(scale_layout: str) -> str:
    """The layout itself. Raises ShapeError when it is none of SCALE_LAYOUTS."""
    if scale_layout not in SCALE_LAYOUTS:
        raise ShapeError(f"scale_layout: expected one of {', '.join(SCALE_LAYOUTS)}, got {scale_layout!r}")
    return scale_layout


def quantize_weight(
    dev: Device,
    w: AnyArray,
    scale_layout: str,
    *,
    eps: float = EPS,
    wait_for: Events = None,
    force: str | None = None,
) -> Segment:
    """Quantize weights w [N, K] on the device: codes [N, K], scales [N] or [ceil(N / 128), K / 128] float32, amax / 448 each.

    w: float32, float16 or bfloat16, NumPy or pyopencl.array, K a positive multiple of 128; a row pitch as of `act_quant`.
    scale_layout: per_row or block_128.  eps: floor of a scale.  wait_for, force: as of `kv.quantize`.
    NaN gives a NaN code, which `Weight` refuses.
    Raises ShapeError, DTypeError, ContextError before anything is enqueued. Source: `reference.quantize_weight`.
    """
    check_layout(scale_layout)
    n, k = check_activations(dev, w, "w", None)
    to = (cla.empty(dev.queue, (n, k), E4M3), cla.empty(dev.queue, scales_shape(n, k, scale_layout), F32))
    tile_rows, tile_columns = (1, k) if scale_layout == "per_row" else (CHUNK, CHUNK)
    tiles = Tiles(tile_rows, tile_columns, check_eps(eps))
    if n:
        run(dev, [tiles.launch(dev, [on_device_pitched(dev, w, "w")], to, force)], [w], to, wait_for)
    return Segment(*to)


# ---- activations ----


class Activations(NamedTuple):
    """Quantized activations. codes: [M, K] float8_e4m3fn.  scales: float32, [M] (per_row) or [M, K / 128] (block_128)."""

    codes: cla.Array
    scales: cla.Array

    @property
    def scale_layout(self) -> str:
        """What the scales' number of axes says."""
        return "per_row" if self.scales.ndim == 1 else "block_128"


@dataclass(frozen=True)
class Scratch:
    """Device memory for the activations of any call of up to 256 rows and max_k columns; reused by every call that is given it.

    codes: [256 * max_k].  scales: [256 * ceil(max_k / 128)].  staged: [128 * max_k] float32 where the variants `row` and
    `row_bf16` (which takes half of it) want decoded activations, else None.
    """

    codes: cla.Array
    scales: cla.Array
    staged: cla.Array | None
    _views: dict[tuple[int, int, str], Activations] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def alloc(dev: Device, max_k: int) -> Scratch:
        """For max_k columns. Raises ShapeError unless max_k is positive."""
        if max_k <= 0:
            raise ShapeError(f"max_k: expected a positive number of columns, got {max_k}")
        staged = cla.empty(dev.queue, LAUNCH_ROWS * max_k, F32) if dev.capabilities.walks_rows else None
        scales = cla.empty(dev.queue, MAX_ROWS * -(-max_k // CHUNK), F32)
        return Scratch(cla.empty(dev.queue, MAX_ROWS * max_k, E4M3), scales, staged)

    def fits(self, rows: int, k: int, scale_layout: str) -> bool:
        """Whether it holds `rows` rows of k columns."""
        scales = rows * (1 if check_layout(scale_layout) == "per_row" else k // CHUNK)
        return bool(self.codes.size >= rows * k and self.scales.size >= scales)

    def activations(self, rows: int, k: int, scale_layout: str) -> Activations:
        """Views of its beginning. Raises ShapeError when it is too small."""
        if not self.fits(rows, k, scale_layout):
            raise ShapeError(f"scratch: expected room for {rows} rows of K={k} ({scale_layout}), got {self.codes.size} codes")
        key = rows, k, scale_layout
        if key not in self._views:
            shape = (rows,) if scale_layout == "per_row" else (rows, k // CHUNK)
            codes, scales = self.codes[: rows * k], self.scales[: int(np.prod(shape))]
            self._views[key] = Activations(codes.reshape(rows, k), scales.reshape(shape))
        return self._views[key]


def new_activations(dev: Device, rows: int, k: int, scale_layout: str) -> Activations:
    """Uninitialized, of their own memory."""
    shape = (rows,) if scale_layout == "per_row" else (rows, k // CHUNK)
    return Activations(cla.empty(dev.queue, (rows, k), E4M3), cla.empty(dev.queue, shape, F32))


def act_quant(
    dev: Device,
    x: AnyArray,
    scale_layout: str,
    *,
    scratch: Scratch | None = None,
    eps: float = EPS,
    wait_for: Events = None,
    force: str | None = None,
) -> Activations:
    """Quantize activations x [M, K], 1 <= M <= 256, one scale a row (per_row) or for each 128 columns (block_128).

    x: float32, float16 or bfloat16, NumPy or pyopencl.array; K a positive multiple of 128. A view with a row pitch
        (x[:, a:b]) is taken as it is when pitch and offset are multiples of 8 elements.
    scratch: memory for the result, overwritten by the next call that gets it; None allocates.
    eps, wait_for, force: as of `kv.quantize`.
    Raises ShapeError, DTypeError, ContextError before anything is enqueued. Source: `reference.act_quant`.
    """
    rows, k = check_activations(dev, x, "x")
    acts, launches = act_launches(dev, [on_device_pitched(dev, x, "x")], rows, k, scale_layout, scratch, eps, force)
    run(dev, launches, [x], [*acts], wait_for)
    return acts


def act_quant_silu(
    dev: Device,
    gate: AnyArray,
    up: AnyArray,
    scale_layout: str,
    *,
    scratch: Scratch | None = None,
    eps: float = EPS,
    wait_for: Events = None,
    force: str | None = None,
) -> Activations:
    """`act_quant` of h = (gate * sigmoid(gate)) * up, computed in float32 and rounded to bfloat16, in one pass.

    gate, up: [M, K] of the same dtype and row pitch, as x of `act_quant`; gate|up stacked in one array of 2 K columns are
        its two halves. All else as of `act_quant`. Source: `reference.act_quant_silu`.
    """
    rows, k = check_gate(dev, gate, up)
    inputs = [on_device_pitched(dev, gate, "gate"), on_device_pitched(dev, up, "up")]
    acts, launches = act_launches(dev, inputs, rows, k, scale_layout, scratch, eps, force)
    run(dev, launches, [gate, up], [*acts], wait_for)
    return acts


def silu_mul(dev: Device, gate: AnyArray, up: AnyArray, *, wait_for: Events = None, force: str | None = None) -> cla.Array:
    """The bfloat16 (gate * sigmoid(gate)) * up [M, K] that `act_quant_silu` quantizes. Arguments and errors as there."""
    rows, k = check_gate(dev, gate, up)
    inputs = [on_device_pitched(dev, gate, "gate"), on_device_pitched(dev, up, "up")]
    h = cla.empty(dev.queue, (rows, k), FLOAT_DTYPES["bfloat16"])
    plan, macros, counts = Tiles(1, k, EPS).parts(dev, inputs, h, force)
    arguments = [*kernel_arguments(*inputs, h), *counts]
    run(dev, [Launch("act_quant.cl", "act_quant_silu_mul", plan, macros, arguments, rows)], [gate, up], [h], wait_for)
    return h


@dataclass(frozen=True)
class Tiles:
    """How a matrix is cut into tiles that share a scale; see `cl/act_quant.cl`."""

    rows: int
    columns: int
    eps: float

    def parts(
        self, dev: Device, inputs: Sequence[cla.Array], codes: cla.Array, force: str | None
    ) -> tuple[Plan, Macros, list[np.generic]]:
        """Plan, macros, and the counts among the arguments of a kernel of `cl/act_quant.cl`."""
        x = inputs[0]
        n, k = x.shape
        pitch = x.strides[0] // x.dtype.itemsize if n > 1 else k
        tiles = -(-n // self.rows) * (k // self.columns)
        align = alignment(*((a, 1) for a in (*inputs, codes))) | pitch
        blocks = Blocks(k, self.columns, tiles, x.dtype.itemsize, align=align & -align, rows=self.rows)
        plan = dev.plan(ACT, blocks, force)
        macros: Macros = {"SILU": len(inputs) - 1, "X_TYPE": FLOAT_MACROS[float_dtype(x.dtype)]}
        sizes = [np.uint64(v) for v in (tiles, n, k, pitch)]
        return plan, macros, [*sizes, np.uint32(self.rows), np.uint32(self.columns), np.uint32(plan.blocks_per_team)]

    def launch(self, dev: Device, inputs: Sequence[cla.Array], to: tuple[cla.Array, cla.Array], force: str | None) -> Launch:
        """Quantize x, or silu(gate) * up, to codes and scales."""
        plan, macros, counts = self.parts(dev, inputs, to[0], force)
        arguments = [*kernel_arguments(*inputs, *to), *counts, np.float32(self.eps)]
        return Launch("act_quant.cl", "act_quant", plan, macros, arguments, int(counts[0]))


def act_launches(
    dev: Device,
    inputs: Sequence[cla.Array],
    rows: int,
    k: int,
    scale_layout: str,
    scratch: Scratch | None,
    eps: float,
    force: str | None,
) -> tuple[Activations, list[Launch]]:
    """Where the activations will be, and the launch that makes them."""
    check_layout(scale_layout)
    check_scratch(dev, scratch)
    tiles = Tiles(1, k if scale_layout == "per_row" else CHUNK, check_eps(eps))
    acts = new_activations(dev, rows, k, scale_layout) if scratch is None else scratch.activations(rows, k, scale_layout)
    return acts, [tiles.launch(dev, inputs, acts, force)]


# ---- the product ----

ROW = "gemv_w8a8_row"
FILES = {"mma": "gemv_w8a8_mma", "vector": "gemv_w8a8", "row_bf16": ROW, "row": ROW, "base": "gemv_w8a8"}
"""Kernel, and stem of the kernel file, of each variant."""


def gemv(
    dev: Device,
    acts: Activations,
    w: Weight,
    dtype: str = "bfloat16",
    *,
    out: cla.Array | None = None,
    scratch: Scratch | None = None,
    wait_for: Events = None,
    force: str | None = None,
) -> cla.Array:
    """C [M, N] = activations [M, K] times weights [N, K] transposed, accumulated in float32, rounded once to dtype.

    acts: from `act_quant`, of w's scale layout.  dtype: float32, float16 or bfloat16.
    out: [M, N] of dtype, rows of any pitch >= N (y[:, a:b]); only its own N columns are written.
    scratch: whose room for decoded activations is used, where the variant wants them.  wait_for, force: as of `kv.quantize`.
    The bits of a row depend on that row and w alone.
    Raises ShapeError, DTypeError, ContextError before anything is enqueued. Source: `reference.gemv`.
    """
    check_weight(dev, w)
    expect_activations(dev, acts, w)
    c = output(dev, int(acts.codes.shape[0]), w, dtype, out)
    check_scratch(dev, scratch)
    # acts carry the event too: they may be in scratch memory, which must not be overwritten before they are read
    run(dev, gemv_launches(dev, acts, w, c, scratch, force), flat(w), [c, *acts], wait_for)
    return c


def gemv_launches(
    dev: Device, acts: Activations, w: Weight, c: cla.Array, scratch: Scratch | None, force: str | None
) -> list[Launch]:
    """The launches that fill c, 128 rows each; where the variant walks rows, each after one that decodes its activations."""
    rows = int(acts.codes.shape[0])
    n1, n2 = w.boundaries
    absent = [None, np.uint64(0)] * 2 * (MAX_SEGMENTS - len(w.segments))  # a buffer costs a launch 0.15 us on an H200
    align = alignment(*((codes, 1) for codes, _ in w.segments), (acts.codes, 1))
    pitch = c.strides[0] // c.dtype.itemsize if rows > 1 else w.n
    layout: Macros = {"SCALES": w.scale_layout.upper(), "X_TYPE": FLOAT_MACROS[float_dtype(c.dtype)]}
    launches = []
    for start in range(0, rows, LAUNCH_ROWS):
        part = slice(start, min(start + LAUNCH_ROWS, rows))
        count = part.stop - part.start
        a, a_scales, target = (whole if count == rows else whole[part] for whole in (*acts, c))
        plan = dev.plan(GEMV, Product(count, w.n, w.k, w.scale_layout, align), force)
        name = FILES[plan.variant]
        if name == ROW:
            a, stage = staged(dev, a, plan, layout, scratch)
            launches.append(stage)
        arrays = [*kernel_arguments(a, a_scales, *flat(w)), *absent, *kernel_arguments(target)]
        sizes = [np.uint32(v) for v in (count, w.n, w.k, pitch, n1, n2)]
        if plan.variant == "mma":
            launches += split_launches(dev, plan, layout, arrays, sizes, w.n)
            continue
        if name == ROW:
            sizes.append(np.uint32(plan.blocks_per_team))
        launches.append(Launch(f"{name}.cl", name, plan, layout, [*arrays, *sizes], w.n))
    return launches


PARTIAL_BYTES = 1 << 26
"""Of partial sums of a launch, at most: more columns of C take several launches."""


def split_launches(
    dev: Device, plan: Plan, layout: Macros, arrays: list[Any], sizes: list[np.generic], n: int
) -> Iterator[Launch]:
    """The launches of the variant `mma` for n columns of C, with room for sums where work-groups share a tile."""
    tile_n, tile_m = plan.blocks_per_team, int(plan.macros["TILE_M"])
    splits = K_PARTS // int(plan.macros["WARPS_K"])
    step = n if splits == 1 else max(1, PARTIAL_BYTES // (4 * splits * tile_m * CHUNK)) * CHUNK
    for begin in range(0, n, step):
        end = min(begin + step, n)
        tiles = -(-(end - begin) // tile_n)
        partials = (None, None) if splits == 1 else dev.programs.partials(tiles, 4 * tiles * splits * tile_n * tile_m)
        arguments = [*arrays, *partials, *sizes, np.uint32(begin), np.uint32(end)]
        yield Launch("gemv_w8a8_mma.cl", "gemv_w8a8_mma", plan, layout, arguments, tiles * splits * tile_n)


def staged(dev: Device, codes: cla.Array, plan: Plan, layout: Macros, scratch: Scratch | None) -> tuple[cla.Array, Launch]:
    """Decoded activations in the order of `cl/gemv_w8a8_row.cl`, and the launch that fills them from codes [M, K]."""
    rows, k = codes.shape
    tile_m = int(plan.macros["TILE_M"])
    groups = -(-rows // tile_m)
    size = groups * tile_m * k // (2 if plan.variant == "row_bf16" else 1)
    room = scratch.staged if scratch is not None and scratch.staged is not None and scratch.staged.size >= size else None
    decoded = room if room is not None else cla.empty(dev.queue, size, F32)
    steps = groups * (k // (4 * plan.vec))
    each = -(-steps // row_items(dev.capabilities, 4))
    arguments = [*kernel_arguments(codes, decoded), *(np.uint32(v) for v in (rows, k, each))]
    return decoded, Launch(f"{ROW}.cl", f"{ROW}_stage", replace(plan, blocks_per_team=each), layout, arguments, steps)


def proj(
    dev: Device,
    x: AnyArray,
    w: Weight,
    dtype: str = "bfloat16",
    *,
    up: AnyArray | None = None,
    out: cla.Array | None = None,
    scratch: Scratch | None = None,
    eps: float = EPS,
    wait_for: Events = None,
    force: str | None = None,
) -> cla.Array:
    """Project x [M, K] by w: quantize the activations, then `gemv`. Returns C [M, N]; with `up`, of silu(x) * up.

    All arguments as of `act_quant`, `act_quant_silu` and `gemv`; force names a variant of the GEMV.
    Raises ShapeError, DTypeError, ContextError before anything is enqueued, UnsupportedDeviceError and BuildError.
    """
    call = Call(dev, x, w, dtype, up, out, scratch, eps, force)
    key, arrays = repeated_key(call)
    repeated = w.repeated.get(key) if key else None
    if repeated is not None and repeated.scratch() is scratch:
        return repeated.enqueue(dev, arrays, wait_for)
    launches, inputs, c = projection(call)
    run(dev, launches, [*inputs, *flat(w)], [c, *([scratch.codes, scratch.scales] if scratch else [])], wait_for)
    if key and scratch:
        w.remember(key, Repeated(dev, launches, arrays, w, scratch) if key in w.repeated else None)
    return c


class Call(NamedTuple):
    """The arguments of `proj`, as they were given."""

    dev: Device
    x: AnyArray
    w: Weight
    dtype: str
    up: AnyArray | None
    out: cla.Array | None
    scratch: Scratch | None
    eps: float
    force: str | None


def repeated_key(call: Call) -> tuple[tuple[object, ...] | None, list[cla.Array]]:
    """What calls of `proj` have in common whose launches differ in the buffers of some arrays alone, and these: out, x, up.

    None for a call that needs new memory, copies, or events between its launches, or whose arrays share a buffer.
    """
    dev, x, w, dtype, up, out, scratch, eps, force = call
    known = isinstance(w, Weight) and isinstance(scratch, Scratch) and dev.programs.in_order
    if not (known and isinstance(dtype, str) and isinstance(eps, float) and isinstance(force, str | None)):
        return None, []
    key: list[object] = [dev, id(scratch), dtype, eps, force]
    arrays: list[cla.Array] = []
    buffers: list[Any] = []
    for a in (out, x) if up is None else (out, x, up):
        if not isinstance(a, cla.Array) or a.context != dev.context:
            return None, []
        buffer: Any = a.base_data
        if buffer is None or buffer in buffers or buffer.flags & cl.mem_flags.USE_HOST_PTR:
            return None, []
        key += (a.shape, a.strides, a.dtype, a.offset)
        arrays.append(a)
        buffers.append(buffer)
    return tuple(key), arrays


class Repeated:
    """The launches of a `proj` that was called before, checked and bound. Keeps no buffer of out, x and up alive."""

    def __init__(self, dev: Device, launches: Sequence[Launch], arrays: Sequence[cla.Array], w: Weight, scratch: Scratch) -> None:
        """arrays: whose buffers differ from call to call."""
        self.scratch = weakref.ref(scratch)
        self._kept = [scratch.codes, scratch.scales, *flat(w)]
        self._bound: list[tuple[Bound, list[tuple[int, int]]]] = []  # each with the arguments that differ: number, array
        buffers = [a.base_data for a in arrays]
        for launch in launches:
            places = [buffers.index(a) if isinstance(a, cl.Buffer) and a in buffers else None for a in launch.arguments]
            kept = [a for a, place in zip(launch.arguments, places, strict=True) if place is None]
            differ = [(number, place) for number, place in enumerate(places) if place is not None]
            self._bound.append((replace(dev.programs.bind(launch), arguments=kept), differ))

    def enqueue(self, dev: Device, arrays: Sequence[cla.Array], wait_for: Events) -> cla.Array:
        """Enqueue them for these arrays, behind the events of all; out carries the last event."""
        events = [*(wait_for or ()), *(e for a in (*arrays, *self._kept) for e in a.events)]
        with dev.programs.lock:
            for bound, differ in self._bound:
                for number, place in differ:
                    buffer: Any = arrays[place].base_data
                    bound.kernel.set_arg(number, buffer)
                events = [dev.programs.enqueue(bound, events)]
        for a in (arrays[0], *self._kept[:2]):
            a.events[:] = events
        return arrays[0]


def projection(call: Call) -> tuple[list[Launch], list[cla.Array], cla.Array]:
    """The launches of `proj`, its inputs on the device and its output, all checked."""
    dev, x, w, dtype, up, out, scratch, eps, force = call
    check_weight(dev, w)
    rows, _ = check_activations(dev, x, "x", k=w.k) if up is None else check_gate(dev, x, up, w.k)
    check_scratch(dev, scratch)
    if scratch is not None:
        scratch.activations(rows, w.k, w.scale_layout)
    check_eps(eps)
    c = output(dev, rows, w, dtype, out)
    inputs = [on_device_pitched(dev, x, "x")] + ([] if up is None else [on_device_pitched(dev, up, "up")])
    acts, launches = act_launches(dev, inputs, rows, w.k, w.scale_layout, scratch, eps, None)
    return launches + gemv_launches(dev, acts, w, c, scratch, force), inputs, c


class Prepared:
    """A projection with every argument bound: `enqueue` costs the host no more than its launches. For one thread at a time.

    x, up, w, out, scratch keep their places; what they hold may change between calls.
    """

    def __init__(self, dev: Device, bound: Sequence[Bound], out: cla.Array) -> None:
        self.queue = dev.queue
        self.out = out
        self._bound = tuple(bound)
        self._in_order = dev.programs.in_order

    def enqueue(self, wait_for: Events = None) -> cl.Event:
        """Enqueue the launches; the event of the last. Array events are neither waited for nor added: pass wait_for."""
        waits = list(wait_for) if wait_for else None
        for bound in self._bound:
            event = cl.enqueue_nd_range_kernel(self.queue, bound.kernel, bound.global_size, bound.local_size, wait_for=waits)
            waits = None if self._in_order else [event]
        return event


def prepare(
    dev: Device,
    x: cla.Array,
    w: Weight,
    dtype: str = "bfloat16",
    *,
    up: cla.Array | None = None,
    out: cla.Array | None = None,
    scratch: Scratch | None = None,
    eps: float = EPS,
    force: str | None = None,
) -> Prepared:
    """`proj` with its kernels built and its arguments bound, for a decode loop: x (and up) must be on the device.

    Arguments and errors as of `proj`. Waits for what the arrays wait for.
    """
    for a, name in ((x, "x"), (up, "up")):
        if a is not None and not isinstance(a, cla.Array):
            raise DTypeError(f"{name}: expected a pyopencl.array.Array, got {type(a).__name__}")
    launches, inputs, c = projection(Call(dev, x, w, dtype, up, out, scratch, eps, force))
    for a in (*inputs, *flat(w), c):
        for event in a.events:
            event.wait()
    return Prepared(dev, [dev.programs.bind(launch) for launch in launches], c)


# ---- availability ----


@dataclass(frozen=True)
class Kernels:
    """Which scale layouts a device can serve, all quantizers and all five tiles of each. missing: layout -> why not."""

    missing: dict[str, str]

    @staticmethod
    def load(dev: Device, dtype: str = "bfloat16", scale_layouts: Sequence[str] = SCALE_LAYOUTS, k: int = CHUNK) -> Kernels:
        """Build every kernel that a projection of dtype by weights with k columns takes, before the first is needed.

        A layout with a kernel that no variant serves, or that does not build, is `missing`. Raises ShapeError, DTypeError.
        """
        float_dtype(dtype)
        missing = dict.fromkeys(SCALE_LAYOUTS, "not loaded")
        for layout in [check_layout(name) for name in scale_layouts]:
            try:
                n = CHUNK
                zeros = Segment(np.zeros((n, k), E4M3), np.zeros(scales_shape(n, k, layout), np.float32))
                w = Weight(dev, zeros)
                x = cla.empty(dev.queue, (LAUNCH_ROWS, k), FLOAT_DTYPES[dtype])
                for rows in (1, 2, 4, *TILES):
                    prepare(dev, x[:rows], w, dtype)
                prepare(dev, x[:1], w, dtype, up=x[:1])
                del missing[layout]
            except (ShapeError, DTypeError):
                raise
            except (PyclquantError, cl.Error) as error:
                missing[layout] = str(error)
        return Kernels(missing)

    @staticmethod
    def none() -> Kernels:
        """Of a device that serves nothing."""
        return Kernels(dict.fromkeys(SCALE_LAYOUTS, "not loaded"))

    def resolved(self, scale_layout: str) -> bool:
        """Whether every kernel of a layout is there."""
        return check_layout(scale_layout) not in self.missing


def decode_available(kernels: Kernels, w: Weight, rows: int, scratch: Scratch) -> bool:
    """Whether `proj` of `rows` rows by w can run with this scratch: 1 to 256 rows, kernels resolved, room enough."""
    return 1 <= rows <= MAX_ROWS and kernels.resolved(w.scale_layout) and scratch.fits(rows, w.k, w.scale_layout)


# ---- checks ----


def check_activations(dev: Device, x: object, name: str, most: int | None = MAX_ROWS, k: int | None = None) -> tuple[int, int]:
    """M and K of a matrix to quantize. most: rows, at least one; None for any.  k: what K must be."""
    a = check_matrix(dev, x, name, PITCH)
    float_dtype(a.dtype, name)
    rows, columns = (int(v) for v in a.shape)
    if most is not None and not 1 <= rows <= most:
        raise ShapeError(f"{name}: expected 1 to {most} rows, got shape {tuple(a.shape)}")
    if columns <= 0 or columns % CHUNK:
        raise ShapeError(f"{name}: expected K a positive multiple of {CHUNK}, got shape {tuple(a.shape)}")
    if k is not None and columns != k:
        raise ShapeError(f"{name}: expected K={k} columns as of the weight, got shape {tuple(a.shape)}")
    return rows, columns


def check_gate(dev: Device, gate: AnyArray, up: AnyArray, k: int | None = None) -> tuple[int, int]:
    """M and K of gate and up, which must be alike."""
    rows, columns = check_activations(dev, gate, "gate", k=k)
    check_activations(dev, up, "up", k=k)
    expect(up, "up", tuple(gate.shape), gate.dtype)
    if isinstance(gate, cla.Array) and isinstance(up, cla.Array) and rows > 1 and gate.strides[0] != up.strides[0]:
        raise ShapeError(f"up: expected the row pitch of gate, {gate.strides[0]} bytes, got {up.strides[0]}")
    if isinstance(gate, cla.Array) != isinstance(up, cla.Array):
        raise DTypeError(f"up: expected a {type(gate).__name__} like gate, got {type(up).__name__}")
    return rows, columns


def check_weight(dev: Device, w: object) -> None:
    """Raises DTypeError or ContextError unless w is a Weight of this device's context."""
    if not isinstance(w, Weight):
        raise DTypeError(f"w: expected a Weight, got {type(w).__name__}")
    if w.context != dev.context:
        raise ContextError(f"w: expected a Weight of this device's context ({dev.name}), got one of another context")


def check_scratch(dev: Device, scratch: Scratch | None) -> None:
    """Raises DTypeError or ContextError unless scratch is a Scratch of this device's context."""
    if scratch is not None and not isinstance(scratch, Scratch):
        raise DTypeError(f"scratch: expected a Scratch, got {type(scratch).__name__}")
    if scratch is not None and scratch.codes.context != dev.context:
        raise ContextError(f"scratch: expected one of this device's context ({dev.name}), got one of another context")


def expect_activations(dev: Device, acts: Activations, w: Weight) -> None:
    """Raises unless acts are what `act_quant` returns for w."""
    if not isinstance(acts, Activations):
        raise DTypeError(f"acts: expected Activations, got {type(acts).__name__}")
    codes = check_device_array(dev, acts.codes, "acts.codes")
    rows = int(codes.shape[0]) if codes.ndim else 0
    if not 1 <= rows <= MAX_ROWS:
        raise ShapeError(f"acts.codes: expected 1 to {MAX_ROWS} rows, got shape {tuple(codes.shape)}")
    expect(codes, "acts.codes", (rows, w.k), E4M3)
    shape = (rows,) if w.scale_layout == "per_row" else (rows, w.k // CHUNK)
    expect(check_device_array(dev, acts.scales, "acts.scales"), "acts.scales", shape, F32)


def output(dev: Device, rows: int, w: Weight, dtype: str, out: cla.Array | None) -> cla.Array:
    """`out`, checked, or a new array [rows, N]."""
    name = float_dtype(dtype)
    if out is None:
        return cla.empty(dev.queue, (rows, w.n), FLOAT_DTYPES[name])
    c = check_matrix(dev, out, "out")
    if not isinstance(c, cla.Array):
        raise DTypeError(f"out: expected a pyopencl.array.Array, got {type(c).__name__}")
    expect(c, "out", (rows, w.n), FLOAT_DTYPES[name])
    return c


# ---- running ----


def on_device_pitched(dev: Device, a: AnyArray, name: str) -> cla.Array:
    """`a` itself when it is on the device, whatever its row pitch; else a packed copy there."""
    return a if isinstance(a, cla.Array) else on_device(dev, np.ascontiguousarray(a), name)


def flat(w: Weight) -> list[cla.Array]:
    """Codes and scales of all segments."""
    return [a for s in w.segments for a in s]


def run(
    dev: Device, launches: Sequence[Launch], read: Sequence[AnyArray], written: Sequence[cla.Array], wait_for: Events
) -> None:
    """Enqueue launches one after the other, behind the events of all arrays; the written ones carry the last event."""
    arrays = [a for a in (*read, *written) if isinstance(a, cla.Array)]
    events = [*(wait_for or ()), *(e for a in arrays for e in a.events)]
    for launch in launches:
        events = [dev.programs.launch(launch, events)]
    for a in written:
        a.events[:] = events  # the last one waits for all that were there
