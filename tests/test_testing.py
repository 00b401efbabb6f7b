"""The helpers that the other tests stand on."""

import ml_dtypes
import numpy as np
import pytest

from pyclquant import kv, selftest
from pyclquant.formats import FORMATS
from pyclquant.selftest import guard_intact, guarded
from pyclquant.testing import median_seconds, mismatch, sqnr_db


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


def test_a_failing_variant_is_reported(dev, monkeypatch):
    monkeypatch.setattr(selftest, "check_case", lambda *args: "codes: expected 1, got 2")
    results = selftest.run(dev)
    assert {r.format for r in results} == set(FORMATS)
    assert not any(r.ok for r in results)
    assert results[0].detail == "codes: expected 1, got 2"
