"""Float checkpoints to FP8 ones: what is written, what others read, and that whatever goes wrong leaves nothing behind."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors

from pyclquant import FileError, ShapeError, cli, convert, files, w8a8
from pyclquant.checkpoint import open_checkpoint
from pyclquant.files import TensorSpec
from pyclquant.formats import FLOAT_DTYPES
from pyclquant.testing import mismatch

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
bfloat16 = np.dtype(ml_dtypes.bfloat16)
layouts = pytest.mark.parametrize("layout", w8a8.SCALE_LAYOUTS)

LINEARS = {
    "model.layers.0.self_attn.q_proj": (256, 384, "bfloat16"),
    "model.layers.0.mlp.experts.0.up_proj": (200, 128, "float32"),
    "model.layers.1.mlp.experts.0.down_proj": (7, 256, "float16"),
}
KEPT = {
    "lm_head": (64, 384, "bfloat16"),
    "model.embed_tokens": (64, 384, "bfloat16"),
    "model.layers.0.mlp.gate": (4, 100, "bfloat16"),
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
STEPS = np.arange(9, dtype=np.int64)


def tensors_of(linears, seed=0):
    rng = np.random.default_rng(seed)
    return {f"{name}.weight": rng.normal(0, 0.1, (n, k)).astype(FLOAT_DTYPES[d]) for name, (n, k, d) in linears.items()}


def write(path, tensors, metadata=None):
    """Also of dtypes that NumPy has and our readers have not."""
    stored = {"int64": "I64"}
    specs = [TensorSpec(n, a.shape, stored.get(a.dtype.name, a.dtype.name), a.nbytes) for n, a in tensors.items()]
    with files.stream_tensors(path, specs, metadata or {}) as put:
        for name, a in tensors.items():
            put(name, a)


@pytest.fixture
def model(tmp_path):
    """A directory with a checkpoint of two shards, as people have them, and its tensors."""
    folder = tmp_path / "model"
    folder.mkdir()
    first = tensors_of(LINEARS | KEPT)
    second = {"model.layers.1.mlp.experts.0.down_proj.weight": first.pop("model.layers.1.mlp.experts.0.down_proj.weight")}
    second |= {"model.norm.weight": np.ones(384, bfloat16), "model.steps": STEPS, "model.layers.1.bias": np.ones((), np.float32)}
    write(folder / SHARDS[0], first, {"format": "pt", "made": "by hand"})
    write(folder / SHARDS[1], second)
    weight_map = {name: file for file, tensors in zip(SHARDS, (first, second), strict=True) for name in tensors}
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": 1}, "weight_map": weight_map})
    write_json(folder / "config.json", {"model_type": "llama", "tie_word_embeddings": False, "torch_dtype": "bfloat16"})
    for name in ("tokenizer.json", "generation_config.json", "templates/chat.jinja"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"this is {name}")
    for name in (
        "pytorch_model.bin",
        "consolidated.safetensors",
        "pytorch_model.bin.index.json",
        ".gitattributes",
        ".git/config",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("not to be copied")
    return folder, first | second


def write_json(path, value):
    path.write_text(json.dumps(value))


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def run(capfd):
    """Run the command line in this process: exit code, stdout, stderr."""

    def command(*arguments):
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main(["convert", *(str(a) for a in arguments)])
        return ended.value.code or 0, *capfd.readouterr()

    return command


def convert_all(dev, folder, out, layout, ignore=()):
    return convert.run(dev, convert.plan(folder, out, layout, ignore))


def contents(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# ---- what is written ----


@layouts
def test_weights_are_those_of_quantize_weight(model, out, dev, layout):
    folder, tensors = model
    convert_all(dev, folder, out, layout)
    written = open_checkpoint(out)
    for name in LINEARS:
        want = w8a8.quantize_weight(dev, tensors[f"{name}.weight"], layout)
        got = written.segment(dev, name)
        assert written.linears[name].scheme == layout
        assert mismatch(got.codes.get(), want.codes.get()) is None
        assert mismatch(got.scales.get(), want.scales.get()) is None
    for name in set(tensors) - {f"{name}.weight" for name in LINEARS} - {"model.steps"}:
        assert mismatch(written.array(name), tensors[name]) is None
    assert written.array("model.steps").tobytes() == STEPS.tobytes()


@layouts
def test_what_others_find(model, out, dev, layout):
    """safetensors' own reader, the index, the names and shapes, config.json and the files beside."""
    folder, tensors = model
    convert_all(dev, folder, out, layout)
    suffix = {"per_row": "weight_scale", "block_128": "weight_scale_inv"}[layout]
    shapes = {
        "per_row": {name: [n, 1] for name, (n, _, _) in LINEARS.items()},
        "block_128": {name: [-(-n // 128), k // 128] for name, (n, k, _) in LINEARS.items()},
    }[layout]
    found, nbytes = {}, 0
    for file in SHARDS:
        with safetensors.safe_open(out / file, framework="np") as stored:
            assert stored.metadata()["format"] == "pt"
            for name in stored.keys():  # noqa: SIM118 - it is no mapping
                part = stored.get_slice(name)
                found[name] = file, part.get_dtype(), list(part.get_shape())
        size = int.from_bytes((out / file).read_bytes()[:8], "little")
        nbytes += (out / file).stat().st_size - 8 - size
    source = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for name, (n, k, _) in LINEARS.items():
        file = source[f"{name}.weight"]
        assert found.pop(f"{name}.weight") == (file, "F8_E4M3", [n, k])
        assert found.pop(f"{name}.{suffix}") == (file, "F32", shapes[name])
    assert {name: (file, shape) for name, (file, _, shape) in found.items()} == {
        name: (source[name], list(a.shape)) for name, a in tensors.items() if name.removesuffix(".weight") not in LINEARS
    }
    assert found["model.steps"][1] == "I64"
    with safetensors.safe_open(out / SHARDS[0], framework="np") as stored:
        assert stored.metadata()["made"] == "by hand"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": nbytes}
    names = [*found, *(f"{name}.{part}" for name in LINEARS for part in ("weight", suffix))]
    assert index["weight_map"] == {name: source.get(name, source.get(name.replace(suffix, "weight"))) for name in sorted(names)}
    assert list(index["weight_map"]) == sorted(names)
    assert contents(out) == sorted(
        [
            *SHARDS,
            "config.json",
            "generation_config.json",
            "model.safetensors.index.json",
            "templates/chat.jinja",
            "tokenizer.json",
        ]
    )
    assert (out / "templates/chat.jinja").read_text() == "this is templates/chat.jinja"


@layouts
def test_config(model, out, dev, layout):
    """Field by field what compressed-tensors and transformers look for; both packages have read what is written here."""
    convert_all(dev, model[0], out, layout)
    config = json.loads((out / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == {"model_type": "llama", "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    if layout == "block_128":
        assert sorted(quantization.pop("modules_to_not_convert")) == sorted(KEPT)
        assert quantization == {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
        return
    assert sorted(quantization.pop("ignore")) == sorted(KEPT)
    (group,) = quantization.pop("config_groups").values()
    assert quantization == {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
    }
    assert group == {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False},
        "input_activations": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True},
        "output_activations": None,
    }


@layouts
def test_in_pieces(model, out, dev, layout, monkeypatch):
    """The same bytes and errors as of whole layers."""
    whole = convert_all(dev, model[0], out, layout)
    monkeypatch.setattr(convert, "PIECE", 1)
    pieces = convert_all(dev, model[0], out.with_name("pieces"), layout)
    assert [row.name for row in whole] == [row.name for row in pieces]
    assert [row.relative_rms for row in pieces] == pytest.approx([row.relative_rms for row in whole], rel=1e-9)
    for file in SHARDS:
        assert (out / file).read_bytes() == (out.with_name("pieces") / file).read_bytes()


@layouts
def test_rows(model, out, dev, layout):
    folder, tensors = model
    plan = convert.plan(folder, out, layout)
    began = []
    rows = {row.name: row for row in convert.run(dev, plan, began.append)}
    assert sorted(began) == sorted(tensors)
    assert set(rows) == set(LINEARS) | set(KEPT)
    written = open_checkpoint(out)
    squares = []
    for name in LINEARS:
        x, row = tensors[f"{name}.weight"].astype(np.float64), rows[name]
        scales = written.scales(written.linear(name))
        scale = scales[:, None] if layout == "per_row" else scales.repeat(128, 0)[: len(x)].repeat(128, 1)
        error = written.array(f"{name}.weight").astype(np.float32) * scale - x
        squares.append((np.sum(x**2), np.sum(error**2)))
        assert row.relative_rms == pytest.approx(np.sqrt(squares[-1][1] / squares[-1][0]), rel=1e-9)
        assert 0.015 < row.relative_rms < 0.035
        assert (row.shape, row.dtype) == (x.shape, tensors[f"{name}.weight"].dtype.name)
        assert (row.bytes_in, row.bytes_out) == (tensors[f"{name}.weight"].nbytes, x.size + scales.nbytes)
    signal, noise = np.sum(squares, axis=0)
    quantized = [row for row in rows.values() if row.kept is None]
    assert convert.relative_rms(quantized) == pytest.approx(np.sqrt(noise / signal), rel=1e-9)
    assert {name: rows[name].kept for name in KEPT} == {
        "lm_head": "*lm_head",
        "model.embed_tokens": "*embed*",
        "model.layers.0.mlp.gate": "*.gate",
    }
    assert all(rows[name].bytes_in == rows[name].bytes_out for name in KEPT)


def test_errors_are_looked_at_in_parts(monkeypatch):
    """Whatever the size of a part, and where it ends within a block of scales."""
    x = np.random.default_rng(3).normal(size=(300, 256)).astype(np.float32)
    codes, scales = x.astype(E4M3), np.arange(1, 7, dtype=np.float32).reshape(3, 2)
    decoded = codes.astype(np.float64) * scales.repeat(128, 0)[:300].repeat(128, 1)
    want = np.sum(x.astype(np.float64) ** 2), np.sum((decoded - x) ** 2)
    for part in (1, 100 * 256, 1 << 20):
        monkeypatch.setattr(convert, "PART", part)
        assert convert.errors(x, codes, scales, "x") == pytest.approx(want, rel=1e-9)


def test_zeros_have_no_error(tmp_path, out, dev):
    single(tmp_path / "model", {"x.weight": np.zeros((4, 128), bfloat16)})
    (row,) = convert_all(dev, tmp_path / "model", out, "per_row")
    assert row.relative_rms == 0


def single(folder, tensors, config="{}"):
    """A checkpoint of one file."""
    folder.mkdir()
    write(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(config)
    return folder


def test_a_single_file_stays_one(tmp_path, out, dev):
    single(tmp_path / "model", {"x.weight": np.ones((4, 128), bfloat16)})
    convert_all(dev, tmp_path / "model", out, "per_row")
    assert contents(out) == ["config.json", "model.safetensors"]
    assert json.loads((out / "config.json").read_text())["quantization_config"]["ignore"] == ["lm_head"]


def test_files_of_a_hub_cache_are_links(model, out, dev):
    folder, _ = model
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for name in (*SHARDS, "tokenizer.json", "config.json"):
        (folder / name).rename(blobs / name)
        (folder / name).symlink_to(f"../blobs/{name}")
    (folder / "dangling.txt").symlink_to("../blobs/none")
    convert_all(dev, folder, out, "per_row")
    assert not any(path.is_symlink() for path in out.rglob("*"))
    assert (out / "tokenizer.json").read_text() == "this is tokenizer.json"
    assert not (out / "dangling.txt").exists()


def test_more_can_be_ignored(model, out, dev):
    folder, tensors = model
    rows = convert_all(dev, folder, out, "block_128", ["*.q_proj", "model.layers.1.*", "lm_head"])
    assert {row.name: row.kept for row in rows if row.name in LINEARS or row.name == "lm_head"} == {
        "lm_head": "lm_head",
        "model.layers.0.self_attn.q_proj": "*.q_proj",
        "model.layers.0.mlp.experts.0.up_proj": None,
        "model.layers.1.mlp.experts.0.down_proj": "model.layers.1.*",
    }
    kept = json.loads((out / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert sorted(kept) == sorted({*KEPT, "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.experts.0.down_proj"})
    name = "model.layers.0.self_attn.q_proj.weight"
    assert mismatch(open_checkpoint(out).array(name), tensors[name]) is None
    with pytest.raises(FileError, match=r"ignore: expected a pattern of layers, got 'q_proj'; there are .* and 3 more"):
        convert.plan(folder, folder.parent / "other", "per_row", ["q_proj"])


# ---- the command ----


@pytest.mark.parametrize(
    ("spelling", "layout"),
    [("per_row", "per_row"), ("per-row", "per_row"), ("block_128", "block_128"), ("block128", "block_128")],
)
def test_command(model, out, run, dev, spelling, layout):
    code, printed, err = run(model[0], out, "--scales", spelling, "--ignore", "*.up_proj", "--json")
    assert (code, err) == (0, "")
    report = json.loads(printed)
    assert (report["device"], report["scales"]) == (dev.name, layout)
    rows = {row["name"]: row for row in report["layers"]}
    assert set(rows) == set(LINEARS) | set(KEPT)
    for name, row in rows.items():
        assert (row["relative_rms"] is None) == (row["kept"] is not None) == (name in KEPT or name.endswith("up_proj"))
        if row["kept"] is None:
            assert row["sqnr_db"] == pytest.approx(-20 * np.log10(row["relative_rms"]))
            assert set(row) == {"name", "shape", "dtype", "bytes_in", "bytes_out", "kept", "relative_rms", "sqnr_db"}
    assert report["other_bytes"] == sum(a.nbytes for a in model[1].values()) - sum(row["bytes_in"] for row in report["layers"])
    assert open_checkpoint(out).linears["model.layers.0.self_attn.q_proj"].scheme == layout


def test_table(model, out, run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    code, printed, err = run(model[0], out, "--scales", "per_row")
    assert (code, err) == (0, "")
    lines = {line.split()[0]: line.split() for line in printed.splitlines() if line.strip()}
    _, shape, before, _, after, _, factor, error, decibels = lines["model.layers.0.self_attn.q_proj"]
    assert (shape, before, after, factor) == ("256×384", "196.6", "99.3", "1.98")
    assert 1.5 < float(error.removesuffix("%")) < 3.5
    assert 29 < float(decibels) < 37
    assert lines["lm_head"][-3:] == ["floats,", "as", "*lm_head"]
    assert lines["quantized"][1:3] == ["3", "layers"]
    assert lines["in"][2:4] == ["3", "layers"]
    assert printed.splitlines()[-1] == f"wrote {out}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scales", "per_tensor"], "expected one of per_row, block_128, got 'per_tensor'"),
        ([], "Missing option '--scales'"),
    ],
)
def test_bad_usage(model, out, run, arguments, message):
    code, _, err = run(model[0], out, *arguments)
    assert code == 2
    assert message in " ".join(err.replace("│", " ").split())
    assert not out.exists()


def test_help(run):
    code, printed, _ = run("--help")
    assert code == 0
    assert "MODEL_DIR" in printed


# ---- what goes wrong ----


def change_tensor(name, value, file=0):
    def change(folder):
        path = folder / SHARDS[file]
        tensors = {e.name: e.load().copy() for e in files.safetensors_entries(path)[0] if e.dtype != "I64"}
        tensors[name] = value(tensors[name]) if callable(value) else value
        path.unlink()
        write(path, tensors)
        index = folder / "model.safetensors.index.json"
        weight_map = json.loads(index.read_text())["weight_map"]
        write_json(index, {"weight_map": {n: f for n, f in weight_map.items() if n != "model.steps"} | {name: SHARDS[file]}})

    return change


def with_value(where, value):
    def change(a):
        a[where] = value
        return a

    return change


Q = "model.layers.0.self_attn.q_proj.weight"

FAULTS = {
    "truncated": (
        lambda f: os.truncate(f / SHARDS[1], (f / SHARDS[1]).stat().st_size - 10),
        rf"{SHARDS[1]}: expected a .safetensors file, got something else or a damaged",
    ),
    "truncated header": (lambda f: os.truncate(f / SHARDS[0], 20), rf"{SHARDS[0]}: expected a .safetensors file"),
    "missing shard": (
        lambda f: (f / SHARDS[1]).unlink(),
        rf"expected the files that it names, {SHARDS[1]} \(for .*\) is missing",
    ),
    "leaving file name": (
        lambda f: write_json(f / "model.safetensors.index.json", {"weight_map": {"x.weight": "../x.safetensors"}}),
        r"expected the name of a file in the same directory for 'x.weight', got '../x.safetensors'",
    ),
    "leaving tensor name": (
        change_tensor("../../x.weight", np.ones((4, 128), bfloat16)),
        r"expected names of tensors that stay .*, got '../../x.weight'",
    ),
    "NaN": (change_tensor(Q, with_value((200, 3), np.nan)), rf"{Q} .*: expected finite weights, got nan at \[200, 3\]"),
    "Inf": (change_tensor(Q, with_value((0, 383), -np.inf)), rf"{Q} .*: expected finite weights, got -inf at \[0, 383\]"),
    "K": (
        change_tensor(Q, np.ones((4, 100), bfloat16)),
        rf"{Q} .*: expected K a positive multiple of 128, got N=4, K=100; leave such layers in floats with --ignore '\*.q_proj'$",
    ),
    "no rows": (change_tensor(Q, np.ones((0, 128), bfloat16)), rf"{Q} .*, got N=0, K=128"),
    "codes without scales": (change_tensor(Q, np.ones((4, 128), E4M3)), rf"{Q} .*: expected one of .*, got none"),
    "scales beside floats": (
        change_tensor(f"{Q}_scale", np.ones((256, 1), np.float32)),
        rf"{Q}_scale .*: expected float8_e4m3fn codes {Q} beside it, got {Q} \(bfloat16",
    ),
    "quantized by others": (change_tensor("x.qweight", np.ones((4, 128), np.int8)), r"got GPTQ or AWQ"),
    "quantized config": (
        lambda f: write_json(f / "config.json", {"quantization_config": {"quant_method": "fp8"}}),
        r"expected float weights, got a quantized checkpoint \(quantization_config\)",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), r"expected a directory with config.json and weights, got none"),
    "spoilt config": (lambda f: (f / "config.json").write_text("{"), r"config.json: expected a JSON object"),
    "nothing to do": (
        lambda f: write_json(f / "model.safetensors.index.json", {"weight_map": {"lm_head.weight": SHARDS[0]}}),
        r"expected layers to quantize, got none but lm_head",
    ),
    "out in model": (lambda f: (f.parent / "out").symlink_to(f / "fp8"), r"out: expected a new name, got one that exists"),
    "out exists": (lambda f: (f.parent / "out").mkdir(), r"out: expected a new name, got one that exists"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(model, out, run, fault):
    """One line, exit status 1, and the directory as it was."""
    folder, _ = model
    spoil, message = FAULTS[fault]
    spoil(folder)
    before = sorted(path.name for path in folder.parent.iterdir())
    code, printed, err = run(folder, out, "--scales", "per_row")
    assert (code, printed) == (1, "")
    assert err.startswith("pyclquant: ")
    assert err.count("\n") == 1
    with pytest.raises(FileError, match=message):
        raise FileError(err.strip())
    assert sorted(path.name for path in folder.parent.iterdir()) == before
    assert not out.is_dir() or not any(out.iterdir())


def test_where_a_nan_is_in_a_later_piece(model, out, dev, monkeypatch):
    monkeypatch.setattr(convert, "PIECE", 1)
    monkeypatch.setattr(convert, "PART", 1)
    FAULTS["NaN"][0](model[0])
    with pytest.raises(FileError, match=FAULTS["NaN"][1]):
        convert_all(dev, model[0], out, "per_row")


@layouts
def test_what_is_quantized_is_not_converted_again(model, out, dev, layout):
    convert_all(dev, model[0], out, layout)
    (out / "config.json").write_text("{}")
    with pytest.raises(
        FileError, match=r"expected float weights, got a quantized checkpoint \(.*weight .float8_e4m3fn .* and 2 more\)"
    ):
        convert.plan(out, out.parent / "again", "per_row")


def test_places_that_cannot_be(model, out):
    folder, _ = model
    with pytest.raises(FileError, match=r"fp8: expected a place outside of .*model, got one in it"):
        convert.plan(folder, folder / "fp8", "per_row")
    with pytest.raises(FileError, match=r"expected a name in a folder that exists, .*none is none"):
        convert.plan(folder, out.parent / "none" / "out", "per_row")
    with pytest.raises(ShapeError, match="scale_layout: expected one of"):
        convert.plan(folder, out, "per_tensor")


def test_a_place_taken_meanwhile_is_left_alone(model, out, dev):
    def take(_):
        out.mkdir(exist_ok=True)
        (out / "theirs").write_text("precious")

    with pytest.raises(FileError, match=r"out: expected to write a folder, got: .* not empty"):
        convert.run(dev, convert.plan(model[0], out, "per_row"), take)
    assert contents(out) == ["theirs"]
    assert sorted(path.name for path in out.parent.iterdir()) == ["model", "out"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, SystemExit])
@pytest.mark.parametrize("step", [0, 3, 8])
def test_whatever_interrupts_leaves_nothing(model, out, dev, error, step):
    """At the first, a middle and the last tensor."""
    count = 0

    def stop(_):
        nonlocal count
        count += 1
        if count > step:
            assert any(path.name.startswith(".out.") for path in out.parent.iterdir())
            raise error

    with pytest.raises(error):
        convert.run(dev, convert.plan(model[0], out, "per_row"), stop)
    assert [path.name for path in out.parent.iterdir()] == ["model"]


CHILD = """
import sys, time
from pyclquant import cli, convert
real, arguments = convert.quantize, sys.argv[1:]
def quantize(*args):
    row = real(*args)
    print("begun", flush=True)
    time.sleep(60)
    return row
convert.quantize = quantize
cli.main(["convert", *arguments, "--scales", "block128"])
"""

LIMITED = """
import resource, sys
from pyclquant import Device, cli, convert
arguments, dev = sys.argv[1:], Device.pick()
cli.pick = lambda *_: dev
convert.run(dev, convert.plan(arguments[0], arguments[1] + "-first", "block_128"))  # builds the kernels
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
cli.main(["convert", *arguments, "--scales", "block128"])
"""


def child(code, folder, out):
    command = [sys.executable, "-c", code, folder, out]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals(model, out, number):
    """In the middle, with a part written."""
    with child(CHILD, model[0], out) as process:
        assert process.stdout.readline() == "begun\n"
        (part,) = [path for path in out.parent.iterdir() if path.name.startswith(".out.")]
        assert [path.name for path in part.iterdir()] == [SHARDS[0]]
        process.send_signal(number)
        process.communicate(timeout=50)
    assert process.returncode in ((1, 130) if number == signal.SIGINT else (128 + number,))
    assert [path.name for path in out.parent.iterdir()] == ["model"]


def test_signals_that_others_mind_are_left_to_them():
    mine = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with cli.ending_in_order():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, mine)


def test_full_disk(model, out):
    """A limit on the size of files stands for it: the write fails in the middle, for real."""
    with child(LIMITED, model[0], out) as process:
        _, err = process.communicate(timeout=100)
    assert process.returncode == 1, err
    (line,) = [line for line in err.splitlines() if line.startswith("pyclquant: ")]
    assert line == f"pyclquant: {out}: expected to write a folder, got: File too large"
    assert sorted(path.name for path in out.parent.iterdir()) == ["model", "out-first"]


# ---- memory ----

LARGE = (4096, 2048)
"""Of 16 MiB in bfloat16."""

MEMORY = """
import sys
import numpy as np, ml_dtypes
from pyclquant import Device, convert, w8a8
folder, out = sys.argv[1:]
dev = Device.pick()
plan = convert.plan(folder, out, "per_row")
w8a8.quantize_weight(dev, np.ones((16, 2048), ml_dtypes.bfloat16), "per_row").codes.get()  # builds the kernels
print("ready", flush=True)
sys.stdin.readline()
convert.run(dev, plan)
print("done", flush=True)
sys.stdin.readline()
"""


def anonymous(pid):
    """Bytes of a process in memory that no file stands behind: the memory map does not count."""
    fields = dict(line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return 1024 * sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))


def test_memory(tmp_path, out):
    """Eight tensors of 16 MiB and small ones: never as much at a time as one of them and its codes."""
    folder, rng = tmp_path / "model", np.random.default_rng(4)
    large = {f"model.layers.{i}.mlp.up_proj.weight": rng.normal(size=LARGE).astype(bfloat16) for i in range(8)}
    small = {f"model.layers.{i}.norm.weight": np.ones(2048, bfloat16) for i in range(8)}
    head = {"lm_head.weight": rng.normal(size=LARGE).astype(bfloat16)}
    single(folder, large | small | head)
    floats, codes = next(iter(large.values())).nbytes, LARGE[0] * LARGE[1]
    # malloc gives large pieces back at once when its threshold is fixed: what is counted is in use
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144"}
    with subprocess.Popen(
        [sys.executable, "-c", MEMORY, folder, out], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout.readline() == "ready\n"
        base = peak = anonymous(process.pid)
        process.stdin.write("go\n")
        process.stdin.flush()
        while not select.select([process.stdout], [], [], 0.0005)[0]:
            peak = max(peak, anonymous(process.pid))
        process.communicate("end\n", timeout=60)
    assert process.returncode == 0
    assert open_checkpoint(out).linears["model.layers.7.mlp.up_proj"].scheme == "per_row"
    print(f"peak {(peak - base) / 2**20:.1f} MiB above the beginning, largest tensor {floats / 2**20:.0f} MiB")
    assert 2 * convert.PIECE < peak - base < floats + codes  # the floats of a piece, at least, are seen
