"""Checkpoints in other people's naming, read as our own weights; and what is said about those that cannot be read."""

import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from pyclquant import FileError, ShapeError, files, w8a8
from pyclquant.checkpoint import open_checkpoint
from pyclquant.files import TensorSpec
from pyclquant.formats import FLOAT_DTYPES
from pyclquant.testing import mismatch

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
bfloat16 = np.dtype(ml_dtypes.bfloat16)
layouts = pytest.mark.parametrize("layout", w8a8.SCALE_LAYOUTS)

# ---- a quantizer of its own, from the definition of the format ----

EXPONENT, MANTISSA = np.divmod(np.arange(127), 8)
VALUES = np.where(EXPONENT == 0, MANTISSA / 8 * 2.0**-6, (1 + MANTISSA / 8) * 2.0 ** (EXPONENT - 7))
"""Of the codes 0x00 to 0x7e."""
MIDDLES = (VALUES[1:] + VALUES[:-1]) / 2


def to_e4m3(x):
    """The nearest codes, of two equally near the even one."""
    size = np.abs(x).astype(np.float64)
    code = np.searchsorted(MIDDLES, size)
    tied = np.append(MIDDLES, np.inf)[code] == size
    code += tied & (code % 2 == 1)
    return (code + 128 * np.signbit(x)).astype(np.uint8).view(E4M3)


def quantized(w, scale_of_block, blocks):
    """Codes, and scales of blocks of this many rows and columns, of which `scale_of_block` takes the largest magnitude."""
    rows, columns = blocks
    n, k = w.shape
    scales = np.empty((-(-n // rows), -(-k // columns)), np.float32)
    codes = np.empty(w.shape, E4M3)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            x = w[block].astype(np.float32)
            scales[i, j] = scale_of_block(np.abs(x).max())
            codes[block] = to_e4m3(x / scales[i, j])
    return codes, scales


def largest(amax):
    return np.float32(amax) / np.float32(448)


def weights(shapes, dtype=bfloat16, seed=0):
    """Rows of very different sizes, with outliers."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, (n, k) in shapes.items():
        w = rng.normal(0, 0.05, (n, k)) * np.exp(rng.normal(0, 2, (n, 1)))
        w[rng.random((n, k)) < 0.001] *= 50
        made[name] = w.astype(dtype)
    return made


QKV = {"model.layers.0.self_attn.q_proj": (256, 384), "model.layers.0.self_attn.k_proj": (128, 384)}
QKV["model.layers.0.self_attn.v_proj"] = (72, 384)


def save(path, tensors, metadata=None):
    files.save_tensors(path, tensors, metadata)
    return path


def deepseek(folder, floats):
    """A checkpoint as DeepSeek-V3's."""
    tensors = {"model.norm.weight": np.ones(384, bfloat16)}
    for name, w in floats.items():
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"] = quantized(w, largest, (128, 128))
    save(folder / "model.safetensors", tensors, {"format": "pt"})
    config = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v3", "quantization_config": config}))


def compressed_tensors(folder, floats):
    """A checkpoint as compressed-tensors', with scales per channel."""
    tensors = {"model.norm.weight": np.ones(384, bfloat16)}
    for name, w in floats.items():
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"] = quantized(w, largest, (1, w.shape[1]))
        tensors[f"{name}.input_scale"] = np.ones(1, bfloat16)
    save(folder / "model.safetensors", tensors, {"format": "pt"})
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed"}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))


def same_segment(got, want):
    assert mismatch(got.codes.get(), want.codes.get(), "codes") is None
    assert mismatch(got.scales.get(), want.scales.get(), "scales") is None


# ---- what can be read ----


@pytest.mark.parametrize(("make", "layout"), [(deepseek, "block_128"), (compressed_tensors, "per_row")])
def test_projections_of_a_checkpoint_of_others_are_as_our_own(tmp_path, dev, make, layout):
    floats = weights(QKV)
    make(tmp_path, floats)
    model = open_checkpoint(tmp_path)
    assert list(model.linears) == sorted(QKV)
    assert {linear.scheme for linear in model.linears.values()} == {layout}
    theirs = [model.segment(dev, name) for name in QKV]
    own = [w8a8.quantize_weight(dev, floats[name], layout) for name in QKV]
    for a, b in zip(theirs, own, strict=True):
        same_segment(a, b)
    x = np.random.default_rng(1).normal(size=(3, 384)).astype(bfloat16)
    want = w8a8.proj(dev, x, w8a8.Weight(dev, own)).get()
    assert np.abs(want.astype(np.float32)).min() > 0
    assert mismatch(w8a8.proj(dev, x, w8a8.Weight(dev, theirs)).get(), want) is None


def test_shapes_and_names(tmp_path, dev):
    deepseek(tmp_path, weights(QKV))
    model = open_checkpoint(tmp_path)
    q = model.linear("model.layers.0.self_attn.q_proj.weight")
    assert (q.name, q.n, q.k, q.scale.shape) == ("model.layers.0.self_attn.q_proj", 256, 384, (2, 3))
    assert model.config["model_type"] == "deepseek_v3"
    assert (model.array("model.norm.weight") == 1).all()
    assert list(model.shards) == ["model.safetensors"]
    assert model.shards["model.safetensors"].metadata == {"format": "pt"}
    assert repr(model) == f"<pyclquant.Checkpoint {tmp_path}, 7 tensors, 3 linear layers>"
    alone = open_checkpoint(str(tmp_path / "model.safetensors"))
    assert alone.config == {}
    assert list(alone.linears) == list(model.linears)


def one(tmp_path, scale, suffix="weight_scale", shape=(256, 128), codes=None):
    """A checkpoint of one weight with these scales."""
    codes = np.full(shape, 1, E4M3) if codes is None else codes
    return save(tmp_path / "model.safetensors", {"x.weight": codes, f"x.{suffix}": scale})


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_inv"])
def test_one_scale_for_a_tensor_is_repeated_for_its_rows(tmp_path, dev, shape, suffix):
    model = open_checkpoint(one(tmp_path, np.full(shape, 0.37, np.float32), suffix))
    assert model.linears["x"].scheme == "per_tensor"
    segment = model.segment(dev, "x")
    assert mismatch(segment.scales.get(), np.full(256, 0.37, np.float32)) is None
    w8a8.Weight(dev, segment)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("shape", [(256,), (256, 1), (2, 1)])
def test_scales_are_widened(tmp_path, dev, dtype, shape):
    scales = np.random.default_rng(2).random(shape).astype(FLOAT_DTYPES[dtype])
    segment = open_checkpoint(one(tmp_path, scales)).segment(dev, "x")
    want = scales.astype(np.float32).reshape((256,) if shape[0] == 256 else (2, 1))
    assert mismatch(segment.scales.get(), want) is None
    w8a8.Weight(dev, segment)


@layouts
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_floats_are_quantized_while_loading(tmp_path, dev, dtype, layout):
    (w,) = weights({"x": (200, 256)}, FLOAT_DTYPES[dtype]).values()
    model = open_checkpoint(save(tmp_path / "model.safetensors", {"x.weight": w}))
    assert model.linears["x"].scheme == "float"
    same_segment(model.segment(dev, "x", layout), w8a8.quantize_weight(dev, w, layout))


def sharded(folder, shards):
    """Shards with an index; names of shards -> tensors."""
    for file, tensors in shards.items():
        save(folder / file, tensors)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return weight_map


def test_shards(tmp_path, dev):
    (w,) = weights({"x": (256, 128)}).values()
    codes, scales = quantized(w, largest, (128, 128))
    sharded(
        tmp_path,
        {"a.safetensors": {"x.weight": codes, "n.weight": w[0]}, "b.safetensors": {"x.weight_scale_inv": scales, "y.weight": w}},
    )
    model = open_checkpoint(tmp_path)
    assert {file: sorted(shard.tensors) for file, shard in model.shards.items()} == {
        "a.safetensors": ["n.weight", "x.weight"],
        "b.safetensors": ["x.weight_scale_inv", "y.weight"],
    }
    same_segment(model.segment(dev, "x"), w8a8.quantize_weight(dev, w, "block_128"))
    assert mismatch(model.array("y.weight"), w) is None


def test_of_a_shard_only_what_the_index_names(tmp_path):
    weight_map = sharded(tmp_path, {"a.safetensors": {"x.weight": np.ones((2, 2), bfloat16), "y.weight": np.ones(2, bfloat16)}})
    del weight_map["x.weight"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert list(open_checkpoint(tmp_path).tensors) == ["y.weight"]


def resident():
    """Bytes of this process in memory, mapped files included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_one_weight_of_a_large_file_is_read_alone(tmp_path, dev):
    """3 GiB that are a hole: if they were read, they would be in memory."""
    huge, (w,) = 3 << 29, weights({"x": (256, 128)}).values()
    path = tmp_path / "model.safetensors"
    rows = {"huge.weight": {"dtype": "BF16", "shape": [huge // 128, 128], "data_offsets": [0, 2 * huge]}}
    rows["x.weight"] = {"dtype": "BF16", "shape": [256, 128], "data_offsets": [2 * huge, 2 * huge + w.nbytes]}
    header = json.dumps(rows).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.seek(2 * huge, os.SEEK_CUR)
        file.write(w.tobytes())
    want = w8a8.quantize_weight(dev, w, "per_row")
    before = resident()
    model = open_checkpoint(tmp_path)
    same_segment(model.segment(dev, "x"), want)
    assert model.array("huge.weight").shape == (huge // 128, 128)
    assert resident() - before < 64 << 20


# ---- what cannot ----


def test_names_that_are_not_there(tmp_path, dev):
    deepseek(tmp_path, weights(QKV))
    model = open_checkpoint(tmp_path)
    for ask in (model.linear, lambda name: model.segment(dev, name)):
        with pytest.raises(FileError, match=r"expected a linear layer, got 'model.norm'; there are .*k_proj"):
            ask("model.norm")
    with pytest.raises(FileError, match=r"expected a tensor of the checkpoint, got 'x'; there are .* and 4 more"):
        model.array("x")


def test_floats_have_no_scales(tmp_path):
    model = open_checkpoint(save(tmp_path / "model.safetensors", {"x.weight": np.ones((2, 128), bfloat16)}))
    with pytest.raises(FileError, match=r"x.weight \(bfloat16 \[2, 128\]\): expected FP8 codes with scales, got floats"):
        model.scales(model.linear("x"))


def with_value(a, where, value):
    a = a.copy()
    a[where] = value
    return a


ROW_SCALES = np.ones((256, 1), np.float32)


@pytest.mark.parametrize(
    ("scales", "codes", "message"),
    [
        (with_value(ROW_SCALES, 7, np.nan), None, r"x.weight_scale \(float32 \[256, 1\]\): .*not negative, got nan at \[7, 0\]"),
        (with_value(ROW_SCALES, 8, np.inf), None, r"x.weight_scale .* got inf at \[8, 0\]"),
        (with_value(ROW_SCALES, 9, -0.5), None, r"x.weight_scale .* got -0.5 at \[9, 0\]"),
        (np.float32(-1), None, r"x.weight_scale .* got -1.0 at \[\]"),
        (
            ROW_SCALES,
            with_value(np.ones((256, 128), E4M3), (200, 3), np.nan),
            r"x.weight codes: .*weights, got NaN at \(200, 3\)",
        ),
        (
            ROW_SCALES,
            np.ones((256, 100), E4M3),
            r"x.weight .*: .*multiple of 128, got N=256, K=100; compute this layer in floats, or",
        ),
        (np.ones((0, 1), np.float32), np.ones((0, 128), E4M3), r"x.weight .*: expected N positive .* got N=0, K=128"),
    ],
)
def test_refused_values(tmp_path, dev, scales, codes, message):
    model = open_checkpoint(one(tmp_path, np.asarray(scales), codes=codes))
    with pytest.raises(FileError, match=message) as caught:
        model.segment(dev, "x")
    assert str(caught.value).startswith(f"{model.path}: x.weight")


def test_floats_with_a_k_that_is_no_multiple(tmp_path, dev):
    model = open_checkpoint(save(tmp_path / "model.safetensors", {"x.weight": np.ones((4, 120), bfloat16)}))
    with pytest.raises(FileError, match=r"x.weight .*multiple of 128, got N=4, K=120"):
        model.segment(dev, "x")


def test_nan_in_floats_is_refused_by_the_weight(tmp_path, dev):
    w = with_value(np.ones((4, 128), bfloat16), (2, 5), np.nan)
    segment = open_checkpoint(save(tmp_path / "model.safetensors", {"x.weight": w})).segment(dev, "x")
    with pytest.raises(ShapeError, match=r"expected finite weights, got NaN at \(2, 5\)"):
        w8a8.Weight(dev, segment)


CODES = {"x.weight": np.ones((256, 384), E4M3)}


def scaled(shape, suffix="weight_scale_inv", dtype=np.float32):
    return {**CODES, f"x.{suffix}": np.ones(shape, dtype)}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (CODES, r"x.weight \(float8_e4m3fn \[256, 384\]\): expected one of x.weight_scale_inv and x.weight_scale, got none"),
        (
            {**scaled((2, 3)), **scaled((256, 1), "weight_scale")},
            r"expected one of .*, got x.weight_scale_inv .* and x.weight_scale ",
        ),
        ({"x.weight_scale_inv": np.ones((2, 3), np.float32)}, r"expected float8_e4m3fn codes x.weight beside it, got none"),
        (
            {"x.weight": np.ones((256, 384), bfloat16), "x.weight_scale": np.ones((256, 1), np.float32)},
            r"x.weight_scale .*: expected float8_e4m3fn codes .*, got x.weight \(bfloat16 ",
        ),
        (scaled((3, 2)), r"x.weight_scale_inv .*: expected shape \[\] or \[1\] or \[2, 3\] for x.weight .*, got \[3, 2\]"),
        (scaled((256, 1)), r"x.weight_scale_inv .*: expected shape .* for x.weight .*, got \[256, 1\]"),
        (scaled((384,), "weight_scale"), r"expected shape \[\] or \[1\] or \[2, 3\] or \[256, 1\] or \[256\] .*, got \[384\]"),
        (scaled((1, 256), "weight_scale"), r"expected shape .*, got \[1, 256\]"),
        (scaled((256, 12), "weight_scale", np.uint8), r"x.weight_scale .*: expected scales of .*, got MXFP scales"),
        (scaled((2, 3), dtype=np.int8), r"expected scales of float32, bfloat16, float16, got int8"),
        (
            {"../x.weight": np.ones((2, 2), bfloat16)},
            r"expected names of tensors that stay in the directory .*, got '\.\./x.weight'",
        ),
        ({"/etc/x.weight": np.ones((2, 2), bfloat16)}, r"expected names of tensors that stay .*, got '/etc/x.weight'"),
        ({"a\\..\\x": np.ones(2, bfloat16)}, r"expected names of tensors that stay .*"),
        ({"a\nb": np.ones(2, bfloat16)}, r"expected names of tensors that stay .*, got 'a\\nb'"),
        ({"x.qweight": np.ones((2, 2), np.int8)}, r"x.qweight .*: expected FP8 .* or float weights, got GPTQ or AWQ, int4"),
        ({"x.weight_packed": np.ones((2, 2), np.int8)}, r"got weights packed into integers \(compressed-tensors' int4, NVFP4"),
        ({"x.weight_global_scale": np.ones(1, np.float32)}, r"got NVFP4"),
        ({"experts.down_proj_blocks": np.ones((2, 2), np.uint8)}, r"got MXFP4 blocks"),
        ({"x.weight_scale": np.ones((2, 1), np.float32), "x.weight": np.ones((2, 2), np.int8)}, r"x.weight .*got int8 weights"),
        (
            {"x.weight": np.ones((2, 2), np.uint8), "x.weight_scale": np.ones((2, 1), np.float32)},
            r"got weights packed into bytes",
        ),
        ({"x.weight": np.ones((2, 2), ml_dtypes.float8_e5m2)}, r"got FP8 e5m2 weights"),
    ],
)
def test_refused_tensors(tmp_path, tensors, message):
    path = save(tmp_path / "model.safetensors", tensors)
    with pytest.raises(FileError, match=message) as caught:
        open_checkpoint(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("x.weight", "F8_E4M3FNUZ", "got fnuz FP8"),
        ("x.weight", "F8_E5M2FNUZ", "got fnuz FP8"),
        ("x.weight", "F4", "got 4-bit floats"),
        ("x.weight_scale", "F8_E8M0", "got MXFP scales"),
    ],
)
def test_refused_dtypes(tmp_path, name, dtype, message):
    """Of schemes for which NumPy has no dtype."""
    specs = [TensorSpec(name, (2, 256), dtype, 256 if dtype == "F4" else 512)]
    codes = TensorSpec.of("x.weight", (2, 8192), E4M3)
    with files.stream_tensors(tmp_path / "model.safetensors", specs + [codes] * (name != codes.name), {}) as put:
        put(name, np.zeros(specs[0].nbytes, np.uint8))
        if name != codes.name:
            put(codes.name, np.zeros(codes.shape, E4M3))
    with pytest.raises(FileError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq"}, "config.json: expected quant_method fp8, .* or none, got 'gptq'"),
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, r"expected weight_block_size \[128, 128\], got \[64, 128\]"),
    ],
)
def test_refused_configs(tmp_path, quantization, message):
    save(tmp_path / "model.safetensors", {"x.weight": np.ones((2, 2), bfloat16)})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    with pytest.raises(FileError, match=message):
        open_checkpoint(tmp_path)


def index(folder, text):
    (folder / "model.safetensors.index.json").write_text(text if isinstance(text, str) else json.dumps({"weight_map": text}))


def truncated(folder):
    path = folder / "a.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (truncated, "a.safetensors: expected a .safetensors file, got something else or a damaged file"),
        (lambda f: (f / "a.safetensors").write_bytes(b""), r"a.safetensors: expected a .safetensors file, got an empty one"),
        (
            lambda f: (f / "a.safetensors").unlink(),
            r"index.json: expected the files that it names, a.safetensors \(for x.weight\)",
        ),
        (
            lambda f: index(f, {"y.weight": "a.safetensors"}),
            r"a.safetensors: expected the tensor 'y.weight' that .* says is there",
        ),
        (
            lambda f: index(f, {"x.weight": "../a.safetensors"}),
            r"index.json: .* same directory for 'x.weight', got '../a.safetensors'",
        ),
        (lambda f: index(f, {"x.weight": "/a.safetensors"}), r"index.json: .*got '/a.safetensors'"),
        (lambda f: index(f, {"x.weight": "sub/a.safetensors"}), r"index.json: .*got 'sub/a.safetensors'"),
        (lambda f: index(f, {"x.weight": ".."}), r"index.json: .*got '\.\.'"),
        (lambda f: index(f, {"x.weight": 3}), r"index.json: .*got 3"),
        (lambda f: index(f, {"x.weight": "config.json"}), r"config.json: expected a name that ends in .safetensors"),
        (lambda f: index(f, {}), r"index.json: expected a weight_map of tensor names to file names, got {}"),
        (lambda f: index(f, "{"), r"index.json: expected a JSON object, got something else"),
        (lambda f: index(f, "[]"), r"index.json: expected a JSON object, got .*\(list\)"),
        (lambda f: (f / "config.json").write_text("no"), r"config.json: expected a JSON object"),
        (
            lambda f: (f / "model.safetensors.index.json").unlink(),
            r"expected model.safetensors.index.json or model.safetensors in it",
        ),
    ],
)
def test_refused_directories(tmp_path, spoil, message):
    sharded(tmp_path, {"a.safetensors": {"x.weight": np.ones((2, 128), bfloat16)}})
    (tmp_path / "config.json").write_text("{}")
    open_checkpoint(tmp_path)
    spoil(tmp_path)
    with pytest.raises(FileError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


def test_no_such_checkpoint(tmp_path):
    with pytest.raises(FileError, match=r"none.safetensors: expected a file to read, got: No such file"):
        open_checkpoint(tmp_path / "none.safetensors")
    with pytest.raises(FileError, match=r"expected a name that ends in .safetensors"):
        open_checkpoint(tmp_path / "none")
