"""Float checkpoints to FP8 ones, quantized on the device, in the naming that other programs read.

    convert.run(dev, convert.plan("MODEL_DIR", "OUT_DIR", "per_row"))

per_row    `X.weight_scale` [N, 1], config.json as compressed-tensors' `float-quantized` with scales per channel
block_128  `X.weight_scale_inv` [ceil(N / 128), K / 128], config.json as transformers' `fp8` (DeepSeek-V3)

Shards stay as they are; embeddings, norms, routers and the output head stay in floats. Beyond the memory map, some rows of one
tensor are in memory at a time. OUT_DIR appears when it is whole.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from pyclquant import w8a8
from pyclquant.arrays import on_host
from pyclquant.checkpoint import (
    BLOCK_SCALE,
    CONFIG,
    INDEX,
    QUANTIZATION,
    ROW_SCALE,
    Checkpoint,
    Linear,
    Shard,
    open_checkpoint,
    some,
)
from pyclquant.device import Device
from pyclquant.errors import FileError
from pyclquant.files import AnyPath, Array, TensorSpec, check_new_folder, new_folder, stream_tensors
from pyclquant.w8a8 import CHUNK, E4M3, F32

HEAD = "lm_head"

IGNORED = (f"*{HEAD}", "*embed*", "*wte", "*wpe", "*norm*", "*.gate", "*router*")
"""Layers that stay in floats: output heads, embeddings, norms and routers of experts, by the names that models give them."""

NOT_COPIED = (
    "*.safetensors",
    "*.index.json",
    "pytorch_model*",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.h5",
    "*.msgpack",
    "*.gguf",
    "*.onnx",
)
"""Files that hold weights, which are not copied along."""

PIECE = 1 << 21
"""Elements that are quantized together, if these are 128 rows or more."""

PART = 1 << 18
"""Elements whose errors are looked at together."""

DECODED = np.arange(256, dtype=np.uint8).view(E4M3).astype(F32)
"""The value of each code."""


@dataclass(frozen=True)
class Plan:
    """What a conversion will do. quantized: layers by name.  kept: names of layers that stay in floats -> the pattern that fits.

    files: relative paths of those that are copied.
    """

    checkpoint: Checkpoint
    out: Path
    scale_layout: str
    quantized: dict[str, Linear]
    kept: dict[str, str]
    files: tuple[Path, ...]


@dataclass(frozen=True)
class Row:
    """What became of a layer. bytes_out: codes and scales.  signal, noise: sums of squares, of its weights and of their errors.

    kept: the pattern by which it stays in floats, None for one that was quantized.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes_in: int
    bytes_out: int
    signal: float
    noise: float
    kept: str | None

    @property
    def relative_rms(self) -> float:
        """Root mean square of the errors over that of the weights."""
        return relative_rms([self])


def relative_rms(rows: Iterable[Row]) -> float:
    """Root mean square of the errors of all rows over that of their weights; 0 where there is no error."""
    rows = list(rows)
    noise = sum(row.noise for row in rows)
    return math.sqrt(noise / sum(row.signal for row in rows)) if noise else 0.0


# ---- before anything is written ----


def plan(model: AnyPath, out: AnyPath, scale_layout: str, ignore: Sequence[str] = ()) -> Plan:
    """Look at headers and names only. ignore: patterns of names of layers that stay in floats too, as of fnmatch.

    Raises ShapeError for a scale layout that does not exist; FileError when `out` exists, `model` is no checkpoint of floats, or
    K of a layer is no multiple of 128.
    """
    w8a8.check_layout(scale_layout)
    path = Path(model)
    if not (path / CONFIG).is_file():
        raise FileError(f"{path}: expected a directory with {CONFIG} and weights, got none")
    place = check_new_folder(out)
    if place.is_relative_to(path.resolve()):
        raise FileError(f"{out}: expected a place outside of {path}, got one in it")
    checkpoint = open_checkpoint(path)
    scaled = [str(linear.weight) for linear in checkpoint.linears.values() if linear.scale is not None]
    if scaled or checkpoint.config.get(QUANTIZATION):
        raise FileError(f"{path}: expected float weights, got a quantized checkpoint ({some(scaled or [QUANTIZATION], 1)})")
    quantized, kept = choose(checkpoint, ignore)
    return Plan(checkpoint, Path(out), scale_layout, quantized, kept, tuple(other_files(path)))


def choose(checkpoint: Checkpoint, ignore: Sequence[str]) -> tuple[dict[str, Linear], dict[str, str]]:
    """The layers that are quantized, and those that are kept, with the pattern. Raises FileError."""
    patterns = dict.fromkeys((*ignore, *IGNORED))
    matches = {p: [name for name in checkpoint.linears if fnmatchcase(name, p)] for p in patterns}
    unused = [p for p in ignore if not matches[p]]
    if unused:
        raise FileError(f"ignore: expected a pattern of layers, got {unused[0]!r}; there are {some(checkpoint.linears)}")
    kept = {name: p for p in reversed(patterns) for name in matches[p]}
    quantized = {name: linear for name, linear in checkpoint.linears.items() if name not in kept}
    odd = [linear for linear in quantized.values() if linear.n <= 0 or linear.k <= 0 or linear.k % CHUNK]
    if odd:
        raise FileError(
            f"{checkpoint.path}: {odd[0].weight}: expected K a positive multiple of {CHUNK}, got N={odd[0].n}, K={odd[0].k}; "
            f"leave such layers in floats with {' '.join(f'--ignore {name!r}' for name in wildcards(odd))}"
        )
    if not quantized:
        raise FileError(f"{checkpoint.path}: expected layers to quantize, got none but {some(kept)}")
    return quantized, kept


def wildcards(linears: Iterable[Linear]) -> list[str]:
    """The last parts of the layers' names as patterns; whole names where they have one part alone."""
    return list(dict.fromkeys("*." + linear.name.rpartition(".")[2] if "." in linear.name else linear.name for linear in linears))


def other_files(path: Path) -> Iterator[Path]:
    """Relative paths of the files that go with a checkpoint: tokenizer, generation_config.json, templates, model card."""
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            file = Path(folder, name)
            hidden = name.startswith(".") or any(fnmatchcase(name, pattern) for pattern in NOT_COPIED)
            if file.is_file() and not hidden and file != path / CONFIG:
                yield file.relative_to(path)


# ---- what is written ----


def written_specs(plan: Plan, shard: Shard) -> list[TensorSpec]:
    """What becomes of the tensors of a shard."""
    specs: list[TensorSpec] = []
    for entry in shard.tensors.values():
        linear = plan.quantized.get(entry.name.removesuffix(".weight"))
        if linear is None or linear.weight is not entry:
            specs.append(entry)
        else:
            specs.append(TensorSpec.of(entry.name, entry.shape, E4M3))
            specs.append(scale_spec(linear, plan.scale_layout))
    return specs


def scale_spec(linear: Linear, scale_layout: str) -> TensorSpec:
    """The scales of a quantized layer, as other programs name and shape them."""
    if scale_layout == "per_row":
        return TensorSpec.of(f"{linear.name}.{ROW_SCALE}", (linear.n, 1), F32)
    return TensorSpec.of(f"{linear.name}.{BLOCK_SCALE}", w8a8.scales_shape(linear.n, linear.k, scale_layout), F32)


def quantization_config(scale_layout: str, kept: Iterable[str]) -> dict[str, Any]:
    """What config.json says of the scheme. kept: names of layers in floats; `lm_head` is added, as it may be tied."""
    names = list(dict.fromkeys([*kept, HEAD]))
    if scale_layout == "block_128":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [CHUNK, CHUNK],
            "modules_to_not_convert": names,
        }
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**fp8, "strategy": "channel", "dynamic": False},
        "input_activations": {**fp8, "strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": names,
        "kv_cache_scheme": None,
    }


# ---- the work ----


def run(dev: Device, plan: Plan, step: Callable[[str], None] = lambda _: None) -> list[Row]:
    """Convert; step is called with the name of each tensor that begins. A row for each layer [N, K], in order of the shards.

    Raises FileError for weights that are not finite, and for what the system says against reading and writing; no OUT_DIR then.
    """
    rows = []
    where: dict[str, str] = {}
    total = 0
    source = plan.checkpoint
    with new_folder(plan.out) as folder:
        for file, shard in source.shards.items():
            specs = written_specs(plan, shard)
            where |= dict.fromkeys((spec.name for spec in specs), file)
            total += sum(spec.nbytes for spec in specs)
            with stream_tensors(folder / file, specs, {"format": "pt", **shard.metadata}) as put:
                for name, entry in shard.tensors.items():
                    step(name)
                    linear = source.linears.get(name.removesuffix(".weight"))
                    if linear is None or linear.weight is not entry:
                        put(name, source.array(name))
                    elif linear.name in plan.kept:
                        put(name, source.array(name))
                        pattern = plan.kept[linear.name]
                        rows.append(Row(linear.name, entry.shape, entry.dtype, entry.nbytes, entry.nbytes, 0.0, 0.0, pattern))
                    else:
                        rows.append(quantize(dev, plan, linear, put))
        if len(source.shards) > 1 or (source.path / INDEX).exists():
            write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))})
        write_json(folder / CONFIG, {**source.config, QUANTIZATION: quantization_config(plan.scale_layout, plan.kept)})
        for other in plan.files:
            (folder / other).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.path / other, folder / other)
    return rows


def quantize(dev: Device, plan: Plan, linear: Linear, put: Callable[[str, Array], None]) -> Row:
    """Quantize a layer some rows at a time, write codes and scales."""
    x = plan.checkpoint.array(linear.weight.name)
    spec = scale_spec(linear, plan.scale_layout)
    signal = noise = 0.0
    rows = max(PIECE // linear.k // CHUNK, 1) * CHUNK  # blocks of scales stay whole
    for start in range(0, linear.n, rows):
        piece = x[start : start + rows]
        codes, scales = map(on_host, w8a8.quantize_weight(dev, piece, plan.scale_layout))
        put(linear.weight.name, codes)
        put(spec.name, scales)
        squares = errors(piece, codes, scales, f"{plan.checkpoint.path}: {linear.weight}", start)
        signal, noise = signal + squares[0], noise + squares[1]
    bytes_out = x.size + spec.nbytes
    return Row(linear.name, x.shape, linear.weight.dtype, x.nbytes, bytes_out, signal, noise, None)


def errors(x: Array, codes: Array, scales: Array, name: str, first: int = 0) -> tuple[float, float]:
    """Sums of the squares of x [N, K] and of what decoding adds to it.

    Raises FileError unless x is finite, with the name and where, rows counted from `first`.
    """
    signal = noise = 0.0
    n, k = x.shape
    rows = max(PART // k, 1)
    for start in range(0, n, rows):
        which = np.arange(start, min(start + rows, n))
        a = x[start : start + rows].astype(np.float64)
        finite = np.isfinite(a)
        if not finite.all():
            row, column = (int(i) for i in np.argwhere(~finite)[0])
            raise FileError(f"{name}: expected finite weights, got {a[row, column]} at [{first + start + row}, {column}]")
        scale = scales[which, None] if scales.ndim == 1 else scales[which // CHUNK].repeat(CHUNK, axis=1)
        error = DECODED[codes[start : start + rows].view(np.uint8)] * scale - a
        signal += float(np.vdot(a, a))
        noise += float(np.vdot(error, error))
    return signal, noise


def write_json(path: Path, value: object) -> None:
    """As config.json is usually written."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
