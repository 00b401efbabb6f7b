"""Checkpoints as people have them: FP8 weights with their scales out of safetensors, and float weights to be quantized.

    model = checkpoint.open_checkpoint("DIR")             # model.safetensors, or shards with model.safetensors.index.json
    w = w8a8.Weight(dev, [model.segment(dev, name) for name in ("...q_proj", "...k_proj", "...v_proj")])

A linear layer X is `X.weight` [N, K]; FP8 (e4m3fn) codes have their scales beside them:

    X.weight_scale_inv  [ceil(N / 128), ceil(K / 128)]    block_128, as DeepSeek-V3 and transformers' `fp8` name it
                        [] or [1]                         one scale for the tensor, repeated for each row
    X.weight_scale      [N, 1] or [N]                     per_row, as compressed-tensors names `channel`
                        [ceil(N / 128), ceil(K / 128)]    block_128, as compressed-tensors names `block`
                        [] or [1]                         one scale for the tensor, repeated for each row

Scales are float32, float16 or bfloat16, and multiply codes. Scales of activations are not read: ours come from the activations.
Files are memory-mapped: a tensor is read when it is asked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pyclquant import w8a8
from pyclquant.arrays import on_device
from pyclquant.device import Device
from pyclquant.errors import FileError, ShapeError
from pyclquant.files import AnyPath, Array, Entry, check_input, refusing, safetensors_entries
from pyclquant.formats import FLOAT_DTYPES
from pyclquant.w8a8 import CHUNK, E4M3, F32, Segment

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
QUANTIZATION = "quantization_config"
"""The key of config.json."""

BLOCK_SCALE = "weight_scale_inv"
ROW_SCALE = "weight_scale"
SCALES = (BLOCK_SCALE, ROW_SCALE)
"""Suffixes of scales."""

QUANT_METHODS = ("fp8", "compressed-tensors", "fbgemm_fp8", "modelopt", "quark")
"""What config.json may call a scheme of which some checkpoints can be read; their tensors tell which."""

OTHER_SCHEMES = {
    "weight_packed": "weights packed into integers (compressed-tensors' int4, NVFP4 or MXFP4)",
    "weight_scale_2": "NVFP4, which has scales of scales",
    "weight_global_scale": "NVFP4, which has scales of scales",
    "qweight": "GPTQ or AWQ, int4 packed into integers",
    "_blocks": "MXFP4 blocks",
}
"""Ends of the names of tensors that only schemes have that are not read here."""

OTHER_WEIGHTS = {
    "F8_E4M3FNUZ": "fnuz FP8 (AMD MI300), of another bias and another NaN",
    "F8_E5M2FNUZ": "fnuz FP8 (AMD MI300), of another bias and another NaN",
    "F4": "4-bit floats (MXFP4 or NVFP4)",
    "F6_E2M3": "6-bit floats (MXFP6)",
    "F6_E3M2": "6-bit floats (MXFP6)",
    "float8_e5m2": "FP8 e5m2 weights",
    "int8": "int8 weights",
    "uint8": "weights packed into bytes (NVFP4, MXFP4 or bitsandbytes)",
}
"""Element types, as `files.Entry` names them, of weights that are not read here."""

POWERS_OF_TWO = ("F8_E8M0", "uint8")
"""Element types of scales that are exponents."""


@dataclass(frozen=True)
class Linear:
    """A weight of a checkpoint. name: without `.weight`.  n, k: rows and columns.

    scheme: per_row, block_128 or per_tensor for FP8 codes; float for float32, float16 or bfloat16, which have no scale.
    """

    name: str
    n: int
    k: int
    scheme: str
    weight: Entry
    scale: Entry | None


@dataclass(frozen=True)
class Shard:
    """A file of a checkpoint. tensors: by name.  metadata: of the file."""

    tensors: dict[str, Entry]
    metadata: dict[str, str]


class Checkpoint:
    """The tensors of a checkpoint. path: file or directory.  config: of config.json, {} without one.

    shards: by file name.  tensors: of all shards, by name.  linears: those that are weights [N, K], embeddings among them, by
    name without `.weight`.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], shards: Mapping[str, Shard]) -> None:
        self.path = path
        self.config = config
        self.shards = shards
        self.tensors = {name: entry for shard in shards.values() for name, entry in shard.tensors.items()}
        check_names(path, self.tensors)
        check_schemes(path, self.tensors)
        check_config(path, config)
        self.linears = {linear.name: linear for linear in find_linears(path, self.tensors)}

    def __repr__(self) -> str:
        return f"<pyclquant.Checkpoint {self.path}, {len(self.tensors)} tensors, {len(self.linears)} linear layers>"

    def linear(self, name: str) -> Linear:
        """A linear layer by its name, with or without `.weight`. Raises FileError."""
        found = self.linears.get(name.removesuffix(".weight"))
        if found is None:
            raise FileError(f"{self.path}: expected a linear layer, got {name!r}; there are {some(self.linears)}")
        return found

    def array(self, name: str) -> Array:
        """A tensor on the host, memory-mapped; bytes [nbytes] where NumPy has no such dtype. Raises FileError."""
        if name not in self.tensors:
            raise FileError(f"{self.path}: expected a tensor of the checkpoint, got {name!r}; there are {some(self.tensors)}")
        with refusing(self.path, f"the data of {name}"):
            return self.tensors[name].load()

    def scales(self, linear: Linear) -> Array:
        """Scales of FP8 codes in float32, per_row [N] or block_128 [ceil(N / 128), ceil(K / 128)].

        Raises FileError when there are none, or some that are negative or not finite.
        """
        if linear.scale is None:
            raise FileError(f"{self.path}: {linear.weight}: expected FP8 codes with scales, got floats")
        scales = self.array(linear.scale.name).astype(F32)
        wrong = ~(np.isfinite(scales) & (scales >= 0))
        if wrong.any():
            where = [int(i) for i in np.argwhere(wrong)[0]]
            value = scales[tuple(where)]
            raise FileError(f"{self.path}: {linear.scale}: expected finite scales, not negative, got {value} at {where}")
        if linear.scheme == "per_tensor":
            return np.full(linear.n, scales.reshape(()), F32)
        return scales.reshape(-1) if linear.scheme == "per_row" else scales

    def segment(self, dev: Device, name: str, scale_layout: str = "per_row") -> Segment:
        """A linear layer on the device, for `w8a8.Weight`: FP8 codes as they are, float weights quantized there.

        scale_layout: of weights that are quantized; FP8 codes keep their own (one scale for a tensor becomes per_row).
        Raises FileError when codes, scales or K are not what a projection takes, saying of which tensor.
        """
        linear = self.linear(name)
        if linear.n <= 0 or linear.k <= 0 or linear.k % CHUNK:
            raise FileError(
                f"{self.path}: {linear.weight}: expected N positive and K a positive multiple of {CHUNK}, got N={linear.n}, "
                f"K={linear.k}; compute this layer in floats, or pad K with zero columns and its input likewise"
            )
        if linear.scale is None:
            return w8a8.quantize_weight(dev, self.array(linear.weight.name), scale_layout)
        scales = self.scales(linear)
        codes = on_device(dev, self.array(linear.weight.name), linear.weight.name)
        try:
            w8a8.check_codes(dev, codes, linear.weight.name)
        except ShapeError as error:
            raise FileError(f"{self.path}: {error}") from error
        return Segment(codes, on_device(dev, scales, linear.scale.name))


def some(names: Iterable[str], most: int = 3) -> str:
    """A few of the names."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "") or "none"


# ---- opening ----


def open_checkpoint(path: AnyPath) -> Checkpoint:
    """The checkpoint in a directory, or in one .safetensors file; reads headers only.

    Of a shard, only what the index names belongs to the checkpoint.
    Raises FileError: a file that is missing or damaged, an index that names a missing or a foreign file, names that lead out of
    the directory, FP8 codes without scales, scales without codes, of a wrong shape or twice, and schemes that are not read here,
    by their names.
    """
    path = Path(path)
    folder, files, config = path.parent, dict[str, list[str] | None]({path.name: None}), dict[str, Any]()
    if path.is_dir():
        folder, files = path, shard_files(path)
        config = read_json(path / CONFIG) if (path / CONFIG).exists() else {}
    shards = {}
    for file, names in files.items():
        place = folder / file
        check_input(place, (".safetensors",))
        with refusing(place, "a .safetensors file"):
            entries, metadata = safetensors_entries(place)
        stored = {entry.name: entry for entry in entries}
        missing = [name for name in names or () if name not in stored]
        if missing:
            raise FileError(f"{place}: expected the tensor {missing[0]!r} that {INDEX} says is there, got {some(stored)}")
        shards[file] = Shard(stored if names is None else {name: stored[name] for name in names}, metadata)
    return Checkpoint(path, config, shards)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises FileError."""
    with refusing(path, "a JSON object"):
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError(type(value).__name__)
    return value


def shard_files(folder: Path) -> dict[str, list[str] | None]:
    """Files of a checkpoint directory, each with the tensors that the index gives it; None for all that it has."""
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).exists():
            raise FileError(f"{folder}: expected {INDEX} or {SINGLE} in it, got neither")
        return {SINGLE: None}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FileError(f"{index}: expected a weight_map of tensor names to file names, got {weight_map!r}")
    files: dict[str, list[str] | None] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or file != Path(file).name or file in ("", "..") or not is_tame(file):
            raise FileError(f"{index}: expected the name of a file in the same directory for {name!r}, got {file!r}")
        if not (folder / file).exists():
            raise FileError(f"{index}: expected the files that it names, {file} (for {name}) is missing")
        names = files.setdefault(file, [])
        assert names is not None
        names.append(name)
    return files


def is_tame(name: str) -> bool:
    """Whether a name of a tensor or file, taken for a path, stays in its directory, and can be printed."""
    return name.isprintable() and not name.startswith(("/", "\\")) and ".." not in re.split(r"[/\\]", name)


# ---- checks of headers ----


def check_names(path: Path, names: Iterable[str]) -> None:
    """Raises FileError for a tensor name that, taken for a path, leaves the directory."""
    for name in names:
        if not is_tame(name):
            raise FileError(f"{path}: expected names of tensors that stay in the directory when they are paths, got {name!r}")


def check_schemes(path: Path, tensors: Mapping[str, Entry]) -> None:
    """Raises FileError for tensors of schemes that are not read, telling their names."""
    for name, entry in tensors.items():
        what = next((scheme for end, scheme in OTHER_SCHEMES.items() if name.endswith(end)), None)
        if what is None and name.endswith(".weight"):
            what = OTHER_WEIGHTS.get(entry.dtype)
        if what:
            raise FileError(f"{path}: {entry}: expected FP8 (e4m3fn) or float weights, got {what}")


def check_config(path: Path, config: Mapping[str, Any]) -> None:
    """Raises FileError when config.json tells of another scheme, or of blocks of another size."""
    quantization = config.get(QUANTIZATION)
    if not isinstance(quantization, dict):
        return
    method = quantization.get("quant_method", QUANT_METHODS[0])
    if method not in QUANT_METHODS:
        raise FileError(f"{path}: {CONFIG}: expected quant_method {', '.join(QUANT_METHODS)} or none, got {method!r}")
    size = quantization.get("weight_block_size")
    if size is not None and size != [CHUNK, CHUNK]:
        raise FileError(f"{path}: {CONFIG}: expected weight_block_size [{CHUNK}, {CHUNK}], got {size}")


def find_linears(path: Path, tensors: Mapping[str, Entry]) -> Iterator[Linear]:
    """The linear layers among tensors. Raises FileError for scales that are missing, too many, or do not fit."""
    for name, entry in tensors.items():
        stem, _, suffix = name.rpartition(".")
        if suffix in SCALES:
            weight = tensors.get(f"{stem}.weight")
            if weight is None or weight.dtype != E4M3.name:
                raise FileError(f"{path}: {entry}: expected {E4M3.name} codes {stem}.weight beside it, got {weight or 'none'}")
        if suffix == "weight" and stem and len(entry.shape) == 2:
            n, k = entry.shape
            if entry.dtype == E4M3.name:
                scale = scale_of(path, stem, entry, tensors)
                yield Linear(stem, n, k, scheme_of(path, entry, scale), entry, scale)
            elif entry.dtype in FLOAT_DTYPES:
                yield Linear(stem, n, k, "float", entry, None)


def scale_of(path: Path, stem: str, weight: Entry, tensors: Mapping[str, Entry]) -> Entry:
    """The scales beside FP8 codes. Raises FileError unless there is one such tensor, of floats."""
    names = [f"{stem}.{suffix}" for suffix in SCALES]
    found = [tensors[name] for name in names if name in tensors]
    if len(found) != 1:
        raise FileError(f"{path}: {weight}: expected one of {' and '.join(names)}, got {' and '.join(map(str, found)) or 'none'}")
    scale = found[0]
    if scale.dtype not in FLOAT_DTYPES:
        have = "MXFP scales, which are exponents" if scale.dtype in POWERS_OF_TWO else scale.dtype
        raise FileError(f"{path}: {scale}: expected scales of {', '.join(FLOAT_DTYPES)}, got {have}")
    return scale


def scheme_of(path: Path, weight: Entry, scale: Entry) -> str:
    """What the shape of the scales says. Raises FileError when it says nothing."""
    n, k = weight.shape
    schemes: dict[tuple[int, ...], str] = {(): "per_tensor", (1,): "per_tensor"}
    schemes[-(-n // CHUNK), -(-k // CHUNK)] = "block_128"
    if scale.name.endswith(ROW_SCALE):
        schemes |= {(n, 1): "per_row", (n,): "per_row"}
    if scale.shape not in schemes:
        shapes = " or ".join(str(list(shape)) for shape in schemes)
        raise FileError(f"{path}: {scale}: expected shape {shapes} for {weight}, got {list(scale.shape)}")
    return schemes[scale.shape]
