"""The storage formats and scale granularities, as data.

A new format is one row of `FORMATS`, one branch in `cl/format.h` and one in `reference.py`.
Source: OCP 8-bit Floating Point Specification 1.0 for the FP8 formats.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any

import ml_dtypes
import numpy as np

from pyclquant.errors import DTypeError, ShapeError

EPS = 1e-12
"""Default floor of a scale of a symmetric format."""

MIN_EPS = 2.0**-100
"""Smallest floor taken: below it a scale could be subnormal, which some devices flush."""

DEFAULT_GROUP_SIZE = 64


@dataclass(frozen=True)
class Format:
    """A storage format.

    name: the name in the API, in files and, in capitals, of the macro in `cl/format.h`
    bits: bits of one code
    largest: magnitude of the largest code; the range of the codes 0..largest for int4
    codes_dtype: NumPy dtype of the array of codes; int4 packs two into a byte
    """

    name: str
    bits: int
    largest: float
    codes_dtype: np.dtype[Any]

    @property
    def pack(self) -> int:
        """Codes in a byte."""
        return 8 // self.bits

    @property
    def asymmetric(self) -> bool:
        """Whether a block has a minimum beside its scale."""
        return self.name == "int4"

    @property
    def macro(self) -> str:
        """Value of the macro FORMAT in the kernels."""
        return self.name.upper()

    def row_bytes(self, dim: int) -> int:
        """Bytes of the codes of one row of `dim` elements."""
        return -(-dim // self.pack)


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("fp8_e4m3fn", 8, 448.0, np.dtype(ml_dtypes.float8_e4m3fn)),
        Format("fp8_e5m2", 8, 57344.0, np.dtype(ml_dtypes.float8_e5m2)),
        Format("int8", 8, 127.0, np.dtype(np.int8)),
        Format("int4", 4, 15.0, np.dtype(np.uint8)),
    )
}

FLOAT_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
FLOAT_MACROS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
SCALE_DTYPES = ("float32", "float16")

GRANULARITIES = ("per_tensor", "per_token", "per_head", "per_group")


def get_format(name: str | Format) -> Format:
    """The format called `name`. Raises DTypeError, also for names that are close but other formats."""
    if isinstance(name, Format):
        return name
    if name in FORMATS:
        return FORMATS[name]
    hint = ""
    if "fnuz" in str(name):
        hint = "; the fnuz formats have another bias and another NaN, their codes must be converted first"
    elif str(name) in ("fp8", "float8"):
        hint = "; say which FP8"
    raise DTypeError(f"format: expected one of {', '.join(FORMATS)}, got {name!r}{hint}")


def float_dtype(dtype: object, what: str = "dtype", names: tuple[str, ...] = tuple(FLOAT_DTYPES)) -> str:
    """Name of a floating dtype given as name or dtype; raises DTypeError when it is not in `names`."""
    try:
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name  # type: ignore[call-overload]
    except TypeError:
        name = repr(dtype)
    if name not in names:
        raise DTypeError(f"{what}: expected {', '.join(names)}, got {name}")
    return str(name)


@dataclass(frozen=True)
class Layout:
    """How a tensor is cut into blocks that share a scale.

    The tensor is seen as `rows` rows of `dim` consecutive elements; each row is cut into
    `blocks_per_row` blocks of `block` elements, the last of which may be shorter.
    scales_shape: shape of the scales (and mins)
    codes_shape: shape of the codes; int4 halves the innermost axis, rounded up
    """

    rows: int
    dim: int
    block: int
    scales_shape: tuple[int, ...]
    codes_shape: tuple[int, ...]

    @property
    def blocks_per_row(self) -> int:
        """Blocks in a row."""
        return -(-self.dim // self.block) if self.block else 0

    @property
    def blocks(self) -> int:
        """Blocks in the tensor."""
        return self.rows * self.blocks_per_row

    @staticmethod
    def of(shape: tuple[int, ...], fmt: Format, granularity: str | None, group_size: int | None) -> Layout:
        """Layout of a tensor of `shape`: any leading axes, then the head axis if there are three or
        more, then head_dim.

        per_tensor: scales [1].  per_token: one a row of the last two axes (heads, head_dim), or of the
        last one of a 2-D tensor.  per_head: one an innermost row.  per_group: one for each
        `group_size` elements of an innermost row.  None is per_group for int4, else per_head.
        Raises ShapeError for a combination that does not exist.
        """
        granularity = resolve_granularity(fmt, granularity)
        if len(shape) == 0:
            raise ShapeError("x: expected at least one axis (head_dim), got a scalar")
        if granularity != "per_group" and group_size is not None:
            raise ShapeError(f"group_size: expected None with {granularity}, got {group_size}")
        if granularity == "per_group":
            group_size = DEFAULT_GROUP_SIZE if group_size is None else group_size
            if not isinstance(group_size, int | np.integer) or group_size < 1 or group_size >= 2**31:
                raise ShapeError(f"group_size: expected a positive integer, got {group_size!r}")
            if fmt.asymmetric and group_size % 2:
                raise ShapeError(f"group_size: expected an even number (int4 packs pairs), got {group_size}")
        dim = shape[-1]
        lead = shape[:-1]
        codes_shape = (*lead, fmt.row_bytes(dim))
        rows = int(np.prod(lead, dtype=np.int64))
        if dim == 0:
            rows = 0
        if granularity == "per_group":
            block = min(int(group_size or 0), dim)
            groups = -(-dim // block) if block else 0
            return Layout(rows, dim, block, (*lead, groups), codes_shape)
        if granularity == "per_head":
            return Layout(rows, dim, dim, lead or (1,), codes_shape)
        trailing = dim * (shape[-2] if len(shape) >= 3 else 1)
        if granularity == "per_token":
            tokens = shape[:-2] if len(shape) >= 3 else shape[:-1]
            return Layout(
                int(np.prod(tokens, dtype=np.int64)) if trailing else 0, trailing, trailing, tokens or (1,), codes_shape
            )
        size = rows * dim
        return Layout(1 if size else 0, size, size, (1,), codes_shape)


def resolve_granularity(fmt: Format, granularity: str | None) -> str:
    """The granularity meant by None, checked against the format. Raises ShapeError."""
    if granularity is None:
        return "per_group" if fmt.asymmetric else "per_head"
    if granularity not in GRANULARITIES:
        raise ShapeError(f"granularity: expected one of {', '.join(GRANULARITIES)}, got {granularity!r}")
    if fmt.asymmetric and granularity != "per_group":
        raise ShapeError(f"granularity: expected per_group ({fmt.name} has a scale and a min a group), got {granularity}")
    return granularity


def check_eps(eps: float) -> float:
    """Eps as a float; raises DTypeError unless it is a number, ShapeError outside [2**-100, 1e30]."""
    if not isinstance(eps, Real):
        raise DTypeError(f"eps: expected a number, got {type(eps).__name__}")
    if not MIN_EPS <= eps <= 1e30:
        raise ShapeError(f"eps: expected 2**-100 to 1e30 (the smallest scale), got {eps!r}")
    return float(eps)
