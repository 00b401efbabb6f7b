"""What a bench measures: a choice (`Spec`), and the operations that it means, ready to run (`Work`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyclquant.device import Device
from pyclquant.errors import ShapeError
from pyclquant.floor import Enqueue, Plain
from pyclquant.formats import DEFAULT_GROUP_SIZE, FLOAT_DTYPES, FORMATS, Format
from pyclquant.w8a8 import SCALE_LAYOUTS

Array = np.ndarray[Any, Any]
Timer = Callable[[float], float]
"""Measures for so many seconds: median seconds of a run."""


@dataclass(frozen=True)
class Spec:
    """What to measure. dtype: of the float side.  variant: forced, or None.

    K/V: shape is [rows, dim] or [tokens, heads, dim].  granularity: None is per_head; int4 is per_group whatever it
    says.  group_size: for per_group.
    W8A8: weight is (N, K); the quantizers take K alone.  rows: of activations, 1 to 256, one measurement for each.
    scales: layouts.
    """

    shape: tuple[int, ...]
    formats: tuple[str, ...] = tuple(FORMATS)
    dtype: str = "bfloat16"
    granularity: str | None = None
    group_size: int = DEFAULT_GROUP_SIZE
    variant: str | None = None
    weight: tuple[int, int] = (8192, 8192)
    rows: tuple[int, ...] = (1, 8, 32)
    scales: tuple[str, ...] = SCALE_LAYOUTS

    def blocks(self, fmt: Format) -> dict[str, Any]:
        """Keywords granularity and group_size of a format."""
        return block_options(fmt, self.granularity, self.group_size)


@dataclass(frozen=True)
class Work:
    """One operation on one format or scale layout, ready to run. nbytes: read and written by a run.

    shape: of the tensor; (M, K) of a quantizer of activations, (N, K) of a projection.  rows: M, None for K/V.
    check: None, or the first difference from the reference.  floors: what is measured beside it; it is compared with the
    first.  reference: the same in NumPy, on `reference_share` of the output; None where it would tell nothing new.
    torch: times torch's own.  host: measures for so many seconds and gives the host's median seconds in each kind of call.
    """

    op: str
    format: str
    variant: str
    shape: tuple[int, ...]
    nbytes: int
    enqueue: Enqueue
    check: Callable[[], str | None]
    floors: tuple[Plain, ...]
    reference: Callable[[], object] | None = None
    reference_share: float = 1.0
    rows: int | None = None
    torch: Timer | None = None
    host: Callable[[float], dict[str, float]] | None = None

    @property
    def name(self) -> str:
        """Operation, format or scale layout, and rows: no other work of a run has it."""
        return f"{self.op} {self.format}" + (f" M={self.rows}" if self.rows else "")


def block_options(fmt: Format, granularity: str | None, group_size: int) -> dict[str, Any]:
    """Keywords granularity and group_size for `kv` and `reference`: what a choice for several formats means for one."""
    granularity = "per_group" if fmt.asymmetric else granularity or "per_head"
    return {"granularity": granularity, "group_size": group_size if granularity == "per_group" else None}


def check_memory(dev: Device, nbytes: int, what: str) -> None:
    """Raises ShapeError when `what` takes more of the device's memory than a bench, which holds several, may."""
    most = int(dev.capabilities.reported.get("global_mem_size") or 0) // 16
    if most and nbytes > most:
        raise ShapeError(f"shape: expected a {what} of at most {most} bytes (1/16 of the memory), got {nbytes} bytes")


def sample(shape: tuple[int, ...], dtype: str, seed: int = 1) -> Array:
    """Random values of one of FLOAT_DTYPES: normal, with a few outliers."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape, dtype=np.float32)
    x[rng.random(shape, dtype=np.float32) < 0.001] *= 20
    return x.astype(FLOAT_DTYPES[dtype])


def repeated(tile: Array, rows: int) -> Array:
    """`tile` repeated along the first axis up to `rows`."""
    return np.concatenate([tile] * (rows // len(tile)) + [tile[: rows % len(tile)]])
