"""Reading K/V tensors, writing and reading quantized ones, and what is said about files that are neither."""

import errno
import json
import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from pyclquant import FileError, Quantized, files, reference
from pyclquant.formats import FLOAT_DTYPES, FORMATS, GRANULARITIES
from pyclquant.testing import mismatch

SAMPLE = Path(__file__).parent / "data" / "kv_sample.safetensors"
QUANTIZED = [(f, g) for f in FORMATS for g in (("per_group",) if f == "int4" else GRANULARITIES)]


def values(shape=(6, 2, 8), dtype="float32", seed=0):
    return np.random.default_rng(seed).normal(0, 3, shape).astype(FLOAT_DTYPES[dtype])


def quantized(x, format="int8", granularity=None, scale_dtype="float32"):
    granularity = granularity or ("per_group" if format == "int4" else "per_head")
    group_size = 4 if granularity == "per_group" else None
    parts = reference.quantize(x, format, granularity=granularity, group_size=group_size, scale_dtype=scale_dtype)
    return Quantized(format, granularity, group_size, x.shape, *parts)


def names(folder):
    return [path.name for path in folder.iterdir()]


def read(path):
    return dict(files.open_tensors(path))


def same(got, want):
    assert list(got) == list(want)
    for name in want:
        assert got[name].flags.c_contiguous
        assert mismatch(got[name], want[name]) is None


# ---- reading ----


def test_sample():
    tensors = files.open_tensors(SAMPLE)
    assert [entry.name for entry in tensors.entries] == ["layers.0.k", "layers.0.v", "layers.7.k", "layers.7.v"]
    assert {(entry.dtype, entry.shape) for entry in tensors.entries} == {("bfloat16", (128, 4, 64))}
    assert tensors.metadata == {"layout": "[tokens, kv_heads, head_dim]"}
    assert len(tensors) == len(list(tensors)) == 4


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("suffix", files.SUFFIXES)
def test_reads_every_float(tmp_path, dtype, suffix):
    x = values(dtype=dtype)
    path = tmp_path / f"k{suffix}"
    if suffix == ".npy":
        np.save(path, x)
    elif suffix == ".npz":
        np.savez_compressed(path, k=x)
    else:
        safetensors.numpy.save_file({"k": x}, path)
    same(read(path), {"k": x})


@pytest.mark.parametrize("dtype", [">f4", ">f2", "<f4"])
@pytest.mark.parametrize("order", "CF")
def test_npy_of_another_order(tmp_path, dtype, order):
    x = values()
    np.save(tmp_path / "k.npy", np.asarray(x, dtype=dtype, order=order))
    same(read(tmp_path / "k.npy"), {"k": x.astype(np.dtype(dtype).newbyteorder("="))})


@pytest.mark.parametrize("suffix", files.SUFFIXES)
@pytest.mark.parametrize("shape", [(0, 2, 8), (3, 0)])
def test_tensor_without_elements(tmp_path, suffix, shape):
    x = np.empty(shape, np.float16)
    path = tmp_path / f"k{suffix}"
    if suffix == ".npy":
        np.save(path, x)
    elif suffix == ".npz":
        np.savez(path, k=x)
    else:
        safetensors.numpy.save_file({"k": x}, path)
    same(read(path), {"k": x})


def test_what_is_no_float_is_left_out(tmp_path):
    x = values()
    objects = np.array([{}, []], object)
    np.savez(tmp_path / "k.npz", k=x, n=np.arange(3), scalar=np.float32(1), objects=objects, wide=x.astype(np.float64))
    tensors = files.open_tensors(tmp_path / "k.npz")
    same(dict(tensors), {"k": x})
    assert [str(e) for e in tensors.skipped] == [
        "n (int64 [3])",
        "scalar (float32 [])",
        "objects (object [2])",
        "wide (float64 [6, 2, 8])",
    ]


def damaged(tmp_path, name):
    """A file that cannot be read, by name."""
    x = values()
    path = tmp_path / name
    if name.startswith("truncated"):
        whole = tmp_path / f"whole{path.suffix}"
        if path.suffix == ".npy":
            np.save(whole, x)
        elif path.suffix == ".npz":
            np.savez(whole, k=x)
        else:
            safetensors.numpy.save_file({"k": x}, whole)
        path.write_bytes(whole.read_bytes()[:-20])
    elif name.startswith("short"):
        path.write_bytes(b"12")
    elif name.startswith("empty"):
        path.write_bytes(b"")
    elif name.startswith("text"):
        path.write_text("these are not tensors, but some lines of text\n" * 9)
    elif name.startswith("folder"):
        path.mkdir()
    elif name == "integers.npy":
        np.save(path, np.arange(3))
    elif name == "object.npy":
        np.save(path, np.array([{}], object))
    elif name == "objects.npz":
        np.savez(path, k=np.array([{}], object))
    elif name == "none.npz":
        zipfile.ZipFile(path, "w").close()
    elif name == "damaged.npz":
        np.savez(path, k=values((64, 8, 64)))
        content = path.read_bytes()
        path.write_bytes(content[:100_000] + b"damaged!" + content[100_008:])
    elif name == "integers.safetensors":
        safetensors.numpy.save_file({"k": np.arange(3)}, path)
    elif name == "none.safetensors":
        safetensors.numpy.save_file({}, path)
    return path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.npy", "expected a file to read, got: No such file"),
        ("folder.npz", "expected a file, got a directory"),
        ("weights.bin", r"expected a name that ends in .safetensors or .npy or .npz, got .bin"),
        ("weights", "got no suffix"),
        *((f"empty{s}", rf"expected a {s} file, got an empty one \(0 bytes\)") for s in files.SUFFIXES),
        *((f"text{s}", f"expected a {s} file, got something else or a damaged file") for s in files.SUFFIXES),
        *((f"short{s}", f"expected a {s} file, got something else or a damaged file") for s in files.SUFFIXES),
        ("truncated.safetensors", "got something else or a damaged file"),
        ("truncated.npy", "384 bytes of data in its header, 364 in the file"),
        ("truncated.npz", "got something else or a damaged file"),
        ("damaged.npz", "expected the data of k .*Bad CRC"),
        ("integers.npy", r"expected tensors of float32, bfloat16, float16 with one axis or more, got integers \(int64"),
        ("integers.safetensors", r"got k \(I64 \[3\]\)"),
        ("object.npy", r"got object \(object \[1\]\)"),
        ("objects.npz", r"got k \(object \[1\]\)"),
        ("none.npz", "got no tensor at all"),
        ("none.safetensors", "got no tensor at all"),
    ],
)
def test_refused_inputs(tmp_path, name, message):
    path = damaged(tmp_path, name)
    with pytest.raises(FileError, match=message) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: expected ")
    assert "\n" not in str(caught.value)


# ---- quantized tensors ----


@pytest.mark.parametrize(("format", "granularity"), QUANTIZED)
@pytest.mark.parametrize("scale_dtype", ["float32", "float16"])
def test_quantized_round_trip(tmp_path, format, granularity, scale_dtype):
    path = tmp_path / "q.safetensors"
    tensors = {
        name: quantized(values(shape), format, granularity, scale_dtype) for name, shape in (("k", (6, 2, 7)), ("v", (3, 5)))
    }
    files.save_quantized(path, tensors, {"k": "bfloat16"}, {"layout": "any"})
    back = files.read_quantized(path)
    assert back.dtypes == {"k": "bfloat16", "v": "float32"}
    assert back.metadata == {"layout": "any"}
    for name, q in tensors.items():
        got = back.tensors[name]
        assert (got.format, got.granularity, got.group_size, got.shape) == (q.format, q.granularity, q.group_size, q.shape)
        for part in ("codes", "scales", "mins"):
            want = getattr(q, part)
            assert getattr(got, part) is None if want is None else mismatch(getattr(got, part), want) is None
    assert list(files.load_quantized(path)) == ["k", "v"]


@pytest.mark.parametrize(
    ("format", "stored"), [("fp8_e4m3fn", "F8_E4M3"), ("fp8_e5m2", "F8_E5M2"), ("int8", "I8"), ("int4", "U8")]
)
def test_codes_have_their_own_dtype_in_the_file(tmp_path, format, stored):
    path = tmp_path / "q.safetensors"
    files.save_quantized(path, {"k": quantized(values(), format)})
    with safetensors.safe_open(path, framework="np") as file:
        assert file.get_slice("k.codes").get_dtype() == stored
        assert set(file.keys()) == {"k.codes", "k.scales", *(["k.mins"] if format == "int4" else [])}
        assert json.loads(file.metadata()["pyclquant"]) == {
            "version": 1,
            "tensors": {
                "k": {
                    "format": format,
                    "granularity": "per_group" if format == "int4" else "per_head",
                    "group_size": 4 if format == "int4" else None,
                    "shape": [6, 2, 8],
                    "dtype": "float32",
                }
            },
        }


def test_saves_from_the_device(tmp_path, dev):
    from pyclquant import kv

    x = values()
    files.save_quantized(
        tmp_path / "q.safetensors", {name: kv.quantize(dev, a, "fp8_e4m3fn") for name, a in (("k", x), ("none", x[:0]))}
    )
    got = files.load_quantized(tmp_path / "q.safetensors")
    assert mismatch(got["k"].codes, quantized(x, "fp8_e4m3fn").codes) is None
    assert got["none"].codes.shape == got["none"].shape == (0, 2, 8)


def tampered(tmp_path, change):
    """A quantized file whose metadata, a dict, went through `change`."""
    path = tmp_path / "q.safetensors"
    files.save_quantized(path, {"k": quantized(values(), "int4")})
    _, metadata = files.safetensors_entries(path)
    head = json.loads(metadata["pyclquant"])
    change(head)
    parts = quantized(values(), "int4")
    arrays = {"k.codes": parts.codes, "k.scales": parts.scales, "k.mins": parts.mins}
    safetensors.numpy.save_file(arrays, path, metadata={"pyclquant": json.dumps(head)})
    return path


def row(**changes):
    return lambda head: head["tensors"]["k"].update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda head: head.update(version=2), "expected metadata 'pyclquant' of version 1 with tensors, got version 2"),
        (lambda head: head.update(tensors=[]), "of version 1 with tensors"),
        (lambda head: head["tensors"].update(k=3), "k: expected a row of metadata, got 3"),
        (row(shape="6"), "k: expected shape as a list of sizes, got '6'"),
        (row(shape=[6, -2, 8]), "expected shape as a list of sizes"),
        (row(shape=[6, True, 8]), "expected shape as a list of sizes"),
        (row(shape=[]), "expected at least one axis"),
        (row(shape=[6, 2, 16]), r"k.codes: expected uint8 \[6, 2, 8\], got uint8 \[6, 2, 4\]"),
        (row(group_size="4"), "expected group_size as an integer or null"),
        (row(group_size=0), "group_size: expected a positive integer, got 0"),
        (row(group_size=8), r"k.scales: expected float32 or float16 \[6, 2, 1\], got float32 \[6, 2, 2\]"),
        (row(dtype="int8"), "expected dtype as one of float32, bfloat16, float16, got 'int8'"),
        (row(format="fp8_e4m3fnuz"), "format: expected one of"),
        (row(format=4), "expected format as a name, got 4"),
        (row(format="int8", granularity="per_group"), r"k.codes: expected int8 \[6, 2, 8\], got uint8"),
        (row(granularity="per_head"), "granularity: expected per_group"),
        (row(granularity=None), "expected granularity as a name, got None"),
        (lambda head: head["tensors"].update(v=dict(head["tensors"]["k"])), r"v.codes: expected uint8 \[6, 2, 4\], got none"),
    ],
)
def test_refused_metadata(tmp_path, change, message):
    with pytest.raises(FileError, match=message):
        files.load_quantized(tampered(tmp_path, change))


def test_refused_files_of_codes(tmp_path):
    with pytest.raises(FileError, match=r"expected quantized tensors .* got none"):
        files.load_quantized(SAMPLE)
    with pytest.raises(FileError, match=r"expected a name that ends in .safetensors, got .npz"):
        files.load_quantized(tmp_path / "q.npz")
    safetensors.numpy.save_file({}, tmp_path / "q.safetensors", metadata={"pyclquant": "{"})
    with pytest.raises(FileError, match="expected JSON in the metadata 'pyclquant'"):
        files.load_quantized(tmp_path / "q.safetensors")
    safetensors.numpy.save_file({}, tmp_path / "q.safetensors", metadata={"pyclquant": "3"})
    with pytest.raises(FileError, match="got int"):
        files.load_quantized(tmp_path / "q.safetensors")


# ---- writing ----


def test_failed_write_keeps_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "q.safetensors"
    path.write_text("precious")

    def full(tensors, file, metadata):
        Path(file).write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(safetensors.numpy, "save_file", full)
    with pytest.raises(FileError, match=r"q.safetensors: expected to write a file, got: No space left on device"):
        files.save_quantized(path, {"k": quantized(values())})
    assert path.read_text() == "precious"
    assert names(tmp_path) == ["q.safetensors"]


def test_write_that_the_system_stops(tmp_path):
    """A limit on the size of files stands for a full disk: the write fails in the middle, for real."""
    path = tmp_path / "q.safetensors"
    path.write_text("precious")
    code = (
        "import resource, sys, numpy as np; from pyclquant import files\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try: files.save_tensors(sys.argv[1], {'k': np.zeros(1 << 20, np.float32)})\n"
        "except files.FileError as error: print(error)\n"
    )
    child = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    assert "q.safetensors: expected to write a file, got: " in child.stdout
    assert path.read_text() == "precious"
    assert names(tmp_path) == ["q.safetensors"]


def test_refused_outputs(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.safetensors").mkdir()
    os.mkfifo(tmp_path / "pipe.safetensors")
    for name, message in (
        ("missing/q.safetensors", "expected a name in a folder that exists"),
        ("file/q.safetensors", "expected a name in a folder that exists"),
        ("folder.safetensors", "expected a file or a new name, got a directory"),
        ("pipe.safetensors", "expected a file or a new name, got a device or pipe"),
        ("q.npz", "expected a name that ends in .safetensors, got .npz"),
    ):
        with pytest.raises(FileError, match=message):
            files.check_output(tmp_path / name)
    with pytest.raises(FileError, match=r"expected (to write a file|a folder that can be written to)"):
        files.save_tensors("/proc/self/q.safetensors", {"k": values()})
    with pytest.raises(FileError, match="k: expected dtype float32, bfloat16, float16, got 'int8'"):
        files.save_quantized(tmp_path / "q.safetensors", {"k": quantized(values())}, {"k": "int8"})


def test_written_file_is_like_any_other(tmp_path):
    before = os.umask(0o027)
    try:
        files.save_tensors(tmp_path / "q.safetensors", {"k": values()})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "q.safetensors").stat().st_mode) == 0o640


def test_link_is_followed(tmp_path):
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "q.safetensors")
    files.save_tensors(tmp_path / "link.safetensors", {"k": values()})
    assert (tmp_path / "link.safetensors").is_symlink()
    same(read(tmp_path / "q.safetensors"), {"k": values()})


def test_saves_arrays_in_any_order(tmp_path):
    x = values()
    files.save_tensors(tmp_path / "q.safetensors", {"k": x.transpose(2, 0, 1), "f": np.asfortranarray(x), "s": x[::2]})
    same(read(tmp_path / "q.safetensors"), {"f": x, "k": x.transpose(2, 0, 1).copy(), "s": x[::2].copy()})


def test_unaligned_safetensors(tmp_path):
    """The format's own text allows a header of any length."""
    x = values((5, 3), "bfloat16").astype(ml_dtypes.bfloat16)
    header = json.dumps({"k": {"dtype": "BF16", "shape": [5, 3], "data_offsets": [0, 30]}}).encode()
    header += b" " * (1 - len(header) % 2)
    assert (8 + len(header)) % 2 == 1
    (tmp_path / "k.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + x.tobytes())
    got = read(tmp_path / "k.safetensors")
    assert got["k"].flags.aligned
    same(got, {"k": x})


# ---- tensor by tensor ----


def test_streamed_tensors_are_as_any_others(tmp_path):
    """Whatever the order in which they come; each where its elements are aligned."""
    rng = np.random.default_rng(1)
    tensors = {
        "codes": rng.integers(0, 127, (3, 5), np.uint8).view(ml_dtypes.float8_e4m3fn),
        "bytes": np.arange(7, dtype=np.uint8),
        "scales": values((3, 1)),
        "scalar": np.full((), 2.5, np.float32),
        "none": np.empty((0, 4), np.float16),
        "x\u00e9": values((2, 3), "bfloat16").T,
    }
    path = tmp_path / "s.safetensors"
    with files.stream_tensors(
        path, [files.TensorSpec.of(n, a.shape, a.dtype) for n, a in tensors.items()], {"format": "pt"}
    ) as put:
        put("codes", tensors["codes"][:1])
        for name in reversed(tensors):
            put(name, tensors[name] if name != "codes" else tensors[name][1:])
    entries, metadata = files.safetensors_entries(path)
    assert metadata == {"format": "pt"}
    assert {e.name: e.nbytes for e in entries} == {name: a.nbytes for name, a in tensors.items()}
    for entry in entries:
        assert mismatch(entry.load(), np.ascontiguousarray(tensors[entry.name]).reshape(entry.shape)) is None
    header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
    data = path.stat().st_size - sum(a.nbytes for a in tensors.values())
    assert [n for n, a in tensors.items() if (data + header[n]["data_offsets"][0]) % a.dtype.itemsize] == []
    with safetensors.safe_open(path, framework="np") as file:
        assert mismatch(file.get_tensor("scales"), tensors["scales"]) is None


def test_tensors_without_a_dtype_in_numpy_are_bytes(tmp_path):
    path = tmp_path / "s.safetensors"
    spec = files.TensorSpec("n", (3,), "I64", 24)
    with files.stream_tensors(path, [spec], {}) as put:
        put("n", np.arange(24, dtype=np.uint8))
    (entry,), _ = files.safetensors_entries(path)
    assert (entry.name, entry.shape, entry.dtype, entry.nbytes) == ("n", (3,), "I64", 24)
    assert mismatch(entry.load(), np.arange(24, dtype=np.uint8)) is None
    with safetensors.safe_open(path, framework="np") as file:
        assert file.get_tensor("n").dtype == np.int64


def test_new_folder(tmp_path):
    with files.new_folder(tmp_path / "new") as folder:
        (folder / "a").write_text("a")
        assert not (tmp_path / "new").exists()
    assert names(tmp_path) == ["new"]
    assert names(tmp_path / "new") == ["a"]


@pytest.mark.parametrize(
    ("error", "becomes", "message"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            FileError,
            "new: expected to write a folder, got: No space left on device$",
        ),
        (OSError(errno.EACCES, "Permission denied", "/a/b"), FileError, r"got: Permission denied \(b\)"),
        (FileError("as it is"), FileError, "^as it is$"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
)
def test_new_folder_that_fails_is_gone(tmp_path, error, becomes, message):
    def fill():
        with files.new_folder(tmp_path / "new") as folder:
            (folder / "b").mkdir()
            (folder / "b" / "a").write_text("a")
            raise error

    with pytest.raises(becomes, match=message):
        fill()
    assert names(tmp_path) == []


def test_new_folder_in_no_place(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    for name, message in (
        ("file", "expected a new name, got one that exists"),
        ("link", "expected a new name, got one that exists"),
        ("missing/new", "expected a name in a folder that exists"),
        ("file/new", "expected a name in a folder that exists"),
    ):
        with pytest.raises(FileError, match=message), files.new_folder(tmp_path / name):
            pass
    with (
        pytest.raises(FileError, match=r"expected (to write a folder|a folder that can be written to)"),
        files.new_folder("/proc/new"),
    ):
        pass
