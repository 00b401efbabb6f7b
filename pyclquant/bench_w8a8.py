"""The W8A8 operations for the bench: quantizers of activations, the GEMV alone, the whole projection."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import pyopencl as cl
import pyopencl.array as cla

from pyclquant import reference, w8a8
from pyclquant.bench_peers import LIMIT_BYTES, NotTimedError, Peer, Torch, numpy_peer, torch_beside
from pyclquant.bench_work import Array, Spec, Work, check_memory, repeated, repeated_on_device, sample, spoil
from pyclquant.device import Device
from pyclquant.floor import Enqueue, buffer_sets, copying, reading, span
from pyclquant.formats import EPS, FLOAT_DTYPES
from pyclquant.program import Launch
from pyclquant.testing import mismatch, product_mismatch

TILE = 509
"""Rows of random weights; they repeat to the end. A prime, so that a row read from a wrong place shows."""
CHECKED = 8
"""Blocks of 128 columns of a product that are compared with the reference: the first, the last and some between."""
QUANTIZING = 4
"""Operations of an element of activations: |x|, max, x / scale, round."""
SILU = 6
"""More of them for SiLU: exp, 1 + e, g / it, · up, round, and the sign of g."""


@dataclass(frozen=True)
class Case:
    """A weight [N, K] in as many buffers as it takes to leave the caches, and activations for it.

    tile: the first rows of the codes, which repeat.  scales: of the weight, random.
    x: [most rows, K].  a, a_scales: the same quantized.  Each number of rows takes the first ones.
    """

    copies: tuple[w8a8.Weight, ...]
    tile: Array
    scales: Array
    x: Array
    a: Array
    a_scales: Array

    @staticmethod
    def of(dev: Device, spec: Spec, scale_layout: str) -> Case:
        """Random. Raises ShapeError, DTypeError as `w8a8.Weight`, or when it is too large."""
        n, k = spec.weight
        check_memory(dev, n * k, "weight")
        tile = reference.encode(sample((min(n, TILE), k), "float32") * np.float32(64), reference.E4M3)
        shape = w8a8.scales_shape(n, k, w8a8.check_layout(scale_layout))
        scales = np.random.default_rng(2).uniform(0.5e-3, 1.5e-3, shape).astype(np.float32)
        sets = buffer_sets(dev, n * k)
        copies = [w8a8.Weight(dev, [(repeated_on_device(dev, tile, n), scales)]) for _ in range(sets)]
        x = sample((max(spec.rows), k), spec.dtype)
        return Case(tuple(copies), tile, scales, x, *reference.act_quant(x, scale_layout))

    @property
    def scale_layout(self) -> str:
        """Of all copies."""
        return self.copies[0].scale_layout

    @property
    def n(self) -> int:
        """Rows of the weight."""
        return self.copies[0].n

    @property
    def nbytes(self) -> int:
        """Of codes and scales of the weight."""
        return int(self.n * self.tile.shape[1] + self.scales.nbytes)

    def quantized(self, rows: int) -> tuple[Array, Array, Array]:
        """Codes and scales of the first rows of activations, and the scales of the weight."""
        return self.a[:rows], self.a_scales[:rows], self.scales

    def rows_of_scales(self, rows: slice) -> slice:
        """Where the scales of a block of rows of weights are."""
        return rows if self.scale_layout == "per_row" else slice(rows.start // w8a8.CHUNK, -(-rows.stop // w8a8.CHUNK))

    def decoded(self, n: int) -> Array:
        """Float32 values [n, K] of the first n rows of the weight."""
        values = repeated(self.tile.astype(np.float32), n)
        values *= spread(self.scales[self.rows_of_scales(slice(0, n))], 1 if self.scale_layout == "per_row" else w8a8.CHUNK, n)
        return values

    @cached_property
    def whole(self) -> Array:
        """All of them. Raises NotTimedError when they are too many for the host."""
        nbytes = 4 * self.n * self.tile.shape[1]
        if nbytes > LIMIT_BYTES:
            raise NotTimedError(f"its float32 weights would be {nbytes * 1e-9:.3g} GB; limit {LIMIT_BYTES * 1e-9:.3g} GB")
        return self.decoded(self.n)

    @cached_property
    def exact(self) -> list[tuple[slice, Array, Array]]:
        """CHECKED blocks of columns: which, the exact product with all of the activations, the magnitude of its terms."""
        found = []
        blocks = -(-self.n // w8a8.CHUNK)
        for block in np.unique(np.linspace(0, blocks - 1, CHECKED).astype(int)):
            rows = slice(int(block) * w8a8.CHUNK, min((int(block) + 1) * w8a8.CHUNK, self.n))
            weight = self.tile[np.arange(rows.start, rows.stop) % len(self.tile)], self.scales[self.rows_of_scales(rows)]
            found.append((rows, *reference.gemv(self.a, self.a_scales, [weight], self.scale_layout)))
        return found

    def check(self, got: Array) -> str | None:
        """None, or the worst of the CHECKED blocks of columns of got [M, N], the product with the first M activations."""
        m = len(got)
        for rows, exact, magnitude in self.exact:
            what = f"result[:, {rows.start}:{rows.stop}]"
            wrong = product_mismatch(got[:, rows], exact[:m], magnitude[:m], self.x.shape[1], what)
            if wrong:
                return wrong
        return None


def spread(scales: Array, tile_rows: int, rows: int) -> Array:
    """Factors of codes [rows, K] as [rows, K] or [rows, 1]; tile_rows rows share a scale."""
    tall = np.repeat(scales, tile_rows, axis=0)[:rows]
    return tall[:, None] if scales.ndim == 1 else np.repeat(tall, w8a8.CHUNK, axis=1)


def bound(dev: Device, launches: Sequence[Launch], out: cla.Array) -> w8a8.Prepared:
    """Launches with their arguments set."""
    return w8a8.Prepared(dev, [dev.programs.bind(launch) for launch in launches], out)


def in_turn(dev: Device, prepared: Sequence[w8a8.Prepared], launches: int) -> Enqueue:
    """Enqueues one after the other; the event tells of all launches of one. On CPU drivers wall time does."""
    several = launches > 1 and not dev.capabilities.is_cpu

    def enqueue(i: int) -> Any:
        p = prepared[i % len(prepared)]
        return span(dev, p.enqueue) if several else p.enqueue()

    return enqueue


# ---- quantizers of activations ----


def act_works(dev: Device, spec: Spec) -> list[Work]:
    """`act_quant` and `act_quant_silu` for each scale layout and number of rows. Raises what they raise."""
    works = []
    torch = torch_beside(dev)
    for silu in (False, True):
        most = [sample((max(spec.rows), spec.weight[1]), spec.dtype, seed) for seed in range(1 + silu)]
        for layout in spec.scales:
            for rows in spec.rows:
                works += act_rows_works(dev, spec, [a[:rows] for a in most], layout, torch)
    return works


def act_rows_works(dev: Device, spec: Spec, inputs: Sequence[Array], scale_layout: str, torch: Torch | None) -> list[Work]:
    """One quantizer on x, or gate and up, [rows, K], in each variant."""
    rows, k = inputs[0].shape
    silu = len(inputs) == 2

    def in_numpy() -> tuple[Array, Array]:
        if silu:
            return reference.act_quant_silu(inputs[0], inputs[1], scale_layout)
        return reference.act_quant(inputs[0], scale_layout)

    want = in_numpy()
    moved = sum(a.nbytes for a in inputs) + rows * k
    sets = buffer_sets(dev, moved)
    peers = [numpy_peer(in_numpy, 1.0, lambda: in_numpy)]
    if torch:
        peers.append(torch.act_peer(inputs, k if scale_layout == "per_row" else w8a8.CHUNK, sets))
    on_device = [[cla.to_device(dev.queue, a) for a in inputs] for _ in range(sets)]
    works = []
    for force in spec.variants:
        made = [w8a8.act_launches(dev, arrays, rows, k, scale_layout, None, EPS, force) for arrays in on_device]
        acts, launches = made[0]
        prepared = [bound(dev, launches, acts.codes) for acts, launches in made]

        def check(prepared: w8a8.Prepared = prepared[0], acts: w8a8.Activations = acts) -> str | None:
            spoil(dev, acts.codes)
            spoil(dev, acts.scales)
            prepared.enqueue()
            wrong = (mismatch(a.get(), b, part) for part, a, b in zip(acts._fields, acts, want, strict=True))
            return next((w for w in wrong if w), None)

        works.append(
            Work(
                "act_quant_silu" if silu else "act_quant",
                scale_layout,
                launches[0].plan.variant,
                (rows, k),
                moved + want[1].nbytes,
                rows * k * (QUANTIZING + silu * SILU),
                in_turn(dev, prepared, len(launches)),
                check,
                (copying(moved),),
                tuple(peers),
                rows,
            )
        )
    return works


# ---- products ----


def cases(dev: Device, spec: Spec) -> list[tuple[Case, Callable[[], list[Any]] | None]]:
    """For each scale layout the weight and activations; with per_row torch's weights, to be made when they are wanted."""
    torch = torch_beside(dev)
    found: list[tuple[Case, Callable[[], list[Any]] | None]] = []
    for layout in spec.scales:
        case = Case.of(dev, spec, layout)
        weights = partial(torch.repeated, case.tile, case.n, len(case.copies)) if torch else None
        found.append((case, cache(weights) if weights and layout == "per_row" else None))
    return found


def gemv_works(dev: Device, spec: Spec) -> list[Work]:
    """The GEMV alone, on activations that are quantized already, for each scale layout, number of rows and variant."""
    scratch = w8a8.Scratch.alloc(dev, spec.weight[1])
    torch = torch_beside(dev)
    works = []
    for case, weights in cases(dev, spec):
        for rows in spec.rows:
            peers = [numpy_product(case, rows)]
            if torch and weights:
                peers += torch.product_peers(weights, case.x[:rows], case.quantized(rows))
            works += [gemv_work(dev, spec, case, scratch, rows, tuple(peers), force) for force in spec.variants]
    return works


def numpy_product(case: Case, rows: int, quantize: bool = False) -> Peer:
    """Float32 values of the weights times those of the activations, which may be quantized on the way."""
    n = min(case.n, TILE)
    first = cache(lambda: case.decoded(n))

    def product(weights: Array) -> Array:
        a, scales = case.a[:rows], case.a_scales[:rows]
        if quantize:
            a, scales = reference.act_quant(case.x[:rows], case.scale_layout)
        return np.asarray((a.astype(np.float32) * spread(scales, 1, rows)) @ weights.T)

    return numpy_peer(lambda: product(first()), n / case.n, lambda: partial(product, case.whole))


def gemv_work(
    dev: Device, spec: Spec, case: Case, scratch: w8a8.Scratch, rows: int, peers: tuple[Peer, ...], force: str | None
) -> Work:
    """One product. The activations stay where they are: in a model they have just been written."""
    n, k = spec.weight
    codes, scales = case.a[:rows], case.a_scales[:rows]
    acts = w8a8.Activations(cla.to_device(dev.queue, codes), cla.to_device(dev.queue, scales))
    outs = [cla.empty(dev.queue, (rows, n), FLOAT_DTYPES[spec.dtype]) for _ in case.copies]
    made = [w8a8.gemv_launches(dev, acts, w, c, scratch, force) for w, c in zip(case.copies, outs, strict=True)]
    prepared = [bound(dev, launches, c) for launches, c in zip(made, outs, strict=True)]

    def check() -> str | None:
        spoil(dev, outs[0])
        prepared[0].enqueue()
        return case.check(outs[0].get())

    return Work(
        "gemv",
        case.scale_layout,
        made[0][-1].plan.variant,
        (n, k),
        case.nbytes + codes.nbytes + scales.nbytes + outs[0].nbytes,
        2 * rows * n * k,
        in_turn(dev, prepared, len(made[0])),
        check,
        (reading(n * k),),
        peers,
        rows,
    )


def proj_works(dev: Device, spec: Spec) -> list[Work]:
    """Quantizer and GEMV as a prepared projection, for each scale layout, number of rows and variant, with the host's time."""
    scratch = w8a8.Scratch.alloc(dev, spec.weight[1])
    torch = torch_beside(dev)
    works = []
    for case, weights in cases(dev, spec):
        for rows in spec.rows:
            peers = [numpy_product(case, rows, quantize=True)]
            if torch and weights:
                peers.append(torch.projection_peer(weights, case.x[:rows], case.quantized(rows)))
            works += [proj_work(dev, spec, case, scratch, rows, tuple(peers), force) for force in spec.variants]
    return works


def proj_work(
    dev: Device, spec: Spec, case: Case, scratch: w8a8.Scratch, rows: int, peers: tuple[Peer, ...], force: str | None
) -> Work:
    """One projection x [rows, K] -> [rows, N]."""
    n, k = spec.weight
    layout = case.scale_layout
    x = case.x[:rows]
    on_device = cla.to_device(dev.queue, x)
    outs = [cla.empty(dev.queue, (rows, n), FLOAT_DTYPES[spec.dtype]) for _ in case.copies]
    how: dict[str, Any] = {"scratch": scratch, "force": force}
    prepared = [w8a8.prepare(dev, on_device, w, spec.dtype, out=c, **how) for w, c in zip(case.copies, outs, strict=True)]
    acts = scratch.activations(rows, k, layout)
    gemv = w8a8.gemv_launches(dev, acts, case.copies[0], outs[0], scratch, force)

    def check() -> str | None:
        spoil(dev, outs[0])
        prepared[0].enqueue()
        return case.check(outs[0].get())

    def host(seconds: float) -> dict[str, float]:
        plain = Device(cl.CommandQueue(dev.context, dev.queue.device), dev.capabilities)  # profiling costs the host too
        w, c = case.copies[0], outs[0]
        again = w8a8.prepare(plain, on_device, w, spec.dtype, out=c, **how)
        return {
            "enqueue": host_seconds(plain.queue, again.enqueue, seconds),
            "proj": host_seconds(plain.queue, lambda: w8a8.proj(plain, on_device, w, spec.dtype, out=c, **how), seconds),
        }

    return Work(
        "proj",
        layout,
        gemv[-1].plan.variant,
        (n, k),
        case.nbytes + x.nbytes + 2 * (acts.codes.nbytes + acts.scales.nbytes) + outs[0].nbytes,
        2 * rows * n * k + QUANTIZING * x.size,
        in_turn(dev, prepared, 1 + len(gemv)),
        check,
        (reading(n * k),),
        peers,
        rows,
        host,
    )


def host_seconds(queue: cl.CommandQueue, call: Callable[[], object], seconds: float, least: int = 5, most: int = 200) -> float:
    """Median seconds until `call` returns, its commands having been waited for outside of that. See `median_seconds`."""
    call()
    queue.finish()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < least or (time.perf_counter() < end and len(times) < most):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
        queue.finish()
    return statistics.median(times)
