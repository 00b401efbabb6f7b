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
    bench_peers,
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
from pyclquant.growth import Line, halved
from pyclquant.testing import sqnr_db
from pyclquant.variants import ACT, GEMV, KV, Blocks, Product, cannot


@pytest.fixture(scope="module")
def timed():
    return Device.pick(profiling=True)


pytestmark = pytest.mark.usefixtures("quick_bench")


def jobs(spec, *ops):
    return [(op, spec) for op in ops]


SMALL = Spec((300, 64), ("int8", "int4"))


# ---- the run ----


def test_report(timed):
    told = []
    report = bench.run(timed, jobs(SMALL, "kv"), seconds=0.0, progress=told.append)
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
        assert r.floor_us == pytest.approx(r.of_floor * r.median_us)
        assert [(peer.name, peer.note) for peer in r.peers] == [("NumPy", "")]
        assert r.peers[0].median_us > 0
        assert r.host_us is None
        assert r.nbytes == nbytes[r.format]
        assert r.operations == 300 * 64 * {"int8": (4, 2), "int4": (5, 3)}[r.format][r.op == "kv_dequantize"]
        assert r.variant == kv.plan_for(timed, (300, 64), "bfloat16", r.format).variant
    assert "preparing kv" in told
    assert f"checking kv_quantize int8 {report.results[0].variant} 300×64" in told


@pytest.mark.parametrize("granularity", ["per_tensor", "per_token", "per_head", "per_group"])
def test_every_granularity_is_right(timed, granularity):
    spec = Spec((1037, 3, 40), ("fp8_e4m3fn",), "float16", granularity, 16)
    works = bench.OPS["kv"](timed, spec)
    assert [work.check() for work in works] == [None, None]
    for work in works:
        assert floor.seconds_of(timed, work.enqueue, 0.0) > 0


@pytest.mark.parametrize("name", [v.name for v in KV])
def test_forced_variant(timed, name):
    spec = Spec((64, 128), ("int8",), variants=(name,))
    row = next(v for v in KV if v.name == name)
    if cannot(row, timed.capabilities, Blocks(128, 128, 64, 2)):
        with pytest.raises(UnsupportedDeviceError, match=f"force: {name} cannot run"):
            bench.OPS["kv"](timed, spec)
    else:
        assert {work.variant for work in bench.OPS["kv"](timed, spec)} == {name}


def test_wrong_result_has_no_speed(timed, monkeypatch):
    right = reference.encode
    monkeypatch.setattr(reference, "encode", lambda v, fmt: right(v, fmt) ^ (np.arange(v.size).reshape(v.shape) == 77))
    report = bench.run(timed, jobs(Spec((9, 64), ("int8",)), "kv"), seconds=0.0)
    assert not report.correct
    assert report.floors == ()
    for r, what in zip(report.results, ("codes", "values"), strict=True):
        assert not r.correct
        assert what in r.detail
        assert r.median_us is r.gb_s is r.of_floor is r.floor_us is None


def test_right_results_keep_their_speed_beside_a_wrong_one(timed, monkeypatch):
    right = reference.dequantize
    monkeypatch.setattr(reference, "dequantize", lambda *a, **k: right(*a, **k) * -1)
    report = bench.run(timed, jobs(Spec((9, 64), ("int8",)), "kv"), seconds=0.0, with_peers=False)
    assert not report.correct
    assert [r.correct for r in report.results] == [True, False]
    assert [r.median_us is None for r in report.results] == [False, True]
    assert report.results[0].peers == ()


# ---- sizes ----


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_line_through_costs(scale):
    points = [(n, scale * (5e-6 + n / 2e9)) for n in (1000, 4000, 64000, 1 << 20)]
    line = Line.through(points[::-1])
    assert line.points == tuple(points)
    assert line.launch == pytest.approx(scale * 5e-6)
    assert line.bandwidth == pytest.approx(2e9 / scale)
    assert abs(line.worst) < 1e-6
    assert line.seconds(3000) == pytest.approx(scale * (5e-6 + 1.5e-6))
    off = [(n, t * (1.3 if n == 4000 else 1)) for n, t in points]
    line = Line.through(off)
    assert line.worst_nbytes == 4000
    assert 0.1 < line.worst < 0.3
    assert line.worst == pytest.approx(dict(off)[4000] / line.seconds(4000) - 1)


def test_line_has_no_negative_launch():
    line = Line.through([(1000, 0.5e-6), (2000, 2e-6), (3000, 3e-6), (4000, 4e-6)])
    assert line.launch == 0.0
    assert line.seconds(1000) > 0.5e-6


def test_no_line_through_what_does_not_grow_or_two_sizes():
    assert Line.through([]) is None
    assert Line.through([(1, 1.0), (2, 2.0), (2, 2.1)]) is None
    assert Line.through([(1000, 3e-6), (2000, 2e-6), (3000, 1e-6)]) is None


def test_halved_sizes():
    assert halved(65536, 256) == (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
    assert halved(17408, 1024, 128) == (1024, 2176, 4352, 8704, 17408)
    assert halved(300, 256) == (300,)
    assert halved(1 << 20, 4096, factor=4) == (4096, 16384, 65536, 262144, 1048576)


def test_growth_of_a_report():
    def at(nbytes, us, fmt="int8", rows=None):
        what = ("gemv", fmt, "row", (nbytes,), rows, nbytes, 1, "read")
        return bench.Result(*what, us is not None, "", us)

    points = [at(n, 2 + n / 100) for n in (100, 200, 400)]
    others = [at(100, 1.0, rows=8), at(200, 1.0, rows=8), at(100, None, "int4"), at(200, 3.0, "int4"), at(300, 4.0, "int4")]
    (growth,) = bench.Report("x", (), (*points, *others)).growth
    assert (growth.op, growth.format, growth.variant, growth.rows) == ("gemv", "int8", "row", None)
    assert (growth.line.launch * 1e6, growth.line.bandwidth) == pytest.approx((2.0, 1e8))
    assert growth.name == "gemv int8 row"
    assert replace(growth, rows=8).name == "gemv int8 row M=8"


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
    report = bench.run(timed, jobs(PROJECTION, "act_quant", "gemv", "proj"), seconds=0.0)
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
        assert r.nbytes == nbytes[r.op]
        assert [peer.name for peer in r.peers] == ["NumPy"]
        if r.op in ("gemv", "proj"):
            assert (r.shape, r.floor) == ((400, 384), "read")
            assert r.of_floor == pytest.approx(r.gb_s / read.gb_s)
        else:
            assert (r.shape, r.floor) == ((m, 384), "copy")
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
    spec = replace(PROJECTION, rows=(3,), variants=(name,))
    if runs(timed, ACT, name, Blocks(384, 384, 3, 2)):
        assert {(work.variant, work.check()) for work in bench.OPS["act_quant"](timed, spec)} == {(name, None)}
    else:
        with pytest.raises(UnsupportedDeviceError, match=f"force: {name} cannot run"):
            bench.OPS["act_quant"](timed, spec)


@pytest.mark.parametrize("op", ["gemv", "proj"])
@pytest.mark.parametrize("name", [v.name for v in GEMV])
def test_forced_variant_of_a_product(timed, name, op):
    spec = replace(PROJECTION, rows=(3,), variants=(name,))
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
    report = bench.run(timed, jobs(replace(PROJECTION, rows=(5, 1)), "gemv", "proj"), seconds=0.0, with_peers=False)
    for r in report.results:
        assert r.correct == (r.rows == 1)

        if not r.correct:
            assert f"result[:, {column // 128 * 128}:" in r.detail
            assert f"at ({row}, {column % 128})" in r.detail
            assert r.gb_s is r.of_floor is r.median_us is r.host_us is None


def test_wrong_activations_have_no_speed(timed, monkeypatch):
    right = reference.act_quant
    monkeypatch.setattr(reference, "act_quant", lambda x, layout, *eps: (right(x, layout)[0], right(x, layout)[1] * 2))
    report = bench.run(timed, jobs(replace(PROJECTION, rows=(5,)), "act_quant"), seconds=0.0)
    assert [r.correct for r in report.results] == [False] * 4
    assert all(r.detail.startswith("scales: expected") for r in report.results)
    assert report.floors == ()


def test_sampled_columns_are_of_all_parts(timed):
    case = bench_w8a8.Case.of(timed, replace(PROJECTION, weight=(128 * 40 + 3, 128), rows=(2,)), "per_row")
    codes = np.tile(case.tile.view(np.uint8), (11, 1))[:5123].view(case.tile.dtype)
    exact, _ = reference.gemv(case.a, case.a_scales, [(codes, case.scales)], "per_row")
    assert case.check(exact.astype(np.float32)) is None
    found = []
    for block in range(41):
        got = exact.astype(np.float32)
        got[1, 128 * block] = np.nan
        if case.check(got):
            found.append(block)
    assert (found[0], found[-1], len(found)) == (0, 40, bench_w8a8.CHECKED)
    assert "result[:, 5120:5123]" in case.check(np.where(np.arange(5123) < 5120, exact, 0).astype(np.float32))
    assert case.check(exact[:1].astype(np.float32)) is None  # fewer rows are the first ones


@pytest.mark.parametrize("layout", ["per_row", "block_128"])
def test_weights_on_the_device_are_what_numpy_is_timed_with(timed, layout):
    case = bench_w8a8.Case.of(timed, replace(PROJECTION, weight=(1100, 256), rows=(3,)), layout)
    assert len(case.copies) >= 2
    for weight in case.copies:
        codes, scales = (a.get() for a in weight.segments[0])
        exact, magnitude = reference.gemv(case.a, case.a_scales, [(codes, scales)], layout)
        got = (case.a.astype(np.float32) * bench_w8a8.spread(case.a_scales, 1, 3)) @ case.whole.T
        assert (np.abs(got - exact) <= 1e-5 * magnitude).all()
        assert (case.decoded(600) == case.whole[:600]).all()


def test_weights_too_large_for_numpy_are_not_timed(timed, monkeypatch):
    monkeypatch.setattr(bench_w8a8, "LIMIT_BYTES", 400 * 384 * 4 - 1)
    report = bench.run(timed, jobs(replace(PROJECTION, rows=(2,)), "gemv", "proj"), seconds=0.0)
    for r in report.results:
        assert r.median_us > 0
        assert [(p.median_us, p.note) for p in r.peers] == [(None, "its float32 weights would be 0.000614 GB; limit 0.000614 GB")]


def test_projections_are_timed_by_events_on_a_gpu(timed, monkeypatch):
    spans = []
    right = floor.span
    monkeypatch.setattr(bench_w8a8, "span", lambda *a: spans.append(right(*a)) or spans[-1])
    gpu = Device(timed.queue, Capabilities(timed.capabilities.reported | {"device_type": "gpu"}, timed.capabilities.works))
    try:
        report = bench.run(gpu, jobs(replace(PROJECTION, rows=(3,)), "gemv"), seconds=0.0)
    except UnsupportedDeviceError as error:  # rusticl 22.3 on llvmpipe: a nanosecond, whatever was run
        assert "rusticl" in timed.name
        pytest.skip(str(error))
    assert report.correct
    assert not spans
    report = bench.run(gpu, jobs(replace(PROJECTION, rows=(129,)), "gemv", "proj"), seconds=0.0)
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
    work = bench_work.Work("x", "y", "z", (1,), 100, 1, None, None, (floor.copying(100),))
    assert bench.share(work, slow, smallest) == pytest.approx(1.0)
    assert bench.share(replace(work, nbytes=1 << 29), 1.0, large) == pytest.approx(2**29 * 1e-9)


def test_host_seconds_leaves_out_the_waiting():
    calls = []
    queue = types.SimpleNamespace(finish=lambda: calls.append("finish"))
    assert bench_w8a8.host_seconds(queue, lambda: calls.append("call"), 0.0, least=3) > 0
    assert calls == ["call", "finish"] * 4


# ---- peers ----


def test_numpy_is_timed_on_all_of_it():
    calls = []
    peer = bench_peers.numpy_peer(
        lambda: calls.append("part"), 0.01, lambda: calls.append("made") or (lambda: calls.append("run"))
    )
    note, timer = peer.prepare()
    assert (note, peer.takes_turns) == ("", False)
    assert timer(0.0) > 0
    assert calls == ["part"] * 3 + ["made", "run"]


def test_numpy_is_left_out_when_a_part_tells_that_it_takes_too_long(timed, monkeypatch):
    monkeypatch.setattr(bench_peers, "LIMIT", 0.0)
    report = bench.run(timed, jobs(SMALL, "kv") + jobs(replace(PROJECTION, rows=(2,)), "act_quant", "gemv"), seconds=0.0)
    assert report.correct
    for r in report.results:
        assert r.median_us > 0
        assert r.peers[0].median_us is None
        assert r.peers[0].note.startswith("one run would take ")
        assert r.peers[0].note.endswith("; limit 0 s")


def test_a_peer_that_fails_has_a_reason(timed, monkeypatch):
    def fails():
        raise OSError("no compiler\nmore")

    peers = (bench_peers.Peer("torch", fails), bench_peers.Peer("other", lambda: ("fast", lambda seconds: 2e-6)))
    right = bench.OPS["act_quant"]
    monkeypatch.setitem(bench.OPS, "act_quant", lambda *a: [replace(work, peers=peers) for work in right(*a)])
    told = []
    report = bench.run(timed, jobs(replace(PROJECTION, rows=(2,)), "act_quant"), seconds=0.0, progress=told.append)
    found = {tuple((p.name, p.median_us, p.note) for p in r.peers) for r in report.results}
    assert found == {(("torch", None, "OSError: no compiler"), ("other", 2.0, "fast"))}
    assert sum("preparing torch" in line for line in told) == 1  # works share it


class Tensor:
    """As much of torch.Tensor as the products use."""

    def __init__(self, array, dtype):
        self.array, self.dtype = array, dtype

    ndim = property(lambda self: self.array.ndim)

    def to(self, where):
        return Tensor(self.array, where if where == "bf16" else self.dtype)

    def view(self, dtype):
        return Tensor(self.array, dtype)

    def repeat(self, turns):
        return Tensor(np.tile(self.array, turns), self.dtype)

    def t(self):
        return Tensor(self.array.T, self.dtype)

    def __getitem__(self, index):
        return Tensor(self.array[index], self.dtype)


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
    """Torch, which tells what it was asked."""

    def scaled_mm(a, b, *, scale_a, scale_b, out_dtype):
        if refuses(len(a.array)):
            raise RuntimeError("M")
        assert (a.dtype, b.dtype, out_dtype) == ("e4m3", "e4m3", "bf16")
        asked.append((a.array, scale_a.array, b.array, scale_b.array))

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
        cuda=cuda,
        from_numpy=lambda a: Tensor(a, a.dtype.name),
        float8_e4m3fn="e4m3",
        bfloat16="bf16",
        uint8="uint8",
        _scaled_mm=scaled_mm,
        mm=lambda a, b: asked.append((a.dtype, b.dtype, a.array.shape, b.array.shape)),
    )


@pytest.fixture
def torch_on(monkeypatch):
    """Installs a stand-in for torch, and returns a device that looks like an NVIDIA GPU to `torch_beside`."""

    def install(torch, **reported):
        bench_peers.torch_on.cache_clear()
        monkeypatch.setattr(bench_peers, "find_spec", lambda name: torch)
        monkeypatch.setattr(bench_peers, "import_module", lambda name: torch)
        caps = Capabilities.from_report({"vendor": "NVIDIA Corporation", "name": "NVIDIA H200", "device_type": "gpu"} | reported)
        return types.SimpleNamespace(capabilities=caps)

    yield install
    bench_peers.torch_on.cache_clear()


@pytest.mark.parametrize(("refuses", "rows"), [(lambda m: False, 5), (lambda m: m % 16, 16)])
def test_torch_multiplies_the_same_codes(timed, torch_on, refuses, rows):
    asked = []
    torch = bench_peers.torch_beside(torch_on(stand_in(refuses, asked)))
    assert torch.device == "cuda:1"
    case = bench_w8a8.Case.of(timed, replace(PROJECTION, rows=(5,), weight=(1100, 384)), "per_row")
    copies = torch.repeated(case.tile, 1100, 3)
    scaled, wide = torch.product_peers(lambda: copies, case.x, case.quantized(5))
    note, timer = scaled.prepare()
    assert (scaled.name, note) == ("torch fp8", "" if rows == 5 else "with 16 rows")
    assert timer(0.0) == pytest.approx(0.5e-3)
    codes = case.copies[0].segments[0][0].get()
    for a, a_scales, b, b_scales in asked:
        assert (a[:5] == case.a.view(np.uint8)).all()
        assert (a_scales[:5, 0] == case.a_scales).all()
        assert (len(a), len(a_scales)) == (rows, rows)
        assert (b == codes.view(np.uint8).T).all()
        assert (b_scales[0] == case.scales).all()
    del asked[:]
    assert wide.prepare()[1](0.0) == pytest.approx(0.5e-3)
    assert set(asked) == {("bf16", "bf16", (5, 384), (384, 1100))}


def test_torch_elsewhere_is_not_timed(torch_on):
    assert bench_peers.torch_beside(torch_on(None)) is None
    torch = stand_in(lambda m: False, [])
    assert bench_peers.torch_beside(torch_on(torch, vendor="Intel")) is None
    assert bench_peers.torch_beside(torch_on(torch, name="NVIDIA A100")) is None
    assert bench_peers.torch_beside(torch_on(torch, device_type="cpu")).device == "cpu"
    torch.cuda.is_available = lambda: False
    assert bench_peers.torch_beside(torch_on(torch)) is None


def test_torch_that_takes_too_long_is_not_timed(monkeypatch):
    monkeypatch.setattr(bench_peers, "LIMIT", 0.0)
    with pytest.raises(bench_peers.NotTimedError, match=r"one run takes \S+ s; limit 0 s"):
        bench_peers.Torch(None, "cpu").timer(lambda i: None)


def test_torch_runs_as_it_is_when_it_does_not_compile(monkeypatch):
    def no_compiler(function, dynamic):
        raise RuntimeError("no compiler")

    torch = bench_peers.Torch(types.SimpleNamespace(compile=no_compiler), "cpu")
    monkeypatch.setattr(bench_peers, "import_module", lambda name: types.SimpleNamespace(config=types.SimpleNamespace()))
    assert torch.compiled(abs, -1) == ("eager", abs)
    torch.torch.compile = lambda function, dynamic: pytest.fail("the time for compiling is spent")
    torch.compiling = bench_peers.COMPILING + 1
    assert torch.compiled(abs, -1) == ("eager", abs)


@pytest.fixture
def real_torch(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(bench_peers, "COMPILING", -1.0)
    bench_peers.torch_on.cache_clear()
    return bench_peers.Torch(torch, "cpu")


@pytest.mark.parametrize("name", list(FORMATS))
def test_torch_quantizes_likewise(real_torch, name):
    x = bench_work.sample((7, 96), "bfloat16")
    codes, scales, mins = reference.quantize(x, name, granularity="per_group", group_size=32)
    tensor = real_torch.tensor(x).reshape(-1, 32)
    if mins is not None:
        packed, scale, lo = real_torch.asymmetric(tensor)
        assert (lo.numpy().ravel() == mins.ravel()).all()
        assert (packed.numpy().reshape(codes.shape) == codes).mean() > 0.99  # its division is its own affair
    else:
        dtype = getattr(real_torch.torch, name.replace("fp8", "float8"))
        got, scale = real_torch.symmetric(tensor, FORMATS[name].largest, dtype)
        view = got.view(real_torch.torch.uint8).numpy().reshape(codes.shape)
        assert (view == codes.view(np.uint8)).mean() > 0.99
    np.testing.assert_allclose(scale.numpy().ravel(), scales.ravel(), rtol=1e-6)


def test_every_operation_is_timed_with_torch(real_torch, timed, monkeypatch):
    if not timed.capabilities.is_cpu:
        pytest.skip("torch on the host is beside CPU drivers")
    monkeypatch.setattr(bench_peers, "find_spec", lambda name: name)
    spec = replace(PROJECTION, shape=(300, 64), rows=(2,), weight=(400, 384))
    report = bench.run(timed, jobs(spec, *bench.OPS), seconds=0.0)
    assert report.correct
    for r in report.results:
        names = {"gemv": ["NumPy", "torch fp8", "torch bf16"], "proj": ["NumPy", "torch fp8"]}.get(r.op, ["NumPy", "torch"])
        names = names[:1] if r.format == "block_128" and r.op in ("gemv", "proj") else names
        assert [p.name for p in r.peers] == names
        assert all(p.median_us > 0 for p in r.peers), r


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


@pytest.mark.parametrize(("wg", "vec", "unroll", "fma"), [(1, 4, 32, 0), (1, 8, 4, 0), (64, 4, 4, 0), (64, 4, 4, 1)])
def test_multiply_adds_are_computed(timed, monkeypatch, wg, vec, unroll, fma):
    monkeypatch.setattr(floor, "STEPS", 37)
    found = floor.arithmetic(timed, wg, vec, unroll, fma)
    assert found.check() is None
    groups = found.operations / (2 * 37 * unroll * vec * wg)
    assert groups == int(groups)
    monkeypatch.setattr(floor, "multiplied_and_added", lambda *a: np.ones(wg, np.float32))
    assert "bench_multiply_add: expected" in found.check()


def test_sums_of_multiply_adds():
    x = np.arange(3, dtype=np.float32)[:, None, None] + np.arange(4, dtype=np.float32)[:, None] + np.zeros(8, np.float32)
    for _ in range(5):
        x = x * np.float32(1) + np.float32(1)
    assert (floor.multiplied_and_added(3, 8, 4, 5) == x.sum((1, 2))).all()


def test_arithmetic_that_is_wrong_everywhere_is_none(timed, monkeypatch):
    monkeypatch.setattr(floor, "STEPS", 3)
    assert floor.fastest_arithmetic(timed, lambda _: None).operations > 0
    monkeypatch.setattr(floor, "multiplied_and_added", lambda wg, *_: np.ones(wg, np.float32))
    assert floor.fastest_arithmetic(timed, lambda _: None) is None


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
