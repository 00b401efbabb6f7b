"""Tensors in files: reading floats one tensor at a time, writing and reading quantized K/V tensors.

Read are .safetensors, .npy and .npz; written is .safetensors alone. A quantized tensor `name` is stored as
`name.codes`, `name.scales` and, for int4, `name.mins`; what else is needed to read them back is one JSON
string in the file's metadata under the key "pyclquant":

    {"version": 1, "tensors": {name: {"format", "granularity", "group_size", "shape", "dtype"}}}

A file is written beside its place and then renamed, so a failed write leaves what was there. Nothing is unpickled. What is larger
than memory is written tensor by tensor (`stream_tensors`), into a folder that appears when it is whole (`new_folder`).
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from pyclquant.arrays import on_host
from pyclquant.errors import FileError, PyclquantError
from pyclquant.formats import FLOAT_DTYPES, SCALE_DTYPES, Layout, get_format
from pyclquant.kv import Quantized

Array = np.ndarray[Any, Any]
AnyPath = str | os.PathLike[str]

VERSION = 1
"""Of the metadata; a reader refuses any other."""

KEY = "pyclquant"
SUFFIXES = (".safetensors", ".npy", ".npz")

SAFETENSORS_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
}
"""Of tensors and codes. safetensors' own NumPy reader knows no FP8, and bfloat16 only in late versions."""

STORED_AS = {dtype.name: stored for stored, dtype in SAFETENSORS_DTYPES.items()}
"""NumPy's name of a dtype -> the format's."""

UNREADABLE = (OSError, ValueError, LookupError, TypeError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""What NumPy, zipfile and json raise for a file that is damaged or is something else."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its data. dtype: NumPy's name of it, safetensors' own where NumPy has none.  nbytes: of the data."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int

    @staticmethod
    def of(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> TensorSpec:
        """From a NumPy dtype."""
        return TensorSpec(name, shape, dtype.name, math.prod(shape) * dtype.itemsize)

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype} {list(self.shape)})"


@dataclass(frozen=True)
class Entry(TensorSpec):
    """A tensor in a file. load: reads it, C-contiguous and in native byte order; its bytes when NumPy has no such dtype."""

    load: Callable[[], Array]

    @property
    def is_float(self) -> bool:
        """Whether it can be quantized: float32, float16 or bfloat16 with at least one axis."""
        return self.dtype in FLOAT_DTYPES and len(self.shape) > 0


@dataclass(frozen=True)
class TensorFile:
    """The tensors of a file that can be quantized; iterating reads them, one at a time, as (name, array).

    skipped: those that cannot be quantized.  metadata: of a .safetensors file, without pyclquant's own.
    """

    path: Path
    entries: tuple[Entry, ...]
    skipped: tuple[Entry, ...]
    metadata: Mapping[str, str]

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[tuple[str, Array]]:
        for entry in self.entries:
            with refusing(self.path, f"the data of {entry}"):
                array = entry.load()
            yield entry.name, array


@dataclass(frozen=True)
class QuantizedFile:
    """What `save_quantized` wrote. tensors: on the host.  dtypes: of the tensors that were quantized."""

    tensors: dict[str, Quantized]
    dtypes: dict[str, str]
    metadata: dict[str, str]


# ---- reading ----


@contextmanager
def refusing(path: Path, what: str) -> Iterator[None]:
    """Turns whatever a reader raises into a FileError of one line."""
    try:
        yield
    except PyclquantError:
        raise
    except (*UNREADABLE, safetensors.SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise FileError(f"{path}: expected {what}, got something else or a damaged file ({reason})") from error


def check_input(path: Path, suffixes: tuple[str, ...]) -> None:
    """Raises FileError unless `path` is a readable file with one of these suffixes and something in it."""
    if path.suffix.lower() not in suffixes:
        raise FileError(f"{path}: expected a name that ends in {' or '.join(suffixes)}, got {path.suffix or 'no suffix'}")
    try:
        regular = path.is_file()
        size = path.stat().st_size
        if regular:
            path.open("rb").close()
    except OSError as error:
        raise FileError(f"{path}: expected a file to read, got: {error.strerror or error}") from error
    if not regular:
        raise FileError(f"{path}: expected a file, got a {'directory' if path.is_dir() else 'device or pipe'}")
    if size == 0:
        raise FileError(f"{path}: expected a {path.suffix} file, got an empty one (0 bytes)")


def open_tensors(path: AnyPath) -> TensorFile:
    """The float32, float16 and bfloat16 tensors of a .safetensors, .npy or .npz file; reads the headers only.

    Data is memory-mapped when it is iterated over, except in .npz. Two-byte void elements of .npy and .npz are
    taken for bfloat16: NumPy stores it so.
    Raises FileError when the file is missing, damaged, of another kind, or holds no such tensor.
    """
    path = Path(path)
    check_input(path, SUFFIXES)
    suffix = path.suffix.lower()
    metadata: dict[str, str] = {}
    with refusing(path, f"a {suffix} file"):
        if suffix == ".safetensors":
            entries, metadata = safetensors_entries(path)
        else:
            entries = npy_entries(path) if suffix == ".npy" else npz_entries(path)
    chosen = tuple(e for e in entries if e.is_float)
    skipped = tuple(e for e in entries if not e.is_float)
    if not chosen:
        have = ", ".join(map(str, skipped[:4])) + (", ..." if len(skipped) > 4 else "") or "no tensor at all"
        raise FileError(f"{path}: expected tensors of {', '.join(FLOAT_DTYPES)} with one axis or more, got {have}")
    return TensorFile(path, chosen, skipped, {k: v for k, v in metadata.items() if k != KEY})


def mapped(path: Path, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], order: str = "C") -> Array:
    """An array inside a file, memory-mapped where it can be used as it lies there, else read."""
    if 0 in shape:
        return np.empty(shape, dtype)
    there = np.memmap(path, np.uint8, "r", offset, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
    return usable(np.frombuffer(there, dtype), shape, order)


def usable(flat: Array, shape: tuple[int, ...], order: str) -> Array:
    """`flat` in this shape, C-contiguous, aligned and in native byte order; copied only if need be."""
    a = flat.reshape(shape, order="F" if order == "F" else "C")
    return np.require(a, a.dtype if a.dtype.isnative else a.dtype.newbyteorder("="), ["C", "A"])


def safetensors_entries(path: Path) -> tuple[list[Entry], dict[str, str]]:
    """The tensors of a .safetensors file and its metadata. safetensors checks the header, offsets included."""
    with safetensors.safe_open(path, framework="np"):
        pass
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    metadata = header.pop("__metadata__", {})
    entries = []
    for name, row in header.items():
        shape = tuple(row["shape"])
        begin, end = row["data_offsets"]
        dtype = SAFETENSORS_DTYPES.get(row["dtype"])
        as_array = (np.dtype(np.uint8), (end - begin,)) if dtype is None else (dtype, shape)
        load = partial(mapped, path, 8 + size + begin, *as_array)
        entries.append(Entry(name, shape, row["dtype"] if dtype is None else dtype.name, end - begin, load))
    return entries, metadata


def npy_header(stream: IO[bytes], size: int) -> tuple[tuple[int, ...], str, np.dtype[Any]]:
    """Shape, order and dtype of a .npy stream of `size` bytes, which is left where the data begins."""
    version = np.lib.format.read_magic(stream)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"version {version} of the format")
    shape, fortran, dtype = readers[version](stream)
    if dtype.kind == "V" and dtype.itemsize == 2 and dtype.names is None:
        dtype = np.dtype(ml_dtypes.bfloat16)
    want, have = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, size - stream.tell()
    if have < want and not dtype.hasobject:
        raise ValueError(f"{want} bytes of data in its header, {have} in the file")
    return shape, "F" if fortran else "C", dtype


def npy_entries(path: Path) -> list[Entry]:
    """The one tensor of a .npy file, called as the file is."""
    with path.open("rb") as file:
        shape, order, dtype = npy_header(file, path.stat().st_size)
        nbytes = math.prod(shape) * dtype.itemsize
        return [Entry(path.stem, shape, dtype.name, nbytes, partial(mapped, path, file.tell(), dtype, shape, order))]


def npz_entries(path: Path) -> list[Entry]:
    """The tensors of a .npz file."""

    def load(member: str) -> Array:
        with zipfile.ZipFile(path) as archive, archive.open(member) as stream:
            shape, order, dtype = npy_header(stream, archive.getinfo(member).file_size)
            return usable(np.frombuffer(stream.read(), dtype, int(np.prod(shape, dtype=np.int64))), shape, order)

    entries = []
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if info.filename.endswith(".npy"):
                with archive.open(info) as stream:
                    shape, _, dtype = npy_header(stream, info.file_size)
                name, nbytes = info.filename.removesuffix(".npy"), math.prod(shape) * dtype.itemsize
                entries.append(Entry(name, shape, dtype.name, nbytes, partial(load, info.filename)))
    return entries


def load_quantized(path: AnyPath) -> dict[str, Quantized]:
    """The tensors that `save_quantized` wrote, by name, as memory-mapped NumPy arrays.

    Raises FileError when the file is missing, damaged or not one of `save_quantized`.
    """
    return read_quantized(path).tensors


def read_quantized(path: AnyPath) -> QuantizedFile:
    """As `load_quantized`, with the dtypes of the tensors that were quantized and the file's other metadata."""
    path = Path(path)
    check_input(path, (".safetensors",))
    with refusing(path, "a .safetensors file"):
        entries, metadata = safetensors_entries(path)
    if KEY not in metadata:
        raise FileError(f"{path}: expected quantized tensors (metadata {KEY!r}, as `pyclquant kv -o` writes), got none")
    with refusing(path, f"JSON in the metadata {KEY!r}"):
        head = json.loads(metadata.pop(KEY))
    if not isinstance(head, dict) or head.get("version") != VERSION or not isinstance(head.get("tensors"), dict):
        have = f"version {head.get('version')!r}" if isinstance(head, dict) else type(head).__name__
        raise FileError(f"{path}: expected metadata {KEY!r} of version {VERSION} with tensors, got {have}")
    stored = {e.name: e for e in entries}
    tensors = {name: one_quantized(f"{path}: {name}", name, row, stored) for name, row in head["tensors"].items()}
    return QuantizedFile(tensors, {name: row["dtype"] for name, row in head["tensors"].items()}, metadata)


def one_quantized(where: str, name: str, row: object, stored: Mapping[str, Entry]) -> Quantized:
    """A tensor from its row of metadata and the arrays of the file. Raises FileError, beginning with `where`."""

    def need(ok: bool, what: str, have: object) -> None:
        if not ok:
            raise FileError(f"{where}: expected {what}, got {have!r}")

    need(isinstance(row, dict), "a row of metadata", row)
    assert isinstance(row, dict)
    shape, group_size, dtype = row.get("shape"), row.get("group_size"), row.get("dtype")
    need(isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape), "shape as a list of sizes", shape)
    need(group_size is None or type(group_size) is int, "group_size as an integer or null", group_size)
    need(isinstance(dtype, str) and dtype in FLOAT_DTYPES, f"dtype as one of {', '.join(FLOAT_DTYPES)}", dtype)
    need(isinstance(row.get("format"), str), "format as a name", row.get("format"))
    need(isinstance(row.get("granularity"), str), "granularity as a name", row.get("granularity"))
    assert isinstance(shape, list)
    try:
        fmt = get_format(row["format"])
        layout = Layout.of(tuple(shape), fmt, row["granularity"], group_size)
    except PyclquantError as error:
        raise FileError(f"{where}: {error}") from error

    def array(part: str, want: tuple[int, ...], dtypes: tuple[str, ...]) -> Array:
        entry = stored.get(f"{name}.{part}")
        if entry is None or entry.shape != want or entry.dtype not in dtypes:
            have = f"{entry.dtype} {list(entry.shape)}" if entry else "none"
            raise FileError(f"{where}.{part}: expected {' or '.join(dtypes)} {list(want)}, got {have}")
        return entry.load()

    codes = array("codes", layout.codes_shape, (fmt.codes_dtype.name,))
    scales = array("scales", layout.scales_shape, SCALE_DTYPES)
    mins = array("mins", layout.scales_shape, (scales.dtype.name,)) if fmt.asymmetric else None
    return Quantized(fmt.name, row["granularity"], group_size, tuple(shape), codes, scales, mins)


# ---- writing ----


def check_output(path: AnyPath, suffixes: tuple[str, ...] = (".safetensors",)) -> Path:
    """The place that `path` means, links followed. Raises FileError when a file cannot be written there.

    To be called before long work; a full disk is found only by writing.
    """
    place = Path(os.path.realpath(path))
    if place.suffix.lower() not in suffixes:
        raise FileError(f"{path}: expected a name that ends in {' or '.join(suffixes)}, got {place.suffix or 'no suffix'}")
    if not place.parent.is_dir():
        raise FileError(f"{path}: expected a name in a folder that exists, {place.parent} is none")
    if place.exists() and not place.is_file():
        raise FileError(f"{path}: expected a file or a new name, got a {'directory' if place.is_dir() else 'device or pipe'}")
    if not os.access(place.parent, os.W_OK | os.X_OK):
        raise FileError(f"{path}: expected a folder that can be written to, {place.parent} cannot")
    return place


@contextmanager
def replacing(path: AnyPath, suffixes: tuple[str, ...] = (".safetensors",)) -> Iterator[Path]:
    """A new name beside `path` to write to; it takes the place of `path` when the block ends well, else it is removed.

    Raises FileError for whatever the system or safetensors says against it.
    """
    place = check_output(path, suffixes)
    beside = place.with_name(f".{place.stem}.{secrets.token_hex(4)}{place.suffix}")
    try:
        beside.touch(exist_ok=False)
        mode = beside.stat().st_mode
        yield beside
        beside.chmod(mode)  # safetensors leaves a file that only its owner may read
        beside.replace(place)
    except (OSError, safetensors.SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise FileError(f"{path}: expected to write a file, got: {reason}") from error
    finally:
        beside.unlink(missing_ok=True)


def save_tensors(path: AnyPath, tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> None:
    """Write NumPy arrays to a .safetensors file, all or nothing. Raises FileError."""
    arrays = {name: np.ascontiguousarray(a).reshape(a.shape) for name, a in tensors.items()}
    with replacing(path) as beside:
        safetensors.numpy.save_file(arrays, beside, metadata=dict(metadata or {}))


def save_quantized(
    path: AnyPath,
    tensors: Mapping[str, Quantized],
    dtypes: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write quantized tensors, on the device or on the host, to a .safetensors file, all or nothing.

    dtypes: of the tensors before, by name (float32, float16 or bfloat16), float32 where it says nothing; what
    `pyclquant restore` gives back.  metadata: other metadata of the file.
    Raises FileError when it cannot be written or a dtype is none of these.
    """
    arrays: dict[str, Array] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name, q in tensors.items():
        dtype = (dtypes or {}).get(name, "float32")
        if dtype not in FLOAT_DTYPES:
            raise FileError(f"{path}: {name}: expected dtype {', '.join(FLOAT_DTYPES)}, got {dtype!r}")
        parts = {"codes": q.codes, "scales": q.scales, "mins": q.mins}
        arrays |= {f"{name}.{part}": on_host(a) for part, a in parts.items() if a is not None}
        rows[name] = {
            "format": q.format,
            "granularity": q.granularity,
            "group_size": q.group_size,
            "shape": list(q.shape),
            "dtype": dtype,
        }
    head = json.dumps({"version": VERSION, "tensors": rows})
    save_tensors(path, arrays, {**(metadata or {}), KEY: head})


# ---- writing what is larger than memory ----


@contextmanager
def new_folder(path: AnyPath) -> Iterator[Path]:
    """A folder beside `path` to fill; it becomes `path` when the block ends well, and is removed whatever else ends it.

    Raises FileError when `path` exists, and for whatever the system says against writing.
    """
    place = check_new_folder(path)
    beside = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
    try:
        beside.mkdir()
        yield beside
        beside.rename(place)
    except OSError as error:
        of = f" ({Path(error.filename).name})" if error.filename else ""
        raise FileError(f"{path}: expected to write a folder, got: {error.strerror or error}{of}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def check_new_folder(path: AnyPath) -> Path:
    """The place that `path` means. Raises FileError when no folder can be made there, be it that something is there."""
    place = Path(os.path.realpath(path))
    if place.exists() or Path(path).is_symlink():
        raise FileError(f"{path}: expected a new name, got one that exists")
    if not place.parent.is_dir():
        raise FileError(f"{path}: expected a name in a folder that exists, {place.parent} is none")
    if not os.access(place.parent, os.W_OK | os.X_OK):
        raise FileError(f"{path}: expected a folder that can be written to, {place.parent} cannot")
    return place


@contextmanager
def stream_tensors(
    path: Path, specs: Iterable[TensorSpec], metadata: Mapping[str, str]
) -> Iterator[Callable[[str, Array], None]]:
    """Write a .safetensors file piece by piece, each in its place: the function given takes a name and an array.

    Every tensor of `specs` must be given whole, in one array or in several that follow one another; tensors in any order. What
    raises in the block, OSError for one, leaves a part of the file behind: for use within `new_folder`.
    """
    places: dict[str, slice] = {}
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for spec in sorted(specs, key=lambda s: (-(s.nbytes // max(math.prod(s.shape), 1)), s.name)):  # wide elements first: aligned
        begin, end = end, end + spec.nbytes
        places[spec.name] = slice(begin, end)
        dtype = STORED_AS.get(spec.dtype, spec.dtype)
        header[spec.name] = {"dtype": dtype, "shape": list(spec.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        start = file.tell()

        def put(name: str, a: Array) -> None:
            place = places[name]
            data = np.ascontiguousarray(a).reshape(-1).view(np.uint8)
            places[name] = slice(place.start + data.nbytes, place.stop)
            file.seek(start + place.start)
            file.write(data.data)

        yield put
        assert all(place.start == place.stop for place in places.values()), "tensors that are not whole"
