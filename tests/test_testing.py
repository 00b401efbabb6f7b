"""The helpers that the other tests stand on."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pyopencl as cl
import pyopencl.array as cla
import pytest

from pyclquant import kv, selftest, w8a8
from pyclquant.formats import FORMATS
from pyclquant.selftest import guard_intact, guarded
from pyclquant.testing import (
    SUM_ERROR,
    bits,
    cosine,
    half_ulp,
    median_seconds,
    mismatch,
    product_mismatch,
    relative_rms,
    sqnr_db,
)


def test_mismatch_sees_every_difference():
    a = np.array([1.0, -0.0, np.nan], np.float32)
    assert mismatch(a, a.copy()) is None
    assert "expected float32 (3,), got float64 (3,)" in mismatch(a.astype(np.float64), a)
    assert "expected float32 (3,), got float32 (2,)" in mismatch(a[:2], a)
    zero = a.copy()
    zero[1] = 0.0
    assert "at (1,), 1 of 3 differ" in mismatch(zero, a)
    assert "0x80000000" in mismatch(zero, a)
    assert mismatch(np.array([1, 2], np.int8), np.array([1, 3], np.int8)).startswith("result: expected")


def test_any_nan_equals_any_nan():
    for dtype, payload in ((np.float16, 0x7E01), (ml_dtypes.bfloat16, 0x7FC1)):
        a = np.array([payload], np.uint16).view(dtype)
        assert mismatch(a, np.array([np.nan]).astype(dtype)) is None
    codes = np.array([0x7F, 0xFF], np.uint8).view(ml_dtypes.float8_e4m3fn)
    assert mismatch(codes, codes[::-1].copy()) is None
    assert mismatch(np.zeros(2, ml_dtypes.float8_e4m3fn), codes) is not None


def test_sqnr():
    x = np.array([3.0, 4.0, np.nan])
    assert sqnr_db(x, np.array([3.0, 4.0, 7.0])) == float("inf")
    assert sqnr_db(x, np.array([3.0, 4.5, np.nan])) == pytest.approx(20.0)
    assert sqnr_db(np.zeros(2), np.ones(2)) == float("-inf")


FLOATS = [np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16)]


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.name)
def test_half_ulp_is_half_the_distance_of_neighbours(dtype):
    """Above each of some values: ordinary ones, powers of two, subnormal ones."""
    values = np.array([1.0, 1.5, 3.7, 1024.0, 1e-3, 2.0**-13, 2.0**-20, 2.0**-126]).astype(dtype)
    values = values[values > 0]
    above = (bits(values) + 1).astype(bits(values).dtype).view(dtype).astype(np.float64)
    exact = values.astype(np.float64)
    np.testing.assert_array_equal(half_ulp(exact, dtype), (above - exact) / 2)
    np.testing.assert_array_equal(half_ulp(-exact, dtype), (above - exact) / 2)
    assert (half_ulp(np.zeros(1), dtype) > 0).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.name)
def test_product_mismatch_takes_what_is_rounded_once_and_sees_each_wrong_element(dtype):
    rng = np.random.default_rng(1)
    exact = rng.normal(0, 30, (1000, 64))
    magnitude = np.abs(exact) * 4 + 1
    good = exact.astype(dtype)
    assert product_mismatch(good, exact, magnitude) is None
    slack = SUM_ERROR * 2.0**-24 * magnitude
    assert product_mismatch((exact + 0.9 * slack).astype(dtype), exact, magnitude) is None
    for where in ((0, 0), (999, 63), (500, 7)):
        bad = good.copy()
        bad[where] = np.array(exact[where] + 2.5 * slack[where] + 2 * half_ulp(exact[where], dtype)).astype(dtype)
        assert f"at {where}, 1 of 64000 out of bounds" in product_mismatch(bad, exact, magnitude)
        bad[where] = np.nan
        assert f"at {where}, 1 of 64000 out of bounds" in product_mismatch(bad, exact, magnitude)


def test_a_zeroed_row_passes_the_means_alone():
    """Which is why each element counts."""
    exact = np.random.default_rng(2).normal(0, 30, (20000, 8))
    got = exact.astype(np.float32)
    assert relative_rms(got, exact) < 1e-6
    assert cosine(got, exact) > 1 - 1e-12
    got[77] = 0
    assert relative_rms(got, exact) < 1e-2
    assert cosine(got, exact) > 0.9999
    assert "8 of 160000 out of bounds" in product_mismatch(got, exact, np.abs(exact))


def test_means_see_what_is_wrong_everywhere():
    exact = np.random.default_rng(3).normal(0, 30, (50, 8))
    assert relative_rms(exact * 1.02, exact) == pytest.approx(0.02)
    assert cosine(exact * 1.02, exact) == pytest.approx(1.0)
    assert cosine(exact[:, ::-1], exact) < 0.5
    assert cosine(-exact, exact) == pytest.approx(-1.0)
    one = exact.copy()
    one[3, 3] += 1000
    assert relative_rms(one, exact) > 1e-2
    assert cosine(one, exact) < 0.9999


def test_product_mismatch_of_nan_and_inf():
    exact = np.array([[1.0, np.nan, 1e39, -1e39, 3.0]])
    magnitude = np.ones_like(exact)
    good = np.array([[1.0, np.nan, np.inf, -np.inf, 3.0]], np.float32)
    assert product_mismatch(good, exact, magnitude) is None
    for column, wrong in ((1, 0.0), (2, -np.inf), (3, 1.0), (4, np.inf), (0, np.nan)):
        bad = good.copy()
        bad[0, column] = wrong
        assert f"at (0, {column}), 1 of 5 out of bounds" in product_mismatch(bad, exact, magnitude)
    assert product_mismatch(good[:, :4], exact, magnitude) == "result: expected shape (1, 5), got (1, 4)"
    assert product_mismatch(good[:0], exact[:0], magnitude[:0]) is None


def test_median_counts_up_and_warms_up():
    seen = []
    assert median_seconds(seen.append, seconds=0.0, least=3) >= 0.0
    assert seen == [0, 1, 2, 3]


def test_a_written_guard_is_seen(dev):
    array, whole = guarded(dev.queue, (4, 8), np.dtype(np.float32))
    assert array.shape == (4, 8)
    assert guard_intact(whole)
    whole[32:33].fill(np.float32(1))
    assert not guard_intact(whole)


def test_a_wrong_kernel_is_seen(dev, monkeypatch):
    """The self-test fails when a scale is off by one bit, when a code is, and when a value is."""
    case = next(selftest.quick_cases())
    assert selftest.check_case(dev, case, None) is None
    real = kv.quantize

    def wrong_scale(*args, **kwargs):
        q = real(*args, **kwargs)
        q.scales.set(np.nextafter(q.scales.get(), np.float32(1)))
        return q

    monkeypatch.setattr(kv, "quantize", wrong_scale)
    assert selftest.check_case(dev, case, None).startswith("scales: expected")

    def wrong_code(*args, **kwargs):
        q = real(*args, **kwargs)
        codes = q.codes.get().view(np.uint8)
        codes[-1, -1, -1] ^= 1
        q.codes.set(codes.view(q.codes.dtype))
        return q

    monkeypatch.setattr(kv, "quantize", wrong_code)
    assert selftest.check_case(dev, case, None).startswith("codes: expected")
    monkeypatch.setattr(kv, "quantize", real)
    back = kv.dequantize

    def wrong_value(*args, **kwargs):
        y = back(*args, **kwargs)
        y.set(np.zeros(y.shape, y.dtype))
        return y

    monkeypatch.setattr(kv, "dequantize", wrong_value)
    assert selftest.check_case(dev, case, None).startswith("values: expected")


def test_a_wrong_projection_is_seen(dev, monkeypatch):
    """The self-test fails when one element is off, when a column beyond N is written, and when rows differ by their place."""
    p = selftest.Projection(3, (160,), 384, "per_row", "float32")
    assert selftest.check_gemv(dev, p, None) is None
    assert selftest.check_quantizers(dev, p, None) is None
    real = w8a8.gemv

    def changed(where, what, when=lambda rows: True):
        def gemv(dev, acts, *args, **kwargs):
            c = real(dev, acts, *args, **kwargs)
            if when(acts.codes.shape[0]):
                whole = c if "out" not in kwargs else cla.Array(dev.queue, (3, 160 + selftest.GUARD), c.dtype, data=c.base_data)
                host = whole.get()
                host[where] = what(host[where])
                cl.enqueue_copy(dev.queue, whole.base_data, host)
            return c

        return gemv

    def fails(gemv):
        monkeypatch.setattr(w8a8, "gemv", gemv)
        return selftest.check_gemv(dev, p, None)

    assert "at (2, 159), 1 of 480 out of bounds" in fails(changed((2, 159), lambda v: v * 1.01 + 1))
    assert fails(changed((1, 160), lambda v: v * 0)).startswith("columns beyond N were written")
    assert fails(changed((0, 7), lambda v: np.nextafter(v, np.float32(1e9)), lambda rows: rows == 1)).startswith("row 0 alone")


@pytest.mark.parametrize("op", ["act_quant", "gemv"])
def test_known_answers_tell_what_is_wrong_and_what_cannot_run(dev, monkeypatch, op):
    assert selftest.projection_answers(dev.queue, dev.capabilities, op, "base") is None
    narrow = replace(dev.capabilities, reported={**dev.capabilities.reported, "max_work_group_size": 1})
    assert "work-groups of 1" in selftest.projection_answers(dev.queue, narrow, op, "vector")
    monkeypatch.setitem(selftest.CHECKS, op, lambda dev, p, variant: f"wrong with {p.k} columns")
    assert selftest.projection_answers(dev.queue, dev.capabilities, op, "base").startswith("wrong with")


def test_a_wrong_quantizer_is_seen(dev, monkeypatch):
    p = selftest.Projection(3, (160,), 384, "block_128")
    for name, part in (("act_quant", 0), ("act_quant_silu", 1), ("quantize_weight", 0), ("silu_mul", None)):
        real = getattr(w8a8, name)

        def wrong(*args, real=real, part=part, **kwargs):
            result = real(*args, **kwargs)
            array = result if part is None else result[part]
            host = array.get()
            host.view(np.uint8).reshape(-1)[-1] ^= 1
            array.set(host)
            return result

        with monkeypatch.context() as patch:
            patch.setattr(w8a8, name, wrong)
            assert selftest.check_quantizers(dev, p, None).startswith(name)


def test_a_failing_variant_is_reported(dev, monkeypatch):
    """Each row of the run; those that the device cannot run say so."""
    monkeypatch.setattr(selftest, "check_case", lambda *args: "codes: expected 1, got 2")
    monkeypatch.setattr(selftest, "CHECKS", dict.fromkeys(selftest.CHECKS, lambda *args: "codes: expected 1, got 2"))
    results = selftest.run(dev)
    assert {(r.op, r.format) for r in results} == {
        *(("kv", name) for name in FORMATS),
        *((op, layout) for op in ("act_quant", "gemv") for layout in w8a8.SCALE_LAYOUTS),
    }
    assert not any(r.ok for r in results)
    assert results[0].detail == "codes: expected 1, got 2"
