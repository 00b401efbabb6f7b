"""The command line: JSON that programs can rely on, exit codes, one line for each thing that a user can get wrong."""

import contextlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyopencl as cl
import pytest
import safetensors.numpy

from pyclquant import bench, cli, device, evaluate, files, icd, plot, reference, selftest, variants
from pyclquant.capabilities import Capabilities
from pyclquant.errors import NoDeviceError
from pyclquant.formats import FLOAT_DTYPES, FORMATS
from pyclquant.testing import mismatch, sqnr_db

DRIVERS_OWN = re.compile(r"^MESA: |^\d+ warnings? generated\.$")
"""Lines that PoCL and rusticl write to stderr by themselves."""
SAMPLE = Path(__file__).parent / "data" / "kv_sample.safetensors"


@pytest.fixture(autouse=True)
def hurry(quick_bench, monkeypatch):
    monkeypatch.setattr(evaluate, "SECONDS", 0.0)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def run(capfd):
    """Run the command line in this process: exit code, stdout, stderr."""

    def command(*arguments):
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main([str(a) for a in arguments])
        out, err = capfd.readouterr()
        err = "".join(line for line in err.splitlines(True) if not DRIVERS_OWN.search(line))
        return ended.value.code or 0, out, err

    return command


@pytest.fixture
def run_json(run):
    """As `run`, with --json: exit code and what was printed. NaN and Infinity are no JSON."""

    def command(*arguments):
        code, out, err = run(*arguments, "--json")
        assert err == ""
        return code, json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))

    return command


@pytest.fixture
def small(tmp_path):
    """A file with one tensor of each dtype, odd and round."""
    rng = np.random.default_rng(5)
    tensors = {f"{d}.{dim}": rng.normal(0, 3, (5, 2, dim)).astype(t) for d, t in FLOAT_DTYPES.items() for dim in (7, 64)}
    safetensors.numpy.save_file(tensors, tmp_path / "small.safetensors", metadata={"layout": "any", "format": "pt"})
    order = [entry.name for entry in files.open_tensors(tmp_path / "small.safetensors").entries]
    return tmp_path / "small.safetensors", {name: tensors[name] for name in order}


@pytest.fixture
def no_driver(monkeypatch):
    nothing = device.Discovery((), ("driver left out: /usr/lib/broken.so: killed by signal 11 (SIGSEGV)",))
    monkeypatch.setattr(cli, "discover", lambda *_: nothing)
    monkeypatch.setattr(device, "discover", lambda *_: nothing)


# ---- the program ----


def test_version(run):
    assert run("--version") == (0, f"pyclquant {version('pyclquant')}\n", "")


def test_module_is_the_program():
    child = subprocess.run([sys.executable, "-m", "pyclquant", "--version"], capture_output=True, text=True, check=False)
    assert (child.returncode, child.stdout) == (0, f"pyclquant {version('pyclquant')}\n")


@pytest.mark.parametrize("arguments", [["--help"], *([c, "--help"] for c in ("probe", "kv", "restore", "selftest", "bench"))])
def test_help(run, arguments):
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    assert "Usage: pyclquant" in out


def test_matplotlib_is_not_imported_before_it_draws():
    code = "import sys, pyclquant.cli; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- probe ----


def test_probe(run_json, dev):
    code, found = run_json("probe")
    assert code == 0
    assert found["pyclquant"] == version("pyclquant")
    mine = next(d for d in found["devices"] if d["reported"] == dev.capabilities.reported)
    for d in found["devices"]:
        assert set(d) == {"platform", "name", "vendor", "driver", "type", "reported", "works", "used"}
        assert all(isinstance(row["ok"], bool) and isinstance(row["reason"], str) for row in d["works"].values())
    used = {
        "kv_quantize": (variants.KV, variants.Blocks(128, 128, 4096 * 8, 2)),
        "kv_dequantize": (variants.KV, variants.Blocks(128, 128, 4096 * 8, 2, restore=True)),
        "act_quant": (variants.ACT, variants.Blocks(4096, 4096, 1, 2)),
        "gemv M=1": (variants.GEMV, variants.Product(1, 4096, 4096)),
        "gemv M=32": (variants.GEMV, variants.Product(32, 4096, 4096)),
    }
    assert all(list(d["used"]) == list(used) for d in found["devices"])
    for op, (table, shape) in used.items():
        assert mine["used"][op]["variant"] == variants.select(table, dev.capabilities, shape).variant
        assert mine["used"][op]["refused"] == variants.refusals(table, dev.capabilities, shape)
    assert isinstance(found["notes"], list)


def test_probe_shows_all_whatever_is_taken_by_default(monkeypatch, run):
    monkeypatch.setenv(device.ENVIRONMENT, "no such device")
    code, out, _ = run("probe")
    assert code == 0
    assert "(taken by default)" not in out
    monkeypatch.delenv(device.ENVIRONMENT)
    assert run("probe")[1].count("(taken by default)") == 1


def test_probe_for_people(run, dev):
    code, out, err = run("probe", "--device", dev.capabilities.reported["name"])
    assert (code, err) == (0, "")
    assert dev.capabilities.reported["name"] in out
    assert max(map(len, out.splitlines())) <= 100
    ops = ("kv_quantize", "kv_dequantize", "act_quant", "gemv M=1", "gemv M=32")
    for word in ("feature", "reported", "works", "seen", "refused", *ops, *dev.capabilities.works):
        assert word in out


def test_probe_tells_of_a_device_that_runs_nothing(monkeypatch, run_json):
    monkeypatch.setattr(cli, "capabilities", lambda found, fresh: Capabilities(found.reported, {}))
    code, found = run_json("probe")
    assert code == 0
    for row in found["devices"][0]["used"].values():
        assert (row["variant"], row["refused"]["base"]) == (None, "base: not probed")


def test_probe_fresh_asks_again(monkeypatch, run, dev):
    asked = []

    def again(found, fresh):
        asked.append(fresh)
        return dev.capabilities

    monkeypatch.setattr(cli, "capabilities", again)
    code, _, err = run("probe", "--fresh")
    assert code == 0
    assert set(asked) == {True}
    assert "probing " in err


def test_first_probe_is_announced(monkeypatch, tmp_path, run, dev):
    monkeypatch.setattr(icd, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(cli, "capabilities", lambda found, fresh: dev.capabilities)
    _, _, err = run("probe")
    assert "probing " in err
    assert "once" in err
    assert run("probe", "--json")[2] == ""


# ---- kv and restore ----


def test_kv(run_json, small, dev):
    path, tensors = small
    code, found = run_json("kv", path, "--group-size", 16)
    assert code == 0
    assert found["device"] == dev.name
    assert [(t["name"], t["format"]) for t in found["tensors"]] == [(name, f) for name in tensors for f in FORMATS]
    for t in found["tensors"]:
        assert list(t) == [
            *("name", "shape", "dtype", "format", "granularity", "group_size", "bytes_in", "bytes_out"),
            *("sqnr_db", "max_abs_err", "variant", "quantize_us", "dequantize_us"),
        ]
        x = tensors[t["name"]]
        how = {"granularity": t["granularity"], "group_size": t["group_size"]}
        assert how == (
            {"granularity": "per_group", "group_size": 16}
            if t["format"] == "int4"
            else {"granularity": "per_head", "group_size": None}
        )
        codes, scales, mins = reference.quantize(x, t["format"], **how)
        y = reference.dequantize(codes, scales, mins, t["format"], x.shape, dtype=t["dtype"], **how)
        assert (t["shape"], t["dtype"], t["bytes_in"]) == (list(x.shape), x.dtype.name, x.nbytes)
        assert t["bytes_out"] == codes.nbytes + scales.nbytes + (mins.nbytes if mins is not None else 0)
        assert t["sqnr_db"] == pytest.approx(sqnr_db(x, y))
        assert t["max_abs_err"] == np.abs(x.astype(np.float64) - y.astype(np.float64)).max()
        assert t["quantize_us"] > 0
        assert t["dequantize_us"] > 0


@pytest.mark.parametrize("granularity", ["per_tensor", "per_token", "per_head", "per_group"])
def test_kv_granularity(run_json, granularity):
    _, found = run_json("kv", SAMPLE, "--format", "int8,int4", "--granularity", granularity)
    assert {t["format"]: (t["granularity"], t["group_size"]) for t in found["tensors"]} == {
        "int8": (granularity, 64 if granularity == "per_group" else None),
        "int4": ("per_group", 64),
    }


def test_kv_figures_that_are_none(run_json, tmp_path):
    np.savez(
        tmp_path / "k.npz",
        zero=np.zeros((3, 8), np.float32),
        none=np.empty((0, 8), np.float32),
        nan=np.full((2, 8), np.nan, np.float32),
    )
    code, found = run_json("kv", tmp_path / "k.npz", "--format", "int8")
    assert code == 0
    assert {t["name"]: t["sqnr_db"] for t in found["tensors"]} == {"zero": None, "none": None, "nan": None}
    assert [t["quantize_us"] is None for t in found["tensors"]] == [False, True, False]


def test_kv_for_people(run):
    code, out, err = run("kv", SAMPLE)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 100
    assert sum("layers.7.k" in line for line in lines) == 1
    totals = [line for line in lines if line.startswith("total")]
    assert [line.split()[3] for line in totals] == list(FORMATS)
    assert "262.1 kB" in totals[0]
    assert "139.3 kB" in totals[0]
    assert "1.88" in totals[0]


def test_kv_tells_what_it_left_out(run, tmp_path):
    np.savez(tmp_path / "k.npz", **{"k[red]": np.ones((3, 8), np.float32), "n": np.arange(3)})
    code, out, _ = run("kv", tmp_path / "k.npz", "--format", "int8")
    assert code == 0
    assert "k[red]" in out
    assert "note: left out, neither float32 nor bfloat16 nor float16: n (int64 [3])" in out


@pytest.mark.parametrize("format", FORMATS)
def test_kv_writes_and_restore_brings_back(run, run_json, small, tmp_path, dev, format):
    path, tensors = small
    out, back = tmp_path / "q.safetensors", tmp_path / "back.safetensors"
    code, text, _ = run("kv", path, "--format", format, "-o", out)
    assert code == 0
    assert f"wrote {out}" in text.replace("\n", "")
    code, found = run_json("restore", out, "-o", back)
    assert code == 0
    assert found == {
        "device": dev.name,
        "tensors": [{"name": name, "shape": list(tensors[name].shape), "dtype": tensors[name].dtype.name} for name in tensors],
    }
    restored = files.open_tensors(back)
    assert restored.metadata == {"layout": "any", "format": "pt"}
    for name, y in restored:
        codes, scales, mins = reference.quantize(tensors[name], format, group_size=64 if format == "int4" else None)
        want = reference.dequantize(
            codes, scales, mins, format, y.shape, dtype=y.dtype.name, group_size=64 if format == "int4" else None
        )
        assert mismatch(y, want) is None


def test_restore_to_another_dtype(run, small, tmp_path):
    out, back = tmp_path / "q.safetensors", tmp_path / "back.safetensors"
    run("kv", small[0], "--format", "int8", "-o", out)
    code, text, _ = run("restore", out, "-o", back, "--dtype", "float16")
    assert code == 0
    assert f"wrote 6 tensors to {back}" in text.replace("\n", "")
    assert {y.dtype.name for _, y in files.open_tensors(back)} == {"float16"}


def test_failed_run_keeps_the_output(run, tmp_path, monkeypatch):
    out = tmp_path / "q.safetensors"
    out.write_text("precious")

    def full(tensors, file, metadata):
        Path(file).write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.numpy, "save_file", full)
    code, text, err = run("kv", SAMPLE, "--format", "int8", "-o", out)
    assert (code, text) == (1, "")
    assert err == f"pyclquant: {out}: expected to write a file, got: No space left on device\n"
    assert out.read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["q.safetensors"]


# ---- selftest ----


def test_selftest(run_json, dev, monkeypatch):
    every = selftest.all_cases
    monkeypatch.setattr(selftest, "all_cases", lambda format: list(every(format))[:2])
    monkeypatch.setattr(selftest, "all_projections", lambda layout: list(selftest.quick_projections())[:1])
    code, found = run_json("selftest")
    assert code == 0
    assert found["device"] == dev.name
    assert found["ok"] is True
    assert all(list(r) == ["op", "format", "variant", "cases", "ok", "detail"] for r in found["results"])
    assert [(r["op"], r["format"], r["variant"]) for r in found["results"]] == list(selftest.steps())


def test_selftest_counts_its_steps(run, monkeypatch):
    totals = []

    @contextlib.contextmanager
    def counted(quiet, total):
        told = []
        yield told.append
        totals.append((total, len(told)))

    monkeypatch.setattr(cli, "steps", counted)
    monkeypatch.setattr(selftest, "run_one", lambda dev, *what: selftest.Result(*what, 1, True, ""))
    assert run("selftest")[0] == 0
    ((total, told),) = totals
    assert total == told == len(list(selftest.steps()))


def test_selftest_for_people(run, monkeypatch):
    rows = (
        ("kv", "int8", "row", 3, True, ""),
        ("act_quant", "per_row", "row", 7, True, ""),
        ("gemv", "block_128", "mma", 7, True, ""),
    )
    monkeypatch.setattr(selftest, "run", results(*rows))
    code, out, err = run("selftest")
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[1:] == [
        "operation variant format, scales cases result detail",
        "kv row int8 3 equal",
        "act_quant row per_row 7 equal",
        "gemv mma block_128 7 within bounds",
        "all as the reference: bytes equal, sums of products within their bounds",
    ]


def results(*rows):
    return lambda dev, progress: [selftest.Result(*row) for row in rows]


def test_selftest_that_fails(run, run_json, monkeypatch):
    bad = ("kv", "int8", "row", 3, False, "codes: expected 1, got [2] at (0, 1)")
    monkeypatch.setattr(selftest, "run", results(bad, ("kv", "int8", "base", 3, True, "")))
    code, found = run_json("selftest")
    assert (code, found["ok"]) == (1, False)
    code, out, _ = run("selftest")
    assert code == 1
    assert "codes: expected 1, got [2] at (0, 1)" in out
    assert "NOT as the reference" in out
    assert "all as" not in out


def test_selftest_that_runs_nothing_fails(run, monkeypatch):
    refused = "not run: force: row cannot run on this: base: not probed"
    monkeypatch.setattr(
        selftest, "run", results(("kv", "int8", "row", 0, True, refused), ("kv", "int4", "row", 0, True, refused))
    )
    code, out, _ = run("selftest")
    assert code == 1
    assert out.count("base: not probed") == 1


# ---- bench ----


def test_bench(run_json, dev):
    code, found = run_json("bench", "--shape", "960,64", "--format", "fp8_e5m2", "--seconds", 0, "--op", "kv")
    assert code == 0
    assert found["device"] == dev.name
    copy, read = found["floors"]
    assert set(copy) == set(read) == {"kind", "nbytes", "median_us", "gb_s", "how"}
    assert (copy["kind"], read["kind"]) == ("copy", "read")
    assert [r["op"] for r in found["results"]] == ["kv_quantize", "kv_dequantize"]
    for r in found["results"]:
        assert set(r) == RESULT
        assert (r["format"], r["shape"], r["correct"]) == ("fp8_e5m2", [960, 64], True)
        assert r["of_floor"] == pytest.approx(r["gb_s"] / copy["gb_s"])
        assert r["rows"] is r["host_us"] is None
        assert [(p["name"], p["median_us"] > 0, p["note"]) for p in r["peers"]] == [("NumPy", True, "")]
    assert found["launch_us"] > 0
    assert found["gops"] is None
    assert found["growth"] == []
    how = [found[key] for key in ("pyclquant", "dtype", "granularity", "group_size", "seconds")]
    assert how == [version("pyclquant"), "bfloat16", "per_head", 64, 0]


RESULT = {
    *("op", "format", "variant", "shape", "rows", "nbytes", "operations", "floor", "correct", "detail"),
    *("median_us", "gb_s", "of_floor", "floor_us", "peers", "host_us"),
}
"""Keys of a result of `bench --json`."""


def test_bench_of_projections(run_json, dev):
    options = ("--op", "gemv,proj", "--shape", "300,256", "--rows", "2,17", "--rows", "1", "--scales", "block_128")
    code, found = run_json("bench", *options, "--seconds", 0)
    assert code == 0
    assert [f["kind"] for f in found["floors"]] == ["read"]
    assert [(r["op"], r["rows"]) for r in found["results"]] == [(op, m) for op in ("gemv", "proj") for m in (2, 17, 1)]
    for r in found["results"]:
        assert set(r) == RESULT
        assert (r["format"], r["shape"], r["floor"], r["correct"]) == ("block_128", [300, 256], "read", True)
        shape = variants.Product(r["rows"], 300, 256, "block_128")
        assert r["variant"] == variants.select(variants.GEMV, dev.capabilities, shape).variant
        assert r["of_floor"] == pytest.approx(r["gb_s"] / found["floors"][0]["gb_s"])
        assert (r["host_us"] is None) == (r["op"] == "gemv")
    assert set(found["results"][-1]["host_us"]) == {"enqueue", "proj"}


@pytest.mark.parametrize("shape", ["256", "7,256"])
def test_bench_of_act_quant(run_json, shape):
    code, found = run_json("bench", "--op", "act_quant", "--shape", shape, "--rows", 3, "--seconds", 0)
    assert code == 0
    ops = [(r["op"], r["format"]) for r in found["results"]]
    assert ops == [(op, layout) for op in ("act_quant", "act_quant_silu") for layout in ("per_row", "block_128")]
    assert all((r["shape"], r["rows"], r["floor"]) == ([3, 256], 3, "copy") for r in found["results"])


def test_bench_of_many_sizes(run_json):
    options = ("--scales", "per_row", "--seconds", 0, "--no-peers")
    code, found = run_json("bench", "--op", "act_quant", "--shape", "4352", "--sweep", "--rows", 3, *options)
    assert code == 0
    assert [r["shape"] for r in found["results"] if r["op"] == "act_quant"] == [[3, k] for k in (1024, 2176, 4352)]
    code, found = run_json("bench", "--op", "gemv", "--shape", "1024,128", "--sweep", "--shape", "300,128", "--rows", 2, *options)
    assert code == 0
    assert [r["shape"][0] for r in found["results"]] == [256, 512, 1024, 300]
    assert [r["peers"] for r in found["results"]] == [[]] * 4
    for line in found["growth"]:  # none when the time does not grow: all are of kilobytes
        assert set(line) == {"op", "format", "variant", "rows", "launch_us", "gb_s", "worst", "worst_nbytes", "points"}
        assert [p["nbytes"] for p in line["points"]] == sorted(r["nbytes"] for r in found["results"])


def test_bench_alone_measures_everything(run, monkeypatch):
    asked = []

    def no_run(dev, jobs, *_):
        asked.append(jobs)
        return bench.Report("x", (), ())

    monkeypatch.setattr(bench, "run", no_run)
    assert run("bench")[0] == 0
    assert run("bench", "--variant", "mma", "--variant", "vector")[0] == 0
    assert run("bench", "--variant", "vector_shuffle", "--format", "int8")[0] == 0
    assert run("bench", "--op", "gemv", "--shape", "96,128", "--shape", "5,256")[0] == 0
    everything = dict(asked[0])
    assert list(everything) == ["kv", "act_quant", "gemv", "proj"]
    assert everything["kv"].shape in ((262144, 128), (1048576, 128))
    for op in ("act_quant", "gemv", "proj"):
        spec = everything[op]
        assert (spec.weight, spec.rows, spec.scales) == ((8192, 8192), (1, 8, 32), ("per_row", "block_128"))
        assert spec.variants == (None,)
    both = ("mma", "vector")
    assert {op: spec.variants for op, spec in asked[1]} == {
        "kv": ("vector",),
        "act_quant": ("vector",),
        "gemv": both,
        "proj": both,
    }
    assert [(op, spec.variants) for op, spec in asked[2]] == [("kv", ("vector_shuffle",))]
    assert [(op, spec.weight) for op, spec in asked[3]] == [("gemv", (96, 128)), ("gemv", (5, 256))]


def test_bench_of_projections_for_people(run, monkeypatch):
    options = ("bench", "--op", "act_quant,gemv,proj", "--shape", "300,256", "--rows", "1,130", "--seconds", 0)
    code, out, err = run(*options)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 100
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "operation scales variant shape M median GB/s × floor NumPy result" in lines
    assert "host time of scales shape M enqueue() proj()" in lines
    assert any(re.match(r"act_quant_silu block_128 \w+ 130×256 130 [\d.,]+ µs .* µs right$", line) for line in lines)
    assert any(re.match(r"gemv per_row \w+ 300×256 1 [\d.,]+ µs [\d.]+ [\d.]+ [\d.,]+ µs right$", line) for line in lines)
    assert any(re.match(r"proj per_row 300×256 130 [\d.,]+ µs [\d.,]+ µs$", line) for line in lines)
    assert not any(line.startswith("kv_") for line in lines)
    assert "torch" not in out


def test_bench_beside_torch_for_people(run, monkeypatch):
    what = ((300, 256), 8, 80_000, 160_000, "read")
    numpy = bench.Beside("NumPy", None, "too slow")
    peers = (numpy, bench.Beside("torch fp8", 39.04, "with 16 rows"), bench.Beside("torch bf16", 50.0))
    row = bench.Result("gemv", "per_row", "mma", *what, True, "", 20.0, 4.0, 0.8, 16.0, peers)
    other = replace(row, format="block_128", peers=(numpy,))
    report = bench.Report("x", (), (row, other, bench.Result("gemv", "block_128", "vector", *what, False, "off")), 3.0)
    monkeypatch.setattr(bench, "run", lambda *_: report)
    code, out, _ = run("bench")
    assert code == 1
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "launch 3.0 µs an empty kernel of one work-item" in lines
    assert "operation scales variant shape M median GB/s × floor NumPy torch fp8 torch bf16 result" in lines
    assert "gemv per_row mma 300×256 8 20.0 µs 4.0 1.25 - 39.0 µs 50.0 µs right" in lines
    assert "gemv block_128 mma 300×256 8 20.0 µs 4.0 1.25 - right" in lines
    assert "gemv block_128 vector 300×256 8 WRONG: off" in lines
    assert lines[-2:] == ["note: NumPy, too slow", "note: torch fp8, with 16 rows"]


def test_bench_for_people(run):
    options = ("--shape", "7,3,32", "--format", "int8", "--seconds", 0, "--dtype", "float32", "--granularity", "per_tensor")
    code, out, err = run("bench", "--op", "kv", *options, "--no-peers", "--variant", "base")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 100
    for word in (
        "7×3×32",
        "float32, scales per_tensor",
        "per_tensor",
        "read floor",
        "copy floor",
        "kv_quantize",
        "kv_dequantize",
        "base",
        "right",
    ):
        assert word in out


def test_bench_of_a_wrong_kernel(run, run_json, monkeypatch):
    right = reference.dequantize
    monkeypatch.setattr(reference, "dequantize", lambda *a, **k: right(*a, **k) * -1)
    options = ("bench", "--op", "kv", "--shape", "9,64", "--format", "int8", "--seconds", 0)
    code, found = run_json(*options)
    assert code == 1
    assert [r["correct"] for r in found["results"]] == [True, False]
    assert found["results"][1]["gb_s"] is None
    code, out, _ = run(*options)
    assert code == 1
    wrong = next(line for line in out.splitlines() if line.startswith("kv_dequantize"))
    assert "WRONG" in wrong
    assert "µs" not in wrong


# ---- figures ----


def test_plots(run, tmp_path):
    pytest.importorskip("matplotlib")
    tensors = ("bench", "--op", "kv", "--shape", "96,64", "--seconds", 0)
    projections = ("bench", "--op", "act_quant,gemv", "--shape", "64,128", "--rows", "1,3", "--seconds", 0)
    several = ("bench", "--op", "kv", "--format", "int4", "--shape", "96,64", "--shape", "960,64", "--seconds", 0)
    for n, command in enumerate((("kv", SAMPLE), tensors, projections, several)):
        path = tmp_path / f"{n}.png"
        code, _, err = run(*command, "--plot", path)
        assert (code, err) == (0, "")
        assert path.read_bytes().startswith(b"\x89PNG")


def drawn(monkeypatch, report, tmp_path):
    """The panels of the figure of a report, by title."""
    pytest.importorskip("matplotlib")
    kept = []
    monkeypatch.setattr(plot, "save", lambda fig, path: kept.append(fig))
    plot.plot_bench(report, tmp_path / "k.png")
    return {ax.get_title(loc="left"): ax for ax in kept[0].axes}


def result(op, format, shape, rows, nbytes, operations, us, floor="read"):
    """A right one, of a floor of 100 GB/s."""
    return bench.Result(
        op, format, "row", shape, rows, nbytes, operations, floor, True, "", us, nbytes / us * 1e-3, nbytes / us * 1e-5
    )


def test_roofline_has_the_measured_roofs(monkeypatch, tmp_path):
    floors = (bench.Floor("read", 10**6, 10.0, 100.0, ""), bench.Floor("copy", 10**5, 10.0, 10.0, ""))
    results = [result("gemv", "per_row", (1000, 1000), m, 10**6, 2 * 10**6 * m, 20.0 * m) for m in (4, 1)]
    wrong = bench.Result("gemv", "block_128", "row", (1000, 1000), 1, 10**6, 2 * 10**6, "read", False, "off")
    panels = drawn(monkeypatch, bench.Report("x", floors, (*results, wrong), 1.0, 150.0), tmp_path)
    assert set(panels) == {"Roofline", "Time over the floor"}
    memory, arithmetic, gemv = panels["Roofline"].get_lines()
    assert [y / x for x, y in memory.get_xydata()] == pytest.approx([100.0, 100.0])
    assert memory.get_xydata()[1] == pytest.approx([1.5, 150.0])
    assert arithmetic.get_xydata() == pytest.approx(np.array([[1.5, 150.0], [24.0, 150.0]]))
    assert gemv.get_xydata() == pytest.approx(np.array([[2.0, 100.0], [8.0, 100.0]]))
    assert [t.get_text() for t in panels["Roofline"].get_legend().get_texts()] == [
        "read floor, 100 GB/s",
        "float32 units, 150 billion operations a second",
        "gemv per_row row",
    ]
    (line, _) = panels["Time over the floor"].get_lines()
    assert line.get_xydata() == pytest.approx(np.array([[1.0, 2.0], [4.0, 8.0]]))


def test_costs_against_size_have_their_line(monkeypatch, tmp_path):
    floors = tuple(bench.Floor("copy", n, n / 1e5, 100.0, "") for n in (10**6, 10**7))
    results = [result("kv_quantize", "int4", (n, 1), None, n, n, 3 + n / 5e4, "copy") for n in (10**6, 10**7, 10**5)]
    panels = drawn(monkeypatch, bench.Report("x", floors, tuple(results), 1.0), tmp_path)
    title = "Cost against size: time = launch + bytes / bandwidth"
    assert set(panels) == {"Roofline", title}
    fitted, points, floor_line = panels[title].get_lines()
    assert points.get_xydata() == pytest.approx(np.array([[0.1, 5.0], [1.0, 23.0], [10.0, 203.0]]))
    assert fitted.get_xydata()[[0, -1]] == pytest.approx(np.array([[0.1, 5.0], [10.0, 203.0]]))
    assert floor_line.get_xydata() == pytest.approx(np.array([[1.0, 10.0], [10.0, 100.0]]))
    legend = panels[title].get_legend().get_texts()[0].get_text()
    assert legend.startswith("kv_quantize int4 row: 3 µs + bytes / 50 GB/s, ")
    assert len(panels["Roofline"].get_lines()) == 2  # the copy floor, and the largest size alone


def test_plot_without_matplotlib(run, monkeypatch, tmp_path):
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    for command in (("kv", SAMPLE), ("bench",)):
        code, _, err = run(*command, "--plot", tmp_path / "k.png")
        assert code == 1
        assert err == "pyclquant: --plot: expected matplotlib, which is not installed; pip install 'pyclquant[plot]'\n"


def test_plot_to_a_wrong_place(run, monkeypatch, tmp_path):
    monkeypatch.setattr(plot, "find_spec", lambda name: True)
    code, _, err = run("kv", SAMPLE, "--plot", tmp_path / "k.txt")
    assert code == 1
    assert "expected a name that ends in .png or .svg or .pdf, got .txt" in err


# ---- what a user can get wrong ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "No such command"),
        (["kv"], "Missing argument"),
        (["kv", SAMPLE, "--format", "fp8"], "expected one of fp8_e4m3fn"),
        (["kv", SAMPLE, "--granularity", "per_row"], "expected one of per_tensor, per_token"),
        (["kv", SAMPLE, "--format", "int4", "--group-size", "3"], "expected an even number"),
        (["kv", SAMPLE, "--group-size", "0"], "expected a positive integer"),
        (["kv", SAMPLE, "--format", "int8", "--group-size", "32"], "expected only with --granularity per_group"),
        (["kv", SAMPLE, "-o", "/tmp/q.safetensors"], "expected exactly one --format"),
        (["kv", SAMPLE, "-o", SAMPLE, "--format", "int8"], "expected another file than the one that is read"),
        (["restore", SAMPLE], "Missing option"),
        (["restore", SAMPLE, "-o", "/tmp/b.safetensors", "--dtype", "int8"], "expected float32"),
        (["bench", "--op", "gemm"], "expected one of kv, act_quant, gemv, proj"),
        (["bench", "--shape", "12,128"], "expected with --op"),
        (["bench", "--op", "kv", "--shape", "12"], "expected ROWS,DIM"),
        (["bench", "--op", "kv", "--shape", "12,0"], "expected ROWS,DIM"),
        (["bench", "--op", "gemv", "--shape", "128"], "expected N,K"),
        (["bench", "--op", "gemv,proj", "--shape", "12,8,128"], "expected N,K"),
        (["bench", "--op", "act_quant", "--shape", "12,0"], "expected K or N,K"),
        (["bench", "--op", "proj", "--shape", "128,100"], "expected K a multiple of 128, got 100"),
        (["bench", "--rows", "257"], "expected 1 to 256, got '257'"),
        (["bench", "--rows", "1,x"], "expected 1 to 256, got 'x'"),
        (["bench", "--scales", "per_head"], "expected one of per_row, block_128, got 'per_head'"),
        (["bench", "--op", "kv", "--rows", "1"], "expected only with --op act_quant, gemv, proj, got kv"),
        (["bench", "--op", "kv", "--scales", "per_row"], "expected only with --op act_quant, gemv, proj, got kv"),
        (["bench", "--op", "gemv", "--format", "int8"], "expected only with --op kv, got gemv"),
        (["bench", "--op", "gemv", "--granularity", "per_token"], "expected only with --op kv, got gemv"),
        (["bench", "--op", "gemv", "--group-size", "16"], "expected only with --op kv, got gemv"),
        (["bench", "--op", "kv", "--variant", "mma"], "expected one of vector_shuffle, vector, row, base, got 'mma'"),
        (
            ["bench", "--op", "act_quant,gemv", "--variant", "vector_shuffle"],
            "expected one of vector, row, base, mma, row_bf16, got",
        ),
        (["bench", "--dtype", "float64"], "expected float32"),
        (["bench", "--variant", "fastest"], "expected one of vector_shuffle"),
        (["bench", "--seconds", "-1"], "--seconds"),
    ],
)
def test_bad_usage(run, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in " ".join(err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kv", "/nowhere/k.npy"], "/nowhere/k.npy: expected a file to read, got: No such file or directory"),
        (["kv", "/tmp"], "/tmp: expected a name that ends in .safetensors or .npy or .npz, got no suffix"),
        (["kv", SAMPLE, "--format", "int8", "-o", "/nowhere/q.safetensors"], "expected a name in a folder that exists"),
        (["kv", SAMPLE, "--format", "int8", "-o", "/proc/self/q.safetensors"], "/proc/self/q.safetensors: expected"),
        (["restore", SAMPLE, "-o", "/tmp/b.safetensors"], "expected quantized tensors"),
        (["kv", SAMPLE, "--device", "no such device"], "device: expected one that matches 'no such device', found 0:0"),
        (["probe", "--device", "9:9"], "device: expected one that matches '9:9', found 0:0"),
        (["selftest", "--device", "9:9"], "device: expected one that matches '9:9', found 0:0"),
        (["bench", "--device", "9:9"], "device: expected one that matches '9:9', found 0:0"),
    ],
)
def test_failures_are_one_line(run, arguments, message):
    for more in ([], ["--json"]):
        code, out, err = run(*arguments, *more)
        assert (code, out) == (1, "")
        assert err.startswith("pyclquant: ")
        assert err.count("\n") == 1
        assert message in err


@pytest.mark.parametrize("command", [["probe"], ["kv", SAMPLE], ["selftest"], ["bench"]])
def test_no_driver_at_all(no_driver, run, command):
    code, out, err = run(*command)
    assert (code, out) == (1, "")
    assert err.startswith("pyclquant: device: expected an OpenCL device, found none; searched ")
    assert "broken.so: killed by signal 11" in err
    assert "pip install 'pyclquant[pocl]'" in err
    assert err.count("\n") == 1


def test_probe_without_a_driver_is_json_all_the_same(no_driver, run):
    code, out, err = run("probe", "--json")
    assert code == 1
    assert json.loads(out) == {
        "pyclquant": version("pyclquant"),
        "devices": [],
        "notes": ["driver left out: /usr/lib/broken.so: killed by signal 11 (SIGSEGV)"],
    }
    assert "expected an OpenCL device" in err


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            cl.MemoryError("clCreateBuffer failed: MEM_OBJECT_ALLOCATION_FAILURE"),
            "device: expected enough memory .*ALLOCATION_FAILURE",
        ),
        (
            cl.RuntimeError("clFinish failed: OUT_OF_RESOURCES"),
            "device: expected the driver to do this work, got: .*OUT_OF_RESOURCES",
        ),
        (MemoryError("Unable to allocate 9 TiB"), "host: expected enough memory for this work, got: Unable to allocate 9 TiB"),
        (NoDeviceError("device: expected one"), "device: expected one"),
    ],
)
def test_driver_errors_are_one_line(run, monkeypatch, error, message):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(evaluate, "evaluate", fail)
    code, out, err = run("kv", SAMPLE)
    assert (code, out) == (1, "")
    with pytest.raises(ValueError, match=f"^pyclquant: {message}\n$"):
        raise ValueError(err)


# ---- progress ----


def test_progress_goes_to_a_terminal_only(monkeypatch, capfd):
    with cli.steps(quiet=False, total=2) as step:
        step("one")
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with cli.steps(quiet=True, total=2) as step:
        step("one")
    assert capfd.readouterr() == ("", "")
    for total in (2, None):
        with cli.steps(quiet=False, total=total) as step:
            step("one")
            step("two")
        out, err = capfd.readouterr()
        assert out == ""
        assert "two" in err


def test_joined_options():
    assert cli.joined(["int8, int4", "int8", "fp8_e5m2,"]) == ("int8", "int4", "fp8_e5m2")
    assert cli.joined(None) == ()
    with contextlib.suppress(SystemExit):
        assert cli.parse_shape("3, 4,5", ("kv",)) == (3, 4, 5)
