"""The bench tells no speed of a wrong result, its floors move the right bytes, and errors of formats are what they are called."""

import contextlib
import math
import types
from dataclasses import replace

import numpy as np
import pyopencl.array as cla
import pytest

from pyclquant import (
    Device,
    ShapeError,
    UnsupportedDeviceError,
    bench,
    bench_kv,
    bench_w8a8,
    bench_work,
    evaluate,
    floor,
    kv,
    reference,
)
from pyclquant.bench_work import Spec
from pyclquant.capabilities import Capabilities
from pyclquant.errors import BuildError
from pyclquant.formats import FLOAT_DTYPES, FORMATS
from pyclquant.testing import sqnr_db
from pyclquant.variants import ACT, GEMV, KV, Blocks, Product, cannot


@pytest.fixture(scope="module")
def timed():
    return Device.pick(profiling=True)


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(floor, "SEARCH_SECONDS", 0.0)
    monkeypatch.setattr(bench, "ROUNDS", 1)


SMALL = Spec((300, 64), ("int8", "int4"))


# ---- the run ----


def test_report(timed):
    told = []
    report = bench.run(timed, SMALL, ["kv"], seconds=0.0, progress=told.append)
    assert report.device == timed.name
    assert report.correct
    assert [(r.op, r.format) for r in report.results] == [
        (op, f) for f in ("int8", "int4") for op in ("kv_quantize", "kv_dequantize")
    ]
    nbytes = {"int8": 300 * (128 + 64 + 4), "int4": 300 * (128 + 32 + 8)}
    copy, read = report.floors
    assert (copy.kind, read.kind, copy.nbytes) == ("copy", "read", 2 * read.nbytes)
    for f in report.floors:
        assert f.gb_s == pytest.approx(f.nbytes / f.median_us * 1e-3)
    for r in report.results:
        assert (r.shape, r.rows, r.floor) == ((300, 64), None, "copy")
        assert r.gb_s == pytest.approx(nbytes[r.format] / r.median_us * 1e-3)
        assert r.of_floor == pytest.approx(r.gb_s / copy.gb_s)
        assert r.reference_us > 0
        assert r.torch_us is r.host_us is None
        assert r.variant == kv.plan_for(timed, (300, 64), "bfloat16", r.format).variant
    assert "preparing kv" in told
    assert "checking kv_quantize int8" in told


@pytest.mark.parametrize("granularity", ["per_tensor", "per_token", "per_head", "per_group"])
def test_every_granularity_is_right(timed, granularity):
    spec = Spec((1037, 3, 40), ("fp8_e4m3fn",), "float16", granularity, 16)
    works = bench.OPS["kv"](timed, spec)
    assert [work.check() for work in works] == [None, None]
    for work in works:
        assert floor.seconds_of(timed, work.enqueue, 0.0) > 0


@pytest.mark.parametrize("name", [v.name for v in KV])
def test_forced_variant(timed, name):
    spec = Spec((64, 128), ("int8",), variant=name)
    row = next(v for v in KV if v.name == name)
    if cannot(row, timed.capabilities, Blocks(128, 128, 64, 2)):
        with pytest.raises(UnsupportedDeviceError, match=f"force: {name} cannot run"):
            bench.OPS["kv"](timed, spec)
    else:
        assert {work.variant for work in bench.OPS["kv"](timed, spec)} == {name}


def test_wrong_result_has_no_speed(timed, monkeypatch):
    right = reference.encode
    monkeypatch.setattr(reference, "encode", lambda v, fmt: right(v, fmt) ^ (np.arange(v.size).reshape(v.shape) == 77))
    report = bench.run(timed, Spec((9, 64), ("int8",)), ["kv"], seconds=0.0)
    assert not report.correct
    assert report.floors == ()
    for r, what in zip(report.results, ("codes", "values"), strict=True):
        assert not r.correct
        assert what in r.detail
        assert r.median_us is r.gb_s is r.of_floor is r.reference_us is None


def test_right_results_keep_their_speed_beside_a_wrong_one(timed, monkeypatch):
    right = reference.dequantize
    monkeypatch.setattr(reference, "dequantize", lambda *a, **k: right(*a, **k) * -1)
    report = bench.run(timed, Spec((9, 64), ("int8",)), ["kv"], seconds=0.0, with_reference=False)
    assert not report.correct
    assert [r.correct for r in report.results] == [True, False]
    assert [r.median_us is None for r in report.results] == [False, True]
    assert report.results[0].reference_us is None


def test_tile_mismatch():
    tile = np.arange(21).reshape(7, 3)
    whole = bench_work.repeated(tile, 24)
    assert whole.shape == (24, 3)
    assert (whole[23] == tile[2]).all()
    assert bench_kv.tile_mismatch(whole, tile, "x") is None
    whole[22, 1] += 1
    assert "x[21:]: expected" in bench_kv.tile_mismatch(whole, tile, "x")


# ---- W8A8 ----

PROJECTION = Spec((1, 1), weight=(400, 384), rows=(1, 5, 130))


def runs(dev, table, name, shape):
    """Whether a variant of a table runs."""
    return cannot(next(v for v in table if v.name == name), dev.capabilities, shape) is None


def test_report_of_projections(timed):
    report = bench.run(timed, PROJECTION, ["act_quant", "gemv", "proj"], seconds=0.0)
    assert report.correct
    assert [(r.op, r.format, r.rows) for r in report.results] == [
        (op, layout, rows)
        for op in ("act_quant", "act_quant_silu", "gemv", "proj")
        for layout in ("per_row", "block_128")
        for rows in (1, 5, 130)
    ]
    scales = {"per_row": (1, 400), "block_128": (3, 4 * 3)}  # of a row of activations, of the weights
    read = next(f for f in report.floors if f.kind == "read")
    for r in report.results:
        m, (of_row, of_weights) = r.rows, scales[r.format]
        activations = m * (384 + 4 * of_row)
        weights = 400 * 384 + 4 * of_weights
        nbytes = {
            "act_quant": 2 * m * 384 + activations,
            "act_quant_silu": 4 * m * 384 + activations,
            "gemv": weights + activations + 2 * m * 400,
            "proj": weights + 2 * m * 384 + 2 * activations + 2 * m * 400,
        }
        assert r.gb_s == pytest.approx(nbytes[r.op] / r.median_us * 1e-3)
        assert r.torch_us is None
        if r.op in ("gemv", "proj"):
            assert (r.shape, r.floor) == ((400, 384), "read")
            assert r.of_floor == pytest.approx(r.gb_s / read.gb_s)
        else:
            assert (r.shape, r.floor) == ((m, 384), "copy")
        assert (r.reference_us is None) == (r.op == "proj")
        assert (r.host_us is not None) == (r.op == "proj")
        if r.host_us:
            assert list(r.host_us) == ["enqueue", "proj"]
            assert min(r.host_us.values()) > 0
    assert read.nbytes == floor.reading(400 * 384).nbytes


@pytest.mark.parametrize("op", ["act_quant", "gemv", "proj"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_projections_are_right(timed, op, dtype):
    works = bench.OPS[op](timed, Spec((1, 1), dtype=dtype, weight=(129, 256), rows=(3, 40), scales=("block_128",)))
    assert [work.check() for work in works] == [None] * len(works)
    assert len({work.name for work in works}) == len(works)
    for work in works:
        assert floor.seconds_of(timed, work.enqueue, 0.0) > 0


@pytest.mark.parametrize("name", [v.name for v in ACT])
def test_forced_variant_of_act_quant(timed, name):
    spec = replace(PROJECTION, rows=(3,), variant=name)
    if runs(timed, ACT, name, Blocks(384, 384, 3, 2)):
        assert {(work.variant, work.check()) for work in bench.OPS["act_quant"](timed, spec)} == {(name, None)}
    else:
        with pytest.raises(UnsupportedDeviceError, match=f"force: {name} cannot run"):
            bench.OPS["act_quant"](timed, spec)


@pytest.mark.parametrize("op", ["gemv", "proj"])
@pytest.mark.parametrize("name", [v.name for v in GEMV])
def test_forced_variant_of_a_product(timed, name, op):
    spec = replace(PROJECTION, rows=(3,), variant=name)
    if runs(timed, GEMV, name, Product(3, 400, 384)):
        assert {(work.variant, work.check()) for work in bench.OPS[op](timed, spec)} == {(name, None)}
    else:
        with pytest.raises(UnsupportedDeviceError, match=f"force: {name} cannot run"):
            bench.OPS[op](timed, spec)


@pytest.mark.parametrize(("row", "column"), [(0, 0), (4, 127), (2, 130), (4, 399)])
def test_wrong_product_has_no_speed(timed, monkeypatch, row, column):
    right = cla.Array.get

    def wrong(array, *arguments, **options):
        host = right(array, *arguments, **options)
        if host.shape == (5, 400):
            host[row, column] = 1.5 * host[row, column] + 1
        return host

    monkeypatch.setattr(cla.Array, "get", wrong)
    report = bench.run(timed, replace(PROJECTION, rows=(5, 1)), ["gemv", "proj"], seconds=0.0, with_reference=False)
    for r in report.results:
        assert r.correct == (r.rows == 1)

        if not r.correct:
            assert f"result[:, {column // 128 * 128}:" in r.detail
            assert f"at ({row}, {column % 128})" in r.detail
            assert r.gb_s is r.of_floor is r.median_us is r.host_us is None


def test_wrong_activations_have_no_speed(timed, monkeypatch):
    right = reference.act_quant
    monkeypatch.setattr(reference, "act_quant", lambda x, layout, *eps: (right(x, layout)[0], right(x, layout)[1] * 2))
    report = bench.run(timed, replace(PROJECTION, rows=(5,)), ["act_quant"], seconds=0.0)
    assert [r.correct for r in report.results] == [False] * 4
    assert all(r.detail.startswith("scales: expected") for r in report.results)
    assert report.floors == ()


def test_sampled_columns_are_of_all_parts(timed):
    weights = bench_w8a8.Rotated.of(timed, replace(PROJECTION, weight=(128 * 40 + 3, 128)), "per_row")
    codes, scales = reference.act_quant(bench_work.sample((2, 128), "float32"), "per_row")
    exact, _ = reference.gemv(codes, scales, [(weights.codes, weights.scales)], "per_row")
    assert weights.check(codes, scales, exact.astype(np.float32)) is None
    found = []
    for block in range(41):
        got = exact.astype(np.float32)
        got[1, 128 * block] = np.nan
        if weights.check(codes, scales, got):
            found.append(block)
    assert (found[0], found[-1], len(found)) == (0, 40, bench_w8a8.CHECKED)
    assert "result[:, 5120:5123]" in weights.check(codes, scales, np.where(np.arange(5123) < 5120, exact, 0).astype(np.float32))


@pytest.mark.parametrize("layout", ["per_row", "block_128"])
def test_decoded_weights_are_what_numpy_is_timed_with(timed, layout):
    weights = bench_w8a8.Rotated.of(timed, replace(PROJECTION, weight=(130, 256)), layout)
    a, a_scales = reference.act_quant(bench_work.sample((3, 256), "float32"), layout)
    exact, magnitude = reference.gemv(a, a_scales, [(weights.codes, weights.scales)], layout)
    got = bench_w8a8.decoded(a, a_scales, 1) @ weights.decoded.T
    assert (np.abs(got - exact) <= 1e-5 * magnitude).all()
    assert len(weights.copies) >= 2


def test_projections_are_timed_by_events_on_a_gpu(timed, monkeypatch):
    spans = []
    right = floor.span
    monkeypatch.setattr(bench_w8a8, "span", lambda *a: spans.append(right(*a)) or spans[-1])
    gpu = Device(timed.queue, Capabilities(timed.capabilities.reported | {"device_type": "gpu"}, timed.capabilities.works))
    try:
        report = bench.run(gpu, replace(PROJECTION, rows=(3,)), ["gemv"], seconds=0.0)
    except UnsupportedDeviceError as error:  # rusticl 22.3 on llvmpipe: a nanosecond, whatever was run
        assert "rusticl" in timed.name
        pytest.skip(str(error))
    assert report.correct
    assert not spans
    report = bench.run(gpu, replace(PROJECTION, rows=(129,)), ["gemv", "proj"], seconds=0.0)
    assert report.correct
    assert min(r.median_us for r in report.results) > 0
    assert len(spans) >= 4 * 5


def test_weight_that_is_too_large(timed):
    n = timed.capabilities.reported["global_mem_size"] // 128
    for op in ("gemv", "proj"):
        with pytest.raises(ShapeError, match=r"shape: expected a weight of at most \d+ bytes \(1/16 of the memory\)"):
            bench.OPS[op](timed, replace(PROJECTION, weight=(n, 128)))


def test_small_work_is_compared_by_time(timed):
    slow = floor.PIECE * 2 * 1e-9
    smallest = bench.Floor("copy", 2 * floor.PIECE, slow * 1e6, 1.0, "")
    large = bench.Floor("copy", 1 << 30, 1e6 * 2**30 * 1e-9, 1.0, "")
    work = bench_work.Work("x", "y", "z", (1,), 100, None, None, (floor.copying(100),))
    assert bench.share(work, slow, smallest) == pytest.approx(1.0)
    assert bench.share(replace(work, nbytes=1 << 29), 1.0, large) == pytest.approx(2**29 * 1e-9)


def test_host_seconds_leaves_out_the_waiting():
    calls = []
    queue = types.SimpleNamespace(finish=lambda: calls.append("finish"))
    assert bench_w8a8.host_seconds(queue, lambda: calls.append("call"), 0.0, least=3) > 0
    assert calls == ["call", "finish"] * 4


# ---- torch, a stand-in for which tells what it was asked ----


class Tensor:
    """As much of torch.Tensor as is used."""

    def __init__(self, array, *, e4m3=False):
        self.array, self.e4m3 = array, e4m3

    def to(self, device):
        assert device == "cuda:1"
        return self

    def view(self, dtype):
        return Tensor(self.array, e4m3=dtype == "e4m3")

    def clone(self):
        return Tensor(self.array.copy(), e4m3=self.e4m3)

    def t(self):
        return Tensor(self.array.T, e4m3=self.e4m3)

    def __getitem__(self, index):
        return Tensor(self.array[index])


class Event:
    clock = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        Event.clock += 0.5
        self.at = Event.clock

    def elapsed_time(self, done):
        return done.at - self.at


def stand_in(refuses, asked):
    def scaled_mm(a, b, *, scale_a, scale_b, out_dtype):
        if refuses(len(a.array)):
            raise RuntimeError("M")
        assert a.e4m3
        assert b.e4m3
        assert out_dtype == "bf16"
        asked.append((tuple(t.array.shape for t in (a, scale_a, b, scale_b)), id(b)))

    names = ["another", "NVIDIA H200"]
    cuda = types.SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: len(names),
        get_device_name=lambda i: names[i],
        synchronize=lambda device=None: None,
        device=lambda device: contextlib.nullcontext(),
        Event=Event,
        _sleep=lambda cycles: None,
    )
    return types.SimpleNamespace(
        cuda=cuda, from_numpy=Tensor, float8_e4m3fn="e4m3", bfloat16="bf16", _scaled_mm=scaled_mm, __name__="torch"
    )


@pytest.fixture
def torch_on(timed, monkeypatch):
    """Installs a stand-in for torch, and returns a device that looks like an NVIDIA GPU to `torch_beside`."""

    def install(torch, **reported):
        monkeypatch.setattr(bench_w8a8, "find_spec", lambda name: torch)
        monkeypatch.setattr(bench_w8a8, "import_module", lambda name: torch)
        caps = Capabilities.from_report({"vendor": "NVIDIA Corporation", "name": "NVIDIA H200"} | reported)
        return types.SimpleNamespace(capabilities=caps)

    return install


@pytest.mark.parametrize(("refuses", "rows"), [(lambda m: False, 5), (lambda m: m % 16, 16)])
def test_torch_is_timed_beside(timed, torch_on, refuses, rows):
    asked = []
    dev = torch_on(stand_in(refuses, asked))
    weights = bench_w8a8.Rotated.of(timed, PROJECTION, "per_row")
    peer = bench_w8a8.torch_beside(dev, weights)
    codes, scales = reference.act_quant(bench_work.sample((5, 384), "bfloat16"), "per_row")
    assert peer.timer(codes, scales)(0.0) == pytest.approx(0.5e-3)
    assert {shapes for shapes, _ in asked} == {((rows, 384), (rows, 1), (384, 400), (1, 400))}
    assert len({which for _, which in asked}) == min(len(weights.copies), bench_w8a8.Torch.BATCH)
    assert (weights.codes.view(np.uint8) == peer.weights[1][0].array.T).all()


def test_torch_elsewhere_is_not_timed(timed, torch_on, monkeypatch):
    weights = bench_w8a8.Rotated.of(timed, PROJECTION, "per_row")
    assert bench_w8a8.torch_beside(torch_on(None), weights) is None
    torch = stand_in(lambda m: False, [])
    assert bench_w8a8.torch_beside(torch_on(torch, vendor="Intel"), weights) is None
    assert bench_w8a8.torch_beside(torch_on(torch, name="NVIDIA A100"), weights) is None
    torch.cuda.is_available = lambda: False
    assert bench_w8a8.torch_beside(torch_on(torch), weights) is None


def test_torch_has_a_figure_in_the_report(timed, monkeypatch):
    peer = types.SimpleNamespace(timer=lambda codes, scales: lambda seconds: 1e-3 * len(codes))
    monkeypatch.setattr(bench_w8a8, "torch_beside", lambda dev, weights: peer)
    report = bench.run(timed, replace(PROJECTION, rows=(1, 5)), ["gemv"], seconds=0.0)
    assert [r.torch_us for r in report.results] == [1000.0, 5000.0, None, None]


# ---- floors ----


@pytest.mark.parametrize("copies", [False, True])
def test_floor_kernels_move_the_right_bytes(timed, copies):
    floors = floor.Floors(timed, 1 << 20)
    built = 0
    for c in floor.candidates(timed.capabilities, copies):
        try:
            contender = floors.copy(c) if copies else floors.read(c)
        except BuildError:
            assert c.nontemporal
            continue
        built += 1
        assert contender.check() is None
        assert 0 < contender.nbytes <= floors.nbytes * (2 if copies else 1)
    assert built
    floors.data = floors.data ^ np.uint32(1)
    floors.data[0] ^= 2
    assert "expected" in contender.check()


def test_floor_that_is_wrong_everywhere_is_none(timed):
    floors = floor.Floors(timed, 1 << 20)
    floors.data = floors.data + np.uint32(1)
    with pytest.raises(UnsupportedDeviceError, match=r"expected one that reads and copies a buffer.*bench_copy: expected"):
        floors.fastest(True, lambda _: None)


def test_candidates_follow_the_device():
    cpu = Capabilities.from_report({"device_type": "cpu", "max_work_group_size": 4096})
    gpu = Capabilities.from_report({"device_type": "gpu", "max_work_group_size": 64})
    assert {c.contiguous for c in floor.candidates(cpu, True)} == {True, False}
    assert {c.nontemporal for c in floor.candidates(cpu, True)} == {True, False}
    assert {c.nontemporal for c in floor.candidates(cpu, False)} == {False}
    assert {c.wg for c in floor.candidates(gpu, True)} == {64}
    assert len({str(c) for c in floor.candidates(cpu, True)}) == len(floor.candidates(cpu, True))
    assert bench.default_shape(cpu) == (262_144, 128)
    assert bench.default_shape(gpu) == (1_048_576, 128)


def test_buffers_rotate_beyond_the_caches(timed):
    for nbytes in (1 << 20, 1 << 24, 1 << 26):
        sets = floor.buffer_sets(timed, nbytes)
        assert sets * nbytes >= 256 << 20 or sets == 64 or sets * nbytes >= timed.capabilities.reported["global_mem_size"] // 16
    assert floor.buffer_sets(timed, 1 << 40) == 2


def test_span_covers_several_commands(timed):
    x = cla.to_device(timed.queue, np.ones((64, 64), np.float32))
    out = kv.quantize(timed, x, "int8", granularity="per_tensor")
    span = floor.span(
        timed, lambda events: kv.quantize(timed, x, "int8", granularity="per_tensor", out=out, wait_for=events).events[-1]
    )
    span.wait()
    assert span.profile.end >= span.profile.start


# ---- errors of a format ----


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_errors(monkeypatch, dtype):
    monkeypatch.setattr(evaluate, "CHUNK", 7)
    x = np.random.default_rng(3).normal(0, 2, (5, 8)).astype(FLOAT_DTYPES[dtype])
    y = (x.astype(np.float32) * 1.01).astype(x.dtype)
    y[1] = x[1]
    x[0, 0], x[2, 3] = np.nan, np.inf
    errors = evaluate.Errors.of(x, y)
    finite = np.isfinite(x.astype(np.float32))
    difference = np.abs(x.astype(np.float64) - y.astype(np.float64))[finite]
    assert errors.sqnr_db == pytest.approx(sqnr_db(x, y))
    assert errors.max_abs_err == difference.max()
    assert errors.exact == (difference == 0).sum()
    assert errors.exact + errors.histogram.sum() == finite.sum()


def test_errors_without_a_figure():
    x = np.ones((2, 3), np.float32)
    assert evaluate.Errors.of(x, x).sqnr_db == math.inf
    assert evaluate.Errors.of(0 * x, x).sqnr_db == -math.inf
    assert math.isnan(evaluate.Errors.of(x * np.nan, x).sqnr_db)
    assert math.isnan(evaluate.Errors.of(x[:0], x[:0]).sqnr_db)
    assert evaluate.Errors.of(x, x * np.inf).max_abs_err == math.inf


def test_evaluate(timed):
    x = np.random.default_rng(4).normal(0, 2, (6, 2, 32)).astype(np.float32)
    for row, q in evaluate.evaluate(timed, "k", x, tuple(FORMATS), None, 16):
        how = {"granularity": row.granularity, "group_size": row.group_size}
        codes, scales, mins = reference.quantize(x, row.format, **how)
        y = reference.dequantize(codes, scales, mins, row.format, x.shape, **how)
        assert row.errors.sqnr_db == pytest.approx(sqnr_db(x, y))
        assert row.bytes_in == x.nbytes
        assert row.bytes_out == q.nbytes == codes.nbytes + scales.nbytes + (mins.nbytes if mins is not None else 0)
        assert min(row.quantize_us, row.dequantize_us, row.gb_s) > 0


def test_evaluate_without_elements(timed):
    row, q = next(evaluate.evaluate(timed, "k", np.empty((0, 2, 32), np.float16), ("int8",), None, 64))
    assert row.quantize_us is row.dequantize_us is row.gb_s is None
    assert q.codes.shape == (0, 2, 32)
