"""The same operations in NumPy and in torch, timed beside ours in the same run.

NumPy runs on the host, whatever the device. Torch, where it is installed, runs on the CPU beside a CPU driver and on the same
GPU beside a GPU's. What cannot run, or would take too long, has a reason instead of a figure.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from pyclquant.device import Device
from pyclquant.formats import EPS, Format
from pyclquant.testing import median_seconds

if TYPE_CHECKING:
    from pyclquant.bench_work import Spec

Array = np.ndarray[Any, Any]
Timer = Callable[[float], float]
"""Measures for so many seconds: median seconds of a run."""

LIMIT = 2.0
"""Seconds: what would take longer for one run is not run."""
LIMIT_BYTES = 2 << 30
"""Host memory for the decoded weights of a product in NumPy."""
COMPILING = 40.0
"""Seconds that all calls of torch.compile of a process may take together; what comes after is timed as it is."""


class NotTimedError(Exception):
    """Why a peer has no figure."""


@dataclass(frozen=True, eq=False)
class Peer:
    """An operation of another library. name: for tables.

    prepare: gives how it runs, "" where there is one way, and the timer; raises NotTimedError or what the library does.
    takes_turns: whether it is timed in the rounds, beside ours; else once, after them: on the host, for long.
    """

    name: str
    prepare: Callable[[], tuple[str, Timer]]
    takes_turns: bool = True


# ---- NumPy ----


def numpy_peer(part: Callable[[], object], share: float, make: Callable[[], Callable[[], object]]) -> Peer:
    """NumPy's, on all of the output, unless `part`, which is `share` of it, tells that a run would take too long.

    make: what a run needs, and gives the run.
    """

    def once(run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def prepare() -> tuple[str, Timer]:
        part()
        expected = min(once(part) for _ in range(2)) / share
        if expected > LIMIT:
            raise NotTimedError(f"one run would take {expected:.2g} s, by the time of {share:.2%} of it; limit {LIMIT:g} s")
        return "", partial(timer, make())

    def timer(whole: Callable[[], object], seconds: float) -> float:
        times = [once(whole)]
        end = time.perf_counter() + seconds
        while len(times) < 5 and time.perf_counter() < end:
            times.append(once(whole))
        return statistics.median(times)

    return Peer("NumPy", prepare, takes_turns=False)


# ---- torch ----


def torch_beside(dev: Device) -> Torch | None:
    """Torch on the same device: on the host for a CPU driver; None without torch, or where it does not see the GPU."""
    if find_spec("torch") is None:
        return None
    if dev.capabilities.is_cpu:
        return torch_on("cpu")
    if "nvidia" not in str(dev.capabilities.reported.get("vendor")).lower():
        return None
    cuda = import_module("torch").cuda
    count = cuda.device_count() if cuda.is_available() else 0
    name = dev.capabilities.reported.get("name")
    index = next((i for i in range(count) if cuda.get_device_name(i) == name), None)
    return None if index is None else torch_on(f"cuda:{index}")


@cache
def torch_on(device: str) -> Torch:
    """One for the process, whose time for compiling counts in all."""
    return Torch(import_module("torch"), device)


class Torch:
    """Torch's own way to do our operations. device: cpu, or cuda:N."""

    BATCH = 10
    """Runs that are enqueued together on a GPU."""
    SLEEP = 4_000_000
    """Cycles for which the GPU waits meanwhile, so that the host's own time lies outside: about two milliseconds."""

    def __init__(self, torch: Any, device: str) -> None:
        self.torch, self.device = torch, device
        self.compiling = 0.0

    # -- data --

    def tensor(self, a: Array) -> Any:
        """A NumPy array, of ml_dtypes too, on the device."""
        torch = self.torch
        same = {"bfloat16": (np.uint16, torch.bfloat16), "float8_e4m3fn": (np.uint8, torch.float8_e4m3fn)}.get(a.dtype.name)
        if same is None:
            return torch.from_numpy(np.ascontiguousarray(a)).to(self.device)
        return torch.from_numpy(np.ascontiguousarray(a).view(same[0])).to(self.device).view(same[1])

    def repeated(self, tile: Array, rows: int, copies: int) -> list[Any]:
        """`tile` repeated along the first axis up to `rows`, so many times."""
        one = self.tensor(tile)
        bits = one.view(self.torch.uint8) if one.dtype == self.torch.float8_e4m3fn else one  # repeat knows no FP8
        turns = -(-rows // len(tile)), *[1] * (bits.ndim - 1)
        return [bits.repeat(turns)[:rows].view(one.dtype) for _ in range(copies)]

    # -- time --

    def finish(self) -> None:
        """Wait for the device."""
        if self.device != "cpu":
            self.torch.cuda.synchronize(self.device)

    def timer(self, run: Callable[[int], object]) -> Timer:
        """Times run(i), which has been called once. Raises NotTimedError when one run takes longer than LIMIT."""
        run(0)
        self.finish()
        start = time.perf_counter()
        run(1)
        self.finish()
        took = time.perf_counter() - start
        if took > LIMIT:
            raise NotTimedError(f"one run takes {took:.3g} s; limit {LIMIT:g} s")
        if self.device == "cpu":
            return lambda seconds: median_seconds(run, seconds, least=1)
        return lambda seconds: self.device_seconds(run, seconds)

    def device_seconds(self, run: Callable[[int], object], seconds: float, least: int = 5, most: int = 200) -> float:
        """Median seconds between events around run(i)."""
        cuda = self.torch.cuda
        times: list[float] = []
        end = time.perf_counter() + seconds
        with cuda.device(self.device):
            while len(times) < least or (time.perf_counter() < end and len(times) < most):
                cuda._sleep(self.SLEEP)
                events = []
                for i in range(self.BATCH):
                    begin, done = (cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    run(len(times) + i)
                    done.record()
                    events.append((begin, done))
                cuda.synchronize()
                times += [begin.elapsed_time(done) * 1e-3 for begin, done in events]
        return statistics.median(times)

    def compiled(self, function: Callable[..., Any], *example: Any) -> tuple[str, Callable[..., Any]]:
        """How it runs, and the function: by torch.compile, or as it is when that fails or the time for compiling is spent."""
        if self.compiling > COMPILING:
            return "eager", function
        start = time.perf_counter()
        try:
            config = import_module("torch._dynamo").config
            config.recompile_limit = config.accumulated_recompile_limit = 1000  # each operation is one more of the same code
            fast = self.torch.compile(function, dynamic=False)
            with self.torch.inference_mode():
                fast(*example)
            self.finish()
        except Exception:  # of the compiler, the C++ compiler, Triton: torch's own affair
            return "eager", function
        finally:
            self.compiling += time.perf_counter() - start
        return "compiled", fast

    def quantizer(self, name: str, function: Callable[..., Any], inputs: Callable[[], Sequence[tuple[Any, ...]]]) -> Peer:
        """A peer that runs `function` on each of the inputs in turn."""

        def prepare() -> tuple[str, Timer]:
            sets = inputs()
            how, run = self.compiled(function, *sets[0])

            def in_turn(i: int) -> None:
                with self.torch.inference_mode():
                    run(*sets[i % len(sets)])

            return how, self.timer(in_turn)

        return Peer(name, prepare)

    # -- the quantizers --

    def symmetric(self, x: Any, largest: float, dtype: Any) -> tuple[Any, Any]:
        """Codes and scales of x [..., block]."""
        torch = self.torch
        v = x.float()
        scale = (v.abs().amax(-1, keepdim=True) / largest).clamp(min=EPS)
        codes = v / scale
        codes = codes if dtype.is_floating_point else torch.round(codes)
        return codes.clamp(-largest, largest).to(dtype), scale

    def asymmetric(self, x: Any) -> tuple[Any, Any, Any]:
        """INT4: two codes a byte, scales and mins of x [blocks, block]."""
        torch = self.torch
        v = x.float()
        lo, hi = v.amin(-1, keepdim=True), v.amax(-1, keepdim=True)
        scale = (hi - lo) / 15
        codes = torch.round((v - lo) / scale.clamp(min=EPS)).clamp(0, 15).to(torch.uint8)
        return codes[:, 0::2] | (codes[:, 1::2] << 4), scale, lo

    def kv_peers(self, fmt: Format, block: int, spec: Spec, tensors: Callable[[], list[Any]]) -> tuple[Peer, Peer]:
        """Quantize and dequantize for K/V. block: elements that share a scale.  tensors: [*shape]."""
        torch = self.torch
        dtype = getattr(torch, {"int8": "int8"}.get(fmt.name, fmt.name.replace("fp8", "float8")), None)
        to = getattr(torch, spec.dtype)

        def blocks() -> list[Any]:
            if spec.shape[-1] % block and block % spec.shape[-1]:
                raise NotTimedError(f"groups of {block} cut rows of {spec.shape[-1]} into unequal parts")
            return [x.reshape(-1, block) for x in tensors()]

        def quantize(x: Any) -> Any:
            return self.asymmetric(x) if fmt.asymmetric else self.symmetric(x, fmt.largest, dtype)

        def dequantize(codes: Any, scales: Any, *mins: Any) -> Any:
            if mins:
                pairs = torch.stack([codes & 15, codes >> 4], dim=-1).reshape(len(codes), -1)
                return (pairs.float() * scales + mins[0]).to(to)
            return (codes.float() * scales).to(to)

        return (
            self.quantizer("torch", quantize, lambda: [(x,) for x in blocks()]),
            self.quantizer("torch", dequantize, lambda: [quantize(x) for x in blocks()]),
        )

    def act_quantize(self, block: int, x: Any, *up: Any) -> tuple[Any, Any]:
        """Codes [M, K] and scales [M, K / block] of x, or of SiLU(x) · up, [M, K]."""
        torch = self.torch
        if up:
            x = (torch.nn.functional.silu(x.float()) * up[0].float()).to(torch.bfloat16)
        codes, scales = self.symmetric(x.reshape(len(x), -1, block), 448.0, torch.float8_e4m3fn)
        return codes.reshape(x.shape), scales.squeeze(-1)

    def act_peer(self, inputs: Sequence[Array], block: int, copies: int) -> Peer:
        """The quantizer of activations. inputs: x, or gate and up."""

        def sets() -> list[tuple[Any, ...]]:
            made = [self.repeated(a, len(a), copies) for a in inputs]
            return list(zip(*made, strict=True))

        return self.quantizer("torch", lambda x, *up: self.act_quantize(block, x, *up), sets)

    # -- the products --

    def product_peers(self, weights: Callable[[], list[Any]], x: Array, quantized: tuple[Array, Array, Array]) -> list[Peer]:
        """`_scaled_mm` with a scale for each row, and the product in bfloat16, both with bfloat16 out.

        weights: codes [N, K] as e4m3fn, in several copies.  x: [M, K].  quantized: its codes [M, K], their scales [M], the
        weight's scales [N].
        """

        def scaled() -> tuple[str, Timer]:
            rows, run = self.scaled_mm(weights(), *quantized)
            return "" if rows == len(x) else f"with {rows} rows", self.timer(run)

        return [
            Peer("torch fp8", scaled),
            Peer("torch bf16", lambda: ("", self.timer(self.bfloat16_mm(weights(), x)))),
        ]

    def projection_peer(self, weights: Callable[[], list[Any]], x: Array, quantized: tuple[Array, Array, Array]) -> Peer:
        """The row-wise quantizer, then `_scaled_mm`. Arguments as of `product_peers`."""

        def prepare() -> tuple[str, Timer]:
            rows, product = self.scaled_mm(weights(), *quantized)
            a = self.tensor(padded(x, rows))
            how, quantize = self.compiled(lambda x: self.act_quantize(x.shape[1], x), a)

            def run(i: int) -> None:
                with self.torch.inference_mode():
                    product(i, *quantize(a))

            return how + ("" if rows == len(x) else f", with {rows} rows"), self.timer(run)

        return Peer("torch fp8", prepare)

    def scaled_mm(self, weights: list[Any], codes: Array, scales: Array, row_scales: Array) -> tuple[int, Callable[..., None]]:
        """How many rows, and the product of run i, of given codes [rows, K] and scales [rows, 1] or else of these.

        Some releases take rows in sixteens alone: zeros are added then. Raises RuntimeError when torch refuses the shape.
        """
        torch = self.torch
        b_scales = [self.tensor(row_scales)[None, :] for _ in weights]

        def bound(rows: int) -> Callable[..., None]:
            own = self.tensor(padded(codes, rows)), self.tensor(padded(scales, rows))[:, None]

            def run(i: int, a: Any = own[0], a_scales: Any = own[1]) -> None:
                n = i % len(weights)
                torch._scaled_mm(a, weights[n].t(), scale_a=a_scales, scale_b=b_scales[n], out_dtype=torch.bfloat16)

            run(0)
            return run

        rows = len(codes)
        try:
            return rows, bound(rows)
        except RuntimeError:
            rows += -rows % 16
            return rows, bound(rows)

    def bfloat16_mm(self, weights: list[Any], x: Array) -> Callable[[int], None]:
        """The product of run i, whose weights are twice the bytes."""
        torch = self.torch
        a = self.tensor(x).to(torch.bfloat16)
        wide = [w.to(torch.bfloat16) for w in weights[: max(2, len(weights) // 2)]]

        def run(i: int) -> None:
            torch.mm(a, wide[i % len(wide)].t())

        return run


def padded(a: Array, rows: int) -> Array:
    """`a` with zeros behind it up to so many rows."""
    return np.concatenate([a, np.zeros((rows - len(a), *a.shape[1:]), a.dtype)])
