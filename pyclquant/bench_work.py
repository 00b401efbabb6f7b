"""What a bench measures: a choice (`Spec`), and the operations that it means, ready to run (`Work`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyopencl as cl
import pyopencl.array as cla

from pyclquant.bench_peers import Peer
from pyclquant.device import Device
from pyclquant.errors import ShapeError
from pyclquant.floor import Enqueue, Plain
from pyclquant.formats import DEFAULT_GROUP_SIZE, FLOAT_DTYPES, FORMATS, Format
from pyclquant.w8a8 import SCALE_LAYOUTS

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Spec:
    """What to measure. dtype: of the float side.  variants: forced, each in turn; None lets the device choose.

    K/V: shape is [rows, dim] or [tokens, heads, dim].  granularity: None is per_head; int4 is per_group whatever it
    says.  group_size: for per_group.
    W8A8: weight is (N, K); the quantizers take K alone.  rows: of activations, 1 to 256, one measurement for each.
    scales: layouts.
    """

    shape: tuple[int, ...] = (1, 1)
    formats: tuple[str, ...] = tuple(FORMATS)
    dtype: str = "bfloat16"
    granularity: str | None = None
    group_size: int = DEFAULT_GROUP_SIZE
    variants: tuple[str | None, ...] = (None,)
    weight: tuple[int, int] = (8192, 8192)
    rows: tuple[int, ...] = (1, 8, 32)
    scales: tuple[str, ...] = SCALE_LAYOUTS

    def blocks(self, fmt: Format) -> dict[str, Any]:
        """Keywords granularity and group_size of a format."""
        return block_options(fmt, self.granularity, self.group_size)


@dataclass(frozen=True)
class Work:
    """One operation on one format or scale layout, ready to run. nbytes: read and written by a run.

    operations: of its arithmetic as `reference` writes it down: products, sums, comparisons, divisions, roundings.
    shape: of the tensor; (M, K) of a quantizer of activations, (N, K) of a projection.  rows: M, None for K/V.
    check: None, or the first difference from the reference.  floors: what is measured beside it; it is compared with the
    first.  peers: the same by other libraries; works that are the same to them share theirs.
    host: measures for so many seconds and gives the host's median seconds in each kind of call.
    """

    op: str
    format: str
    variant: str
    shape: tuple[int, ...]
    nbytes: int
    operations: int
    enqueue: Enqueue
    check: Callable[[], str | None]
    floors: tuple[Plain, ...]
    peers: tuple[Peer, ...] = ()
    rows: int | None = None
    host: Callable[[float], dict[str, float]] | None = None

    @property
    def name(self) -> str:
        """Operation, format or scale layout, variant, shape and rows: no other work of a run has it."""
        rows = f" M={self.rows}" if self.rows else ""
        return f"{self.op} {self.format} {self.variant} {'×'.join(map(str, self.shape))}{rows}"


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


def repeated_on_device(dev: Device, tile: Array, rows: int) -> cla.Array:
    """`repeated` there: only the tile travels, what there is already is copied behind itself."""
    out = cla.empty(dev.queue, (rows, *tile.shape[1:]), tile.dtype)
    row = tile.nbytes // len(tile)
    done = min(rows, len(tile))
    buffer: Any = out.base_data
    cl.enqueue_copy(dev.queue, buffer, np.ascontiguousarray(tile[:done]))
    while done < rows:
        more = min(done, rows - done)  # done is a multiple of the tile's rows
        cl.enqueue_copy(dev.queue, buffer, buffer, byte_count=more * row, dst_offset=done * row)
        done += more
    dev.queue.finish()
    return out


def spoil(dev: Device, a: Any) -> None:
    """Overwrite an output, a pyopencl array: memory of an earlier run may hold what is right."""
    cl.enqueue_fill_buffer(dev.queue, a.base_data, np.uint8(0xA5), 0, a.nbytes)
