"""The bench tells no speed of a wrong result, its floors move the right bytes, and errors of formats are what they are called."""

import math

import numpy as np
import pytest

from pyclquant import Device, UnsupportedDeviceError, bench, evaluate, floor, kv, reference
from pyclquant.capabilities import Capabilities
from pyclquant.errors import BuildError
from pyclquant.formats import FORMATS
from pyclquant.testing import sqnr_db
from pyclquant.variants import KV, Blocks, cannot


@pytest.fixture(scope="module")
def timed():
    return Device.pick(profiling=True)


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(floor, "SEARCH_SECONDS", 0.0)
    monkeypatch.setattr(bench, "ROUNDS", 1)


SMALL = bench.Spec((300, 64), ("int8", "int4"))


# ---- the run ----


def test_report(timed):
    told = []
    report = bench.run(timed, SMALL, seconds=0.0, progress=told.append)
    assert report.device == timed.name
    assert report.correct
    assert [(r.op, r.format) for r in report.results] == [
        (op, f) for f in ("int8", "int4") for op in ("kv_quantize", "kv_dequantize")
    ]
    nbytes = {"int8": 300 * (128 + 64 + 4), "int4": 300 * (128 + 32 + 8)}
    for r in report.results:
        assert r.shape == (300, 64)
        assert r.gb_s == pytest.approx(nbytes[r.format] / r.median_us * 1e-3)
        assert r.of_floor == pytest.approx(r.gb_s / report.copy.gb_s)
        assert r.reference_us > 0
        assert r.variant == kv.plan_for(timed, (300, 64), "bfloat16", r.format).variant
    assert report.read.gb_s > 0
    assert "preparing kv" in told
    assert "checking kv_quantize int8" in told


@pytest.mark.parametrize("granularity", ["per_tensor", "per_token", "per_head", "per_group"])
def test_every_granularity_is_right(timed, granularity):
    spec = bench.Spec((1037, 3, 40), ("fp8_e4m3fn",), "float16", granularity, 16)
    works = bench.OPS["kv"](timed, spec)
    assert [work.check() for work in works] == [None, None]
    for work in works:
        assert floor.seconds_of(timed, work.enqueue, 0.0) > 0


@pytest.mark.parametrize("name", [v.name for v in KV])
def test_forced_variant(timed, name):
    spec = bench.Spec((64, 128), ("int8",), variant=name)
    row = next(v for v in KV if v.name == name)
    if cannot(row, timed.capabilities, Blocks(128, 128, 64, 2)):
        with pytest.raises(UnsupportedDeviceError, match=f"force: {name} cannot run"):
            bench.OPS["kv"](timed, spec)
    else:
        assert {work.variant for work in bench.OPS["kv"](timed, spec)} == {name}


def test_wrong_result_has_no_speed(timed, monkeypatch):
    right = reference.encode
    monkeypatch.setattr(reference, "encode", lambda v, fmt: right(v, fmt) ^ (np.arange(v.size).reshape(v.shape) == 77))
    report = bench.run(timed, bench.Spec((9, 64), ("int8",)), seconds=0.0)
    assert not report.correct
    assert report.read is report.copy is None
    for r, what in zip(report.results, ("codes", "values"), strict=True):
        assert not r.correct
        assert what in r.detail
        assert r.median_us is r.gb_s is r.of_floor is r.reference_us is None


def test_right_results_keep_their_speed_beside_a_wrong_one(timed, monkeypatch):
    right = reference.dequantize
    monkeypatch.setattr(reference, "dequantize", lambda *a, **k: right(*a, **k) * -1)
    report = bench.run(timed, bench.Spec((9, 64), ("int8",)), seconds=0.0, with_reference=False)
    assert not report.correct
    assert [r.correct for r in report.results] == [True, False]
    assert [r.median_us is None for r in report.results] == [False, True]
    assert report.results[0].reference_us is None


def test_tile_mismatch():
    tile = np.arange(21).reshape(7, 3)
    whole = bench.repeated(tile, 24)
    assert whole.shape == (24, 3)
    assert (whole[23] == tile[2]).all()
    assert bench.tile_mismatch(whole, tile, "x") is None
    whole[22, 1] += 1
    assert "x[21:]: expected" in bench.tile_mismatch(whole, tile, "x")


# ---- floors ----


@pytest.mark.parametrize("copies", [False, True])
def test_floor_kernels_move_the_right_bytes(timed, copies):
    floors = floor.Floors(timed, 0)
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
    floors = floor.Floors(timed, 0)
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
    x = bench.cla.to_device(timed.queue, np.ones((64, 64), np.float32))
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
    x = np.random.default_rng(3).normal(0, 2, (5, 8)).astype(bench.FLOAT_DTYPES[dtype])
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
