"""The W8A8 operations for the bench: quantizers of activations, the GEMV alone, the whole projection, and torch beside them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import pyopencl as cl
import pyopencl.array as cla

from pyclquant import reference, w8a8
from pyclquant.arrays import on_host
from pyclquant.bench_work import Array, Spec, Timer, Work, check_memory, repeated, sample
from pyclquant.device import Device
from pyclquant.floor import Enqueue, buffer_sets, copying, reading, span
from pyclquant.formats import EPS, FLOAT_DTYPES
from pyclquant.program import Launch
from pyclquant.testing import mismatch, product_mismatch

TILE = 1021
"""Rows of random weights; they repeat to the end. A prime, so that a row read from a wrong place shows."""
CHECKED = 8
"""Blocks of 128 columns of a product that are compared with the reference: the first, the last and some between."""
IN_NUMPY = 1024
"""Columns of a product for which NumPy is timed."""


@dataclass(frozen=True)
class Rotated:
    """A weight [N, K] in as many buffers as it takes to leave the caches. codes, scales: the same on the host."""

    copies: tuple[w8a8.Weight, ...]
    codes: Array
    scales: Array

    @staticmethod
    def of(dev: Device, spec: Spec, scale_layout: str) -> Rotated:
        """Random, quantized on the device. Raises ShapeError, DTypeError as `w8a8.quantize_weight`, or when it is too large."""
        n, k = spec.weight
        check_memory(dev, n * k, "weight")
        w = repeated(sample((min(n, TILE), k), "bfloat16"), n)
        codes, scales = (on_host(a) for a in w8a8.quantize_weight(dev, w, scale_layout))
        sets = buffer_sets(dev, codes.nbytes + scales.nbytes)
        return Rotated(tuple(w8a8.Weight(dev, [(codes, scales)]) for _ in range(sets)), codes, scales)

    @property
    def scale_layout(self) -> str:
        """Of all copies."""
        return self.copies[0].scale_layout

    @cached_property
    def decoded(self) -> Array:
        """The first IN_NUMPY rows as float32 [n, K]."""
        codes = self.codes[:IN_NUMPY]
        return decoded(codes, self.scales, 1 if self.scale_layout == "per_row" else w8a8.CHUNK)

    def check(self, codes: Array, scales: Array, got: Array) -> str | None:
        """None, or the worst of the CHECKED blocks of columns of got [M, N], the product with activations on the host."""
        blocks = -(-len(self.codes) // w8a8.CHUNK)
        for block in np.unique(np.linspace(0, blocks - 1, CHECKED).astype(int)):
            rows = slice(block * w8a8.CHUNK, min((block + 1) * w8a8.CHUNK, len(self.codes)))
            w_scales = self.scales[rows if self.scale_layout == "per_row" else slice(block, block + 1)]
            exact, magnitude = reference.gemv(codes, scales, [(self.codes[rows], w_scales)], self.scale_layout)
            wrong = product_mismatch(got[:, rows], exact, magnitude, codes.shape[1], f"result[:, {rows.start}:{rows.stop}]")
            if wrong:
                return wrong
        return None


def decoded(codes: Array, scales: Array, tile_rows: int) -> Array:
    """Float32 values of codes [rows, K]; tile_rows rows share a scale."""
    values = codes.astype(np.float32)
    tall = np.repeat(scales, tile_rows, axis=0)[: len(codes)]
    values *= tall[:, None] if scales.ndim == 1 else np.repeat(tall, w8a8.CHUNK, axis=1)
    return values


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
    return [act_work(dev, spec, silu, layout, rows) for silu in (False, True) for layout in spec.scales for rows in spec.rows]


def act_work(dev: Device, spec: Spec, silu: bool, scale_layout: str, rows: int) -> Work:
    """One quantizer on x, or gate and up, [rows, K]."""
    k = spec.weight[1]
    inputs = [sample((rows, k), spec.dtype, seed) for seed in range(1 + silu)]

    def in_numpy() -> tuple[Array, Array]:
        if silu:
            return reference.act_quant_silu(inputs[0], inputs[1], scale_layout)
        return reference.act_quant(inputs[0], scale_layout)

    want = in_numpy()
    moved = sum(a.nbytes for a in inputs) + rows * k
    made = []
    for _ in range(buffer_sets(dev, moved)):
        on_device = [cla.to_device(dev.queue, a) for a in inputs]
        made.append(w8a8.act_launches(dev, on_device, rows, k, scale_layout, None, EPS, spec.variant))
    prepared = [bound(dev, launches, acts.codes) for acts, launches in made]
    acts, launches = made[0]

    def check() -> str | None:
        prepared[0].enqueue()
        wrong = (mismatch(a.get(), b, part) for part, a, b in zip(acts._fields, acts, want, strict=True))
        return next((w for w in wrong if w), None)

    return Work(
        "act_quant_silu" if silu else "act_quant",
        scale_layout,
        launches[0].plan.variant,
        (rows, k),
        moved + want[1].nbytes,
        in_turn(dev, prepared, len(launches)),
        check,
        (copying(moved),),
        in_numpy,
        rows=rows,
    )


# ---- products ----


def gemv_works(dev: Device, spec: Spec) -> list[Work]:
    """The GEMV alone, on activations that are quantized already, for each scale layout and number of rows."""
    scratch = w8a8.Scratch.alloc(dev, spec.weight[1])
    works = []
    for layout in spec.scales:
        weights = Rotated.of(dev, spec, layout)
        peer = torch_beside(dev, weights) if layout == "per_row" else None
        works += [gemv_work(dev, spec, weights, scratch, rows, peer) for rows in spec.rows]
    return works


def gemv_work(dev: Device, spec: Spec, weights: Rotated, scratch: w8a8.Scratch, rows: int, peer: Torch | None) -> Work:
    """One product. The activations stay where they are: in a model they have just been written."""
    n, k = spec.weight
    codes, scales = reference.act_quant(sample((rows, k), spec.dtype), weights.scale_layout)
    acts = w8a8.Activations(cla.to_device(dev.queue, codes), cla.to_device(dev.queue, scales))
    outs = [cla.empty(dev.queue, (rows, n), FLOAT_DTYPES[spec.dtype]) for _ in weights.copies]
    made = [w8a8.gemv_launches(dev, acts, w, c, scratch, spec.variant) for w, c in zip(weights.copies, outs, strict=True)]
    prepared = [bound(dev, launches, c) for launches, c in zip(made, outs, strict=True)]
    a = decoded(codes, scales, 1)

    def check() -> str | None:
        prepared[0].enqueue()
        return weights.check(codes, scales, outs[0].get())

    return Work(
        "gemv",
        weights.scale_layout,
        made[0][-1].plan.variant,
        (n, k),
        weights.codes.nbytes + weights.scales.nbytes + codes.nbytes + scales.nbytes + outs[0].nbytes,
        in_turn(dev, prepared, len(made[0])),
        check,
        (reading(n * k),),
        lambda: a @ weights.decoded.T,
        len(weights.decoded) / n,
        rows,
        peer.timer(codes, scales) if peer else None,
    )


def proj_works(dev: Device, spec: Spec) -> list[Work]:
    """Quantizer and GEMV as a prepared projection, for each scale layout and number of rows, with the host's time for it."""
    scratch = w8a8.Scratch.alloc(dev, spec.weight[1])
    works = []
    for layout in spec.scales:
        weights = Rotated.of(dev, spec, layout)
        works += [proj_work(dev, spec, weights, scratch, rows) for rows in spec.rows]
    return works


def proj_work(dev: Device, spec: Spec, weights: Rotated, scratch: w8a8.Scratch, rows: int) -> Work:
    """One projection x [rows, K] -> [rows, N]."""
    n, k = spec.weight
    layout = weights.scale_layout
    x = sample((rows, k), spec.dtype)
    on_device = cla.to_device(dev.queue, x)
    outs = [cla.empty(dev.queue, (rows, n), FLOAT_DTYPES[spec.dtype]) for _ in weights.copies]
    how: dict[str, Any] = {"scratch": scratch, "force": spec.variant}
    prepared = [w8a8.prepare(dev, on_device, w, spec.dtype, out=c, **how) for w, c in zip(weights.copies, outs, strict=True)]
    acts = scratch.activations(rows, k, layout)
    gemv = w8a8.gemv_launches(dev, acts, weights.copies[0], outs[0], scratch, spec.variant)

    def check() -> str | None:
        prepared[0].enqueue()
        return weights.check(*reference.act_quant(x, layout), outs[0].get())

    def host(seconds: float) -> dict[str, float]:
        plain = Device(cl.CommandQueue(dev.context, dev.queue.device), dev.capabilities)  # profiling costs the host too
        w, c = weights.copies[0], outs[0]
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
        weights.codes.nbytes + weights.scales.nbytes + x.nbytes + 2 * (acts.codes.nbytes + acts.scales.nbytes) + outs[0].nbytes,
        in_turn(dev, prepared, 1 + len(gemv)),
        check,
        (reading(n * k),),
        rows=rows,
        host=host,
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


# ---- torch ----


def torch_beside(dev: Device, weights: Rotated) -> Torch | None:
    """Torch's product of the same weights on the same GPU; None without torch or CUDA, or on another device."""
    if "nvidia" not in str(dev.capabilities.reported.get("vendor")).lower() or find_spec("torch") is None:
        return None
    torch = import_module("torch")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = dev.capabilities.reported.get("name")
    index = next((i for i in range(count) if torch.cuda.get_device_name(i) == name), None)
    return None if index is None else Torch(torch, f"cuda:{index}", weights)


class Torch:
    """`torch._scaled_mm` with a scale for each row, bfloat16 out, over as many copies of the weights as ours."""

    BATCH = 20
    """Runs that are enqueued together."""
    SLEEP = 4_000_000
    """Cycles for which the GPU waits meanwhile, so that the host's own time lies outside: about two milliseconds."""

    def __init__(self, torch: Any, device: str, weights: Rotated) -> None:
        self.torch, self.device = torch, device
        codes = self.e4m3(weights.codes)
        scales = torch.from_numpy(weights.scales).to(device)[None, :]
        self.weights = [(codes.clone().t(), scales.clone()) for _ in weights.copies]

    def e4m3(self, codes: Array) -> Any:
        """Codes as a tensor."""
        return self.torch.from_numpy(codes.view(np.uint8)).to(self.device).view(self.torch.float8_e4m3fn)

    def timer(self, codes: Array, scales: Array) -> Timer:
        """Times the product with activations codes [M, K] and scales [M]; more rows of zeros where torch refuses M."""
        rows = len(codes)
        try:
            return self.timer_of(codes, scales)
        except RuntimeError:
            more = -rows % 16
            return self.timer_of(np.pad(codes.view(np.uint8), ((0, more), (0, 0))), np.pad(scales, (0, more)))

    def timer_of(self, codes: Array, scales: Array) -> Timer:
        """Raises RuntimeError when torch refuses the shape."""
        torch = self.torch
        a, a_scales = self.e4m3(codes), torch.from_numpy(scales).to(self.device)[:, None]

        def run(i: int) -> None:
            w, w_scales = self.weights[i % len(self.weights)]
            torch._scaled_mm(a, w, scale_a=a_scales, scale_b=w_scales, out_dtype=torch.bfloat16)

        def seconds_of(seconds: float, least: int = 5, most: int = 200) -> float:
            times: list[float] = []
            end = time.perf_counter() + seconds
            with torch.cuda.device(self.device):
                while len(times) < least or (time.perf_counter() < end and len(times) < most):
                    torch.cuda._sleep(self.SLEEP)
                    events = []
                    for i in range(self.BATCH):
                        begin, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                        begin.record()
                        run(len(times) + i)
                        done.record()
                        events.append((begin, done))
                    torch.cuda.synchronize()
                    times += [begin.elapsed_time(done) * 1e-3 for begin, done in events]
            return statistics.median(times)

        run(0)
        torch.cuda.synchronize(self.device)
        return seconds_of
