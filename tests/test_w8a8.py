"""The W8A8 projections: quantizers byte for byte, products against the exact sums, and what they refuse."""

import re
import sys
import threading
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pyopencl as cl
import pyopencl.array as cla
import pytest
from hypothesis import given, settings

import pyclquant as pq
from pyclquant import program, reference, variants, w8a8
from pyclquant.capabilities import Verdict
from pyclquant.formats import FLOAT_DTYPES, FORMATS
from pyclquant.selftest import Projection, check_gemv, check_quantizers, guard_intact, guarded, matrix, sample
from pyclquant.testing import cosine, mismatch, product_mismatch, relative_rms
from pyclquant.tuned import ANY
from pyclquant.variants import GEMV, Plan, Product, cannot, never
from pyclquant.w8a8 import Activations, Scratch, Segment, Weight

bfloat16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = FORMATS["fp8_e4m3fn"].codes_dtype
LAYOUTS = w8a8.SCALE_LAYOUTS
ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 63, 64, 65, 128, 129, 200, 256)
"""Both sides of every tile's limit."""

layouts = pytest.mark.parametrize("layout", LAYOUTS)
dtypes = pytest.mark.parametrize("dtype", FLOAT_DTYPES)


def put(dev, a):
    """A NumPy array on the device."""
    return cla.to_device(dev.queue, a)


def inside(dev, a, before, behind):
    """A matrix on the device as columns of a wider one: the view, and the whole, which is 0xA5 elsewhere."""
    host = np.full((a.shape[0], (before + a.shape[1] + behind) * a.dtype.itemsize), 0xA5, np.uint8).view(a.dtype)
    host[:, before : before + a.shape[1]] = a
    whole = put(dev, host)
    return whole[:, before : before + a.shape[1]], whole


def equal(got, want, what):
    """Codes and scales of a result on the device are those of the reference."""
    for part, a, b in zip(("codes", "scales"), got, want, strict=True):
        assert mismatch(a.get(), b, f"{what} {part}") is None


def device_of(dev, **works):
    """The device under test with its own kernels, and other verdicts."""
    verdicts = {name: Verdict(ok, "as the test says") for name, ok in works.items()}
    return pq.Device(dev.queue, replace(dev.capabilities, works={**dev.capabilities.works, **verdicts}))


# ---- quantizers ----


@pytest.mark.oclgrind
@layouts
def test_quantizers_of_a_few_rows(dev, act_variant, layout):
    assert check_quantizers(dev, Projection(3, (5,), 128, layout), act_variant) is None


@pytest.mark.parametrize("k", [128, 384, 1152])
@dtypes
@layouts
def test_quantizers(dev, act_variant, layout, dtype, k):
    """Every special row, and weights whose last block is short."""
    assert check_quantizers(dev, Projection(17, (130,), k, layout, dtype), act_variant) is None


@pytest.mark.parametrize("rows", [1, 2, 255, 256])
@layouts
def test_quantizers_of_few_and_many_rows(dev, layout, rows):
    assert check_quantizers(dev, Projection(rows, (16,), 256, layout), None) is None


@pytest.mark.parametrize(("before", "behind"), [(8, 0), (0, 8), (24, 40), (128, 128)])
@dtypes
@layouts
def test_rows_of_any_pitch(dev, act_variant, layout, dtype, before, behind):
    """A view of columns is read where it is."""
    host = sample((17, 256), dtype, 3)
    x, whole = inside(dev, host, before, behind)
    equal(w8a8.act_quant(dev, x, layout, force=act_variant), reference.act_quant(host, layout), "act_quant")
    equal(w8a8.quantize_weight(dev, x, layout, force=act_variant), reference.quantize_weight(host, layout), "quantize_weight")
    up, _ = inside(dev, host[::-1], before, behind)
    want = reference.silu_mul(host, host[::-1])
    assert mismatch(w8a8.silu_mul(dev, x, up, force=act_variant).get(), want) is None
    assert (np.ascontiguousarray(whole.get()[:, :before]).view(np.uint8) == 0xA5).all()


@layouts
def test_one_row_with_an_offset(dev, layout):
    """The pitch of one row does not matter, and only its own columns count."""
    host = sample((3, 512), "bfloat16", 4)
    x = put(dev, host)[2:3, 264:392]
    equal(w8a8.act_quant(dev, x, layout), reference.act_quant(host[2:3, 264:392], layout), "act_quant")


@pytest.mark.parametrize("rows", [1, 17])
@dtypes
@layouts
def test_gate_and_up_are_halves_of_one_array(dev, act_variant, layout, dtype, rows):
    host = sample((rows, 2 * 384), dtype, 6)
    both = put(dev, host)
    gate, up = host[:, :384], host[:, 384:]
    got = w8a8.act_quant_silu(dev, both[:, :384], both[:, 384:], layout, force=act_variant)
    equal(got, reference.act_quant_silu(gate, up, layout), "act_quant_silu")
    h = w8a8.silu_mul(dev, both[:, :384], both[:, 384:], force=act_variant)
    assert mismatch(h.get(), reference.silu_mul(gate, up)) is None


@dtypes
@layouts
def test_one_pass_equals_two(dev, act_variant, layout, dtype):
    """On the device, without the reference."""
    gate, up = (put(dev, sample((33, 640), dtype, seed)) for seed in (7, 8))
    fused = w8a8.act_quant_silu(dev, gate, up, layout, force=act_variant)
    h = w8a8.silu_mul(dev, gate, up, force=act_variant)
    equal(fused, [a.get() for a in w8a8.act_quant(dev, h, layout, force=act_variant)], "act_quant_silu")


def test_silu_of_every_bfloat16(dev, act_variant):
    gate = np.arange(65536, dtype=np.uint16).view(bfloat16).reshape(256, 256)
    for value in (1.0, -3.0):
        up = np.full(gate.shape, value, bfloat16)
        assert mismatch(w8a8.silu_mul(dev, gate, up, force=act_variant).get(), reference.silu_mul(gate, up)) is None


@layouts
def test_numpy_views_are_copied(dev, layout):
    """Whatever their strides."""
    host = sample((256, 12), "float32", 9)
    x = host.T[::2]
    equal(w8a8.act_quant(dev, x, layout), reference.act_quant(np.ascontiguousarray(x), layout), "act_quant")
    w = np.ascontiguousarray(host.T)[::-1]
    equal(w8a8.quantize_weight(dev, w, layout), reference.quantize_weight(w, layout), "quantize_weight")


@pytest.mark.parametrize("eps", [1e-12, 0.25, 1e6])
@layouts
def test_the_floor_of_a_scale(dev, act_variant, layout, eps):
    x, up = (sample((9, 256), "bfloat16", seed) for seed in (10, 11))
    how = {"eps": eps, "force": act_variant}
    equal(w8a8.act_quant(dev, x, layout, **how), reference.act_quant(x, layout, eps), "act_quant")
    equal(w8a8.act_quant_silu(dev, x, up, layout, **how), reference.act_quant_silu(x, up, layout, eps), "act_quant_silu")
    equal(w8a8.quantize_weight(dev, x, layout, **how), reference.quantize_weight(x, layout, eps), "quantize_weight")


@layouts
def test_nothing_behind_outputs_is_written(dev, act_variant, layout, monkeypatch):
    stores = []

    def empty(queue, shape, dtype):
        array, whole = guarded(queue, shape if isinstance(shape, tuple) else (shape,), np.dtype(dtype))
        stores.append(whole)
        return array

    x, up = (put(dev, sample((5, 384), "bfloat16", seed)) for seed in (1, 2))
    monkeypatch.setattr(cla, "empty", empty)
    for op in (w8a8.act_quant, w8a8.quantize_weight):
        op(dev, x, layout, force=act_variant)
    w8a8.act_quant_silu(dev, x, up, layout, force=act_variant)
    w8a8.silu_mul(dev, x, up, force=act_variant)
    assert len(stores) == 7
    assert all(guard_intact(whole) for whole in stores)


def test_a_weight_without_rows(dev):
    for layout in LAYOUTS:
        s = w8a8.quantize_weight(dev, np.zeros((0, 256), np.float32), layout)
        assert s.codes.shape == (0, 256)
        assert s.scales.shape == w8a8.scales_shape(0, 256, layout)


def test_a_long_row(dev, act_variant):
    """Longer than any work-group, with its largest element last."""
    x = sample((3, 128 * 211), "float32", 12)
    x[0, -1] = 1e4
    for layout in LAYOUTS:
        equal(w8a8.act_quant(dev, x, layout, force=act_variant), reference.act_quant(x, layout), "act_quant")


@given(
    data=st.data(),
    dtype=st.sampled_from(sorted(FLOAT_DTYPES)),
    layout=st.sampled_from(LAYOUTS),
    rows=st.integers(1, 2),
)
@settings(max_examples=60)
def test_any_values(dev, data, dtype, layout, rows):
    """Any bit patterns at all, as activations, gate and up."""
    size = rows * 128 * FLOAT_DTYPES[dtype].itemsize
    x, up = (np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), FLOAT_DTYPES[dtype]) for _ in range(2))
    x, up = x.reshape(rows, 128), up.reshape(rows, 128)
    equal(w8a8.act_quant(dev, x, layout), reference.act_quant(x, layout), "act_quant")
    equal(w8a8.act_quant_silu(dev, x, up, layout), reference.act_quant_silu(x, up, layout), "act_quant_silu")


@given(
    dtype=st.sampled_from(sorted(FLOAT_DTYPES)),
    layout=st.sampled_from(LAYOUTS),
    rows=st.integers(1, 40),
    chunks=st.integers(1, 12),
    before=st.integers(0, 20),
    behind=st.integers(0, 20),
    seed=st.integers(0, 9),
)
@settings(max_examples=60)
def test_any_shape(dev, dtype, layout, rows, chunks, before, behind, seed):
    """Any matrix, anywhere in a wider one."""
    host, second = (sample((rows, 128 * chunks), dtype, s) for s in (seed, seed + 10))
    x, up = (inside(dev, a, 8 * before, 8 * behind)[0] for a in (host, second))
    equal(w8a8.act_quant(dev, x, layout), reference.act_quant(host, layout), "act_quant")
    equal(w8a8.quantize_weight(dev, x, layout), reference.quantize_weight(host, layout), "quantize_weight")
    equal(w8a8.act_quant_silu(dev, x, up, layout), reference.act_quant_silu(host, second, layout), "act_quant_silu")


# ---- products ----


class Exact(NamedTuple):
    """Activations and weights on the host, with outliers, and their exact product."""

    codes: np.ndarray
    scales: np.ndarray
    segments: list
    product: np.ndarray
    magnitude: np.ndarray

    def activations(self, dev, rows=slice(None)):
        """Some rows, on the device."""
        return Activations(put(dev, self.codes[rows]), put(dev, self.scales[rows]))

    def accepts(self, got, rows=slice(None)):
        """Fails unless `got` is the product of these rows, each element within its bounds."""
        exact = self.product[rows]
        with np.errstate(over="ignore"):
            assert product_mismatch(got, exact, self.magnitude[rows], self.codes.shape[1]) is None
        assert relative_rms(got, exact) <= 1e-2
        assert cosine(got, exact) >= 0.9999


def exactly(codes, scales, segments, layout):
    """The product of activations and segments that are quantized already."""
    return Exact(codes, scales, segments, *reference.gemv(codes, scales, segments, layout))


def uneven(w, seed):
    """Weights whose blocks of 128 x 128 differ in size, so that no two scales are alike."""
    rng = np.random.default_rng(seed)
    factors = rng.uniform(0.01, 0.1, w8a8.scales_shape(*w.shape, "block_128")).astype(np.float32)
    return w * np.repeat(np.repeat(factors, 128, 0)[: len(w)], 128, 1)


@cache
def random_product(rows, segments, k, layout, seed=8):
    """Of random [rows, k], and weights of so many rows each."""
    codes, scales = reference.act_quant(matrix(rows, k, "bfloat16", seed), layout)
    weights = [uneven(matrix(n, k, "float32", seed + 1 + i), i) for i, n in enumerate(segments)]
    return exactly(codes, scales, [reference.quantize_weight(w, layout) for w in weights], layout)


@pytest.mark.oclgrind
@pytest.mark.parametrize("segments", [(3,), (16, 16, 3)], ids=str)
def test_gemv_per_row_of_a_few_rows(dev, gemv_variant, segments):
    assert check_gemv(dev, Projection(3, segments, 256, "per_row"), gemv_variant) is None


@pytest.mark.oclgrind
def test_gemv_block_128_of_a_few_rows(dev, gemv_variant):
    assert check_gemv(dev, Projection(2, (128, 3), 256, "block_128", "float32"), gemv_variant) is None


@layouts
def test_every_number_of_rows(dev, gemv_variant, layout):
    """Every tile; and the bits of a row are the same wherever it stands, among however many others."""
    p = random_product(256, (128, 7), 384, layout)
    w = Weight(dev, p.segments)
    acts = p.activations(dev)
    whole = w8a8.gemv(dev, acts, w, force=gemv_variant).get()
    p.accepts(whole)
    for rows in ROWS:
        for part in (slice(0, rows), slice(256 - rows, 256)):
            got = w8a8.gemv(dev, Activations(acts.codes[part], acts.scales[part]), w, force=gemv_variant).get()
            assert mismatch(got, whole[part], f"{rows} rows from {part.start}") is None


@layouts
def test_a_row_alone_and_again(dev, gemv_variant, layout):
    """Races show as runs that differ, neighbours as rows that do."""
    p = random_product(70, (128, 130), 640, layout)
    w = Weight(dev, p.segments)
    acts = p.activations(dev)
    whole = w8a8.gemv(dev, acts, w, "float32", force=gemv_variant).get()
    p.accepts(whole)
    for row in (0, 1, 7, 8, 31, 64, 69):
        one = Activations(acts.codes[row : row + 1], acts.scales[row : row + 1])
        for _ in range(2):
            assert mismatch(w8a8.gemv(dev, one, w, "float32", force=gemv_variant).get()[0], whole[row], f"row {row}") is None
    for _ in range(3):
        assert mismatch(w8a8.gemv(dev, acts, w, "float32", force=gemv_variant).get(), whole) is None


@pytest.mark.parametrize("k", [pytest.param(384, marks=pytest.mark.oclgrind), 4608 + 128])
@layouts
def test_launch_parameters_change_no_bit(dev, layout, k):
    """Of `vector`, which every device runs: columns that end within a stage, teams that stand apart, rows beyond the last."""
    p = random_product(3, (128, 23), k, layout)
    w, acts = Weight(dev, p.segments), p.activations(dev)
    want = w8a8.gemv(dev, acts, w, "float32", force="vector").get()
    p.accepts(want)
    for spans, spread, wg, tile_n in ((1, 2, 64, 4), (2, 4, 128, 2), (8, 1, 64, 1), (8, 4, 256, 4)):
        values = {"spans": spans, "spread": spread, "wg": wg, "tile_n": tile_n}
        caps = replace(dev.capabilities, tuned=(("test", {"gemv/vector": {ANY: values}}),))
        got = w8a8.gemv(pq.Device(dev.queue, caps), acts, w, "float32", force="vector").get()
        assert mismatch(got, want, f"{values}") is None


@layouts
def test_a_weight_of_many_rows_has_the_bits_of_one_of_few(dev, layout, monkeypatch):
    """Larger tiles, more local memory: see `variants.mma_size`."""
    w = Weight(dev, random_product(1, (384, 130), 1152, layout).segments)
    for rows in (9, 32, 64, 128):
        acts = w8a8.act_quant(dev, sample((rows, 1152), "bfloat16", rows), layout)
        few = w8a8.gemv(dev, acts, w).get()
        with monkeypatch.context() as changed:
            changed.setattr(variants, "MANY_ROWS", 0)
            assert mismatch(w8a8.gemv(pq.Device(dev.queue, dev.capabilities), acts, w).get(), few, f"{rows} rows") is None


@pytest.mark.parametrize("k", [128, 256, 384, 1152, 2048 + 128])
@layouts
def test_any_number_of_chunks(dev, gemv_variant, layout, k):
    p = random_product(9, (33,), k, layout)
    p.accepts(w8a8.gemv(dev, p.activations(dev), Weight(dev, p.segments), "float32", force=gemv_variant).get())


@pytest.mark.parametrize("n", [1, 2, 7, 15, 16, 17, 63, 127, 128, 129, 130, 257])
@layouts
def test_any_number_of_outputs(dev, gemv_variant, layout, n):
    """The last rows of a weight, and the last of a block."""
    p = random_product(5, (n,), 256, layout)
    p.accepts(w8a8.gemv(dev, p.activations(dev), Weight(dev, p.segments), "float32", force=gemv_variant).get())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@layouts
def test_outputs_are_rounded_once(dev, gemv_variant, layout, dtype):
    """The sums do not depend on the output's type, so that its bits are those of the float32 result."""
    p = random_product(33, (128, 72), 384, layout)
    w, acts = Weight(dev, p.segments), p.activations(dev)
    got = w8a8.gemv(dev, acts, w, dtype, force=gemv_variant).get()
    p.accepts(got)
    wide = w8a8.gemv(dev, acts, w, "float32", force=gemv_variant).get()
    assert mismatch(got, wide.astype(FLOAT_DTYPES[dtype])) is None


@pytest.mark.parametrize("segments", [(48,), (16, 16), (32, 1), (16, 48, 16), (16, 32, 5)], ids=str)
def test_segments_per_row_have_the_bits_of_separate_runs(dev, gemv_variant, segments):
    separate_runs(dev, gemv_variant, segments, "per_row")


@pytest.mark.parametrize("segments", [(200,), (128, 128), (128, 1), (256, 128, 128), (128, 384, 130)], ids=str)
def test_segments_block_128_have_the_bits_of_separate_runs(dev, gemv_variant, segments):
    separate_runs(dev, gemv_variant, segments, "block_128")


def separate_runs(dev, variant, segments, layout):
    for rows in (1, 6, 20):
        p = random_product(rows, segments, 256, layout)
        w, acts = Weight(dev, p.segments), p.activations(dev)
        whole = w8a8.gemv(dev, acts, w, force=variant).get()
        p.accepts(whole)
        parts = [w8a8.gemv(dev, acts, w.segment(i), force=variant).get() for i in range(len(segments))]
        assert mismatch(np.concatenate(parts, axis=1), whole) is None


@pytest.mark.parametrize(("before", "behind"), [(0, 1), (3, 5), (64, 0)])
@dtypes
def test_only_the_columns_of_the_output_are_written(dev, gemv_variant, dtype, before, behind):
    p = random_product(130, (48, 37), 256, "per_row")
    w = Weight(dev, p.segments)
    out, whole = inside(dev, np.zeros((130, w.n), FLOAT_DTYPES[dtype]), before, behind)
    assert w8a8.gemv(dev, p.activations(dev), w, dtype, out=out, force=gemv_variant) is out
    got = whole.get()
    p.accepts(got[:, before : before + w.n])
    for beside in (got[:, :before], got[:, before + w.n :]):
        assert (np.ascontiguousarray(beside).view(np.uint8) == 0xA5).all()


@layouts
def test_special_activations_spoil_only_their_rows(dev, gemv_variant, layout):
    """A NaN code makes a row of NaN; zeros stay zero; -0.0 and saturated codes count for what they are."""
    rows, n, k = 9, 130, 256
    clean = random_product(rows, (n,), k, layout)
    codes = clean.codes.copy()
    bits = codes.view(np.uint8)
    bits[1, 200] = 0x7F
    bits[4, 0] = 0xFF
    bits[2] = 0
    bits[3] = 0x80
    bits[5, ::2] = 0x7E
    bits[6, :100] = np.arange(100) % 8  # subnormal
    p = exactly(codes, clean.scales, clean.segments, layout)
    w = Weight(dev, clean.segments)
    got = w8a8.gemv(dev, p.activations(dev), w, force=gemv_variant).get()
    assert product_mismatch(got, p.product, p.magnitude) is None
    assert np.isnan(got[[1, 4]].astype(np.float32)).all()
    assert (got[[2, 3]] == 0).all()
    untouched = w8a8.gemv(dev, clean.activations(dev), w, force=gemv_variant).get()
    for row in (0, 7, 8):
        assert mismatch(got[row], untouched[row], f"row {row}") is None


@layouts
def test_every_code_of_weights_and_activations(dev, gemv_variant, layout):
    """Each finite code in a row of its own, times each: both are decoded exactly, and products of two are exact."""
    finite = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    for sign in (0, 128):
        part = finite[(finite & 0x80) == sign]
        codes, w_codes = np.zeros((len(part), 128), np.uint8), np.zeros((len(finite), 128), np.uint8)
        codes[:, 77] = part
        w_codes[:, 77] = finite
        scales = np.ones((len(part), 1), np.float32)[:, 0 if layout == "per_row" else slice(None)]
        w_scales = np.ones(w8a8.scales_shape(len(finite), 128, layout), np.float32)
        acts = Activations(put(dev, codes.view(E4M3)), put(dev, scales))
        w = Weight(dev, Segment(w_codes.view(E4M3), w_scales))
        got = w8a8.gemv(dev, acts, w, "float32", force=gemv_variant).get()
        want = np.outer(part.view(E4M3).astype(np.float32), finite.view(E4M3).astype(np.float32)).astype(np.float32)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("a_scale", "w_scale"), [(1e-30, 1e33), (1e33, 1e-30), (1e-12, 3e38), (1.0, 0.0)])
@layouts
def test_the_two_scales_are_multiplied_first(dev, gemv_variant, layout, a_scale, w_scale):
    """The sum times one of them alone would be too large or too small for float32."""
    p = random_product(5, (40,), 256, layout)
    scales = np.full_like(p.scales, a_scale)
    segments = [(codes, np.full_like(s, w_scale)) for codes, s in p.segments]
    extreme = exactly(p.codes, scales, segments, layout)
    acts = Activations(put(dev, p.codes), put(dev, scales))
    got = w8a8.gemv(dev, acts, Weight(dev, segments), "float32", force=gemv_variant).get()
    assert product_mismatch(got, extreme.product, extreme.magnitude) is None


@pytest.mark.parametrize("offset", [1, 4, 8, 16])
@layouts
def test_codes_may_lie_anywhere(dev, layout, offset):
    """Slices of larger arrays; a variant that needs them aligned is not taken."""
    p = random_product(5, (40,), 256, layout)

    def slid(a):
        whole = put(dev, np.concatenate([np.zeros(offset, a.dtype), a.ravel()]))
        return whole[offset:].reshape(a.shape)

    w = Weight(dev, [(slid(codes), slid(scales)) for codes, scales in p.segments])
    p.accepts(w8a8.gemv(dev, Activations(slid(p.codes), slid(p.scales)), w, "float32").get())
    if offset < 16:
        with pytest.raises(pq.UnsupportedDeviceError, match=f"weights at multiples of {offset} bytes, 16 are needed"):
            w8a8.gemv(dev, Activations(slid(p.codes), slid(p.scales)), w, force="vector")


@given(
    rows=st.integers(1, 40),
    first=st.integers(0, 2),
    n=st.integers(1, 150),
    chunks=st.integers(1, 9),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(sorted(FLOAT_DTYPES)),
)
@settings(max_examples=40)
def test_any_product(dev, rows, first, n, chunks, layout, dtype):
    segments = (128 * first, n) if first else (n,)
    assert check_gemv(dev, Projection(rows, segments, 128 * chunks, layout, dtype), None) is None


# ---- a real model's weights ----


@pytest.mark.parametrize(
    "names", [("q_proj",), ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("down_proj",)], ids="+".join
)
@layouts
def test_real_weights(dev, gemv_variant, projections, names, layout):
    """Quantized on the device, projected, and not far from what they were."""
    weights = [projections[name] for name in names]
    if layout == "block_128" and any(len(w) % 128 for w in weights[:-1]):
        weights = weights[-1:]
    k = weights[0].shape[1]
    x = np.random.default_rng(3).normal(0, 1, (20, k)).astype(bfloat16)
    segments = [w8a8.quantize_weight(dev, w, layout) for w in weights]
    for s, w in zip(segments, weights, strict=True):
        equal(s, reference.quantize_weight(w, layout), "quantize_weight")
    p = exactly(*reference.act_quant(x, layout), [(s.codes.get(), s.scales.get()) for s in segments], layout)
    got = w8a8.proj(dev, x, Weight(dev, segments), force=gemv_variant).get()
    p.accepts(got)
    true = x.astype(np.float64) @ np.concatenate(weights).astype(np.float64).T
    assert relative_rms(got, true) < 0.05


# ---- proj, prepare ----


@pytest.mark.parametrize("silu", [False, True])
@layouts
def test_proj_is_act_quant_and_gemv(dev, gemv_variant, layout, silu):
    x, up = (sample((20, 384), "bfloat16", seed) for seed in (1, 2))
    w = Weight(dev, random_product(1, (128, 72), 384, layout).segments)
    acts = w8a8.act_quant_silu(dev, x, up, layout) if silu else w8a8.act_quant(dev, x, layout)
    for dtype in FLOAT_DTYPES:
        want = w8a8.gemv(dev, acts, w, dtype, force=gemv_variant).get()
        got = w8a8.proj(dev, x, w, dtype, up=up if silu else None, force=gemv_variant)
        assert got.dtype == FLOAT_DTYPES[dtype]
        assert mismatch(got.get(), want) is None


@layouts
def test_proj_takes_views_and_gives_views(dev, layout):
    host = sample((7, 2 * 384), "bfloat16", 5)
    both = put(dev, host)
    w = Weight(dev, random_product(1, (40,), 384, layout).segments)
    out, whole = inside(dev, np.zeros((7, 40), bfloat16), 16, 8)
    w8a8.proj(dev, both[:, :384], w, up=both[:, 384:], out=out)
    want = w8a8.proj(dev, host[:, :384], w, up=host[:, 384:]).get()
    assert mismatch(whole.get()[:, 16:56], want) is None


@layouts
def test_scratch_is_used_and_used_again(dev, gemv_variant, layout):
    """Its memory holds the activations of the last call, whatever the sizes."""
    scratch = Scratch.alloc(dev, 1152)
    for rows, k in ((256, 384), (3, 1152), (129, 128), (1, 1152)):
        x = sample((rows, k), "bfloat16", rows)
        w = Weight(dev, random_product(1, (24,), k, layout).segments)
        got = w8a8.proj(dev, x, w, scratch=scratch, force=gemv_variant).get()
        assert mismatch(got, w8a8.proj(dev, x, w, force=gemv_variant).get(), f"{rows} rows of {k}") is None
        codes, scales = reference.act_quant(x, layout)
        assert mismatch(scratch.codes.get()[: codes.size], codes.ravel()) is None
        assert mismatch(scratch.scales.get()[: scales.size], scales.ravel()) is None
        acts = w8a8.act_quant(dev, x, layout, scratch=scratch)
        assert mismatch(w8a8.gemv(dev, acts, w, scratch=scratch, force=gemv_variant).get(), got) is None


def test_what_scratch_fits(dev):
    scratch = Scratch.alloc(dev, 512)
    for layout in LAYOUTS:
        assert scratch.fits(256, 512, layout)
        assert not scratch.fits(256, 640, layout)
        assert scratch.fits(128, 1024, layout)
        assert not scratch.fits(129, 1024, layout)
    few = Scratch(scratch.codes, scratch.scales[:7], None)
    assert few.fits(7, 512, "per_row")
    assert not few.fits(8, 512, "per_row")
    assert few.fits(1, 512, "block_128")
    assert not few.fits(2, 512, "block_128")
    with pytest.raises(pq.ShapeError, match=r"scratch: expected room for 2 rows of K=512 \(block_128\)"):
        few.activations(2, 512, "block_128")
    with pytest.raises(pq.ShapeError, match="scale_layout: expected one of per_row, block_128, got 'per_tensor'"):
        scratch.fits(1, 128, "per_tensor")
    with pytest.raises(pq.ShapeError, match="max_k: expected a positive number of columns, got 0"):
        Scratch.alloc(dev, 0)


@pytest.mark.parametrize("rows", [1, 20, 200])
@pytest.mark.parametrize("silu", [False, True])
@layouts
def test_prepared_projections_read_their_inputs_anew(dev, gemv_variant, layout, silu, rows):
    w = Weight(dev, random_product(1, (128, 40), 384, layout).segments)
    x, up = (cla.empty(dev.queue, (rows, 384), bfloat16) for _ in range(2))
    scratch = Scratch.alloc(dev, 384)
    prepared = w8a8.prepare(dev, x, w, up=up if silu else None, scratch=scratch, force=gemv_variant)
    for seed in (1, 2):
        hosts = [sample((rows, 384), "bfloat16", s) for s in (seed, seed + 5)]
        for a, host in zip((x, up), hosts, strict=True):
            a.set(host)
        for _ in range(2):
            prepared.enqueue().wait()
            want = w8a8.proj(dev, hosts[0], w, up=hosts[1] if silu else None, force=gemv_variant).get()
            assert mismatch(prepared.out.get(), want) is None


@pytest.mark.parametrize("rows", [1, 20, 200])
@pytest.mark.parametrize("silu", [False, True])
@layouts
def test_a_projection_that_is_called_again(dev, gemv_variant, layout, silu, rows):
    """The third call finds its launches bound; it must read and write the arrays that it is given, wherever they are."""
    w = Weight(dev, random_product(1, (128, 40), 384, layout).segments)
    scratch = Scratch.alloc(dev, 384)
    for seed in range(5):
        hosts = [sample((rows, 384), "bfloat16", seed + other) for other in (0, 5)]
        x, up = (put(dev, host) for host in hosts)
        out = cla.zeros(dev.queue, (rows, 168), np.float32)
        pair = {"up": up} if silu else {}
        assert w8a8.proj(dev, x, w, "float32", out=out, scratch=scratch, force=gemv_variant, **pair) is out
        assert scratch.codes.events == scratch.scales.events == out.events
        want = w8a8.proj(dev, x, w, "float32", force=gemv_variant, **pair).get()
        assert mismatch(out.get(), want) is None
    assert [type(r) for r in w.repeated.values()] == [w8a8.Repeated]


def test_what_is_remembered_of_a_projection(dev):
    """No array is kept alive, another scratch or another place of an array is another call, and 32 are kept."""
    w = Weight(dev, random_product(1, (40,), 256, "per_row").segments)
    scratch = Scratch.alloc(dev, 256)
    x, out = put(dev, sample((3, 256), "bfloat16", 1)), cla.zeros(dev.queue, (3, 40), np.float32)
    for _ in range(3):
        w8a8.proj(dev, x, w, "float32", out=out, scratch=scratch)
    want = out.get()
    buffers = [x.base_data, out.base_data]
    del x, out
    assert [sys.getrefcount(buffers[i]) for i in range(2)] == [2, 2]  # the list's, and that of the call

    scratch = Scratch.alloc(dev, 256)
    for row in range(40):
        x, whole = inside(dev, sample((3, 256), "bfloat16", 1), 0, 8 * row), cla.zeros(dev.queue, (3, 50), np.float32)
        w8a8.proj(dev, x[0], w, "float32", out=whole[:, 5:45], scratch=scratch)
        assert mismatch(np.ascontiguousarray(whole.get()[:, 5:45]), want) is None
    assert len(w.repeated) == 32


def test_a_projection_that_is_called_again_is_checked_again(dev):
    w = Weight(dev, random_product(1, (40,), 256, "per_row").segments)
    scratch = Scratch.alloc(dev, 256)
    x, out = put(dev, sample((3, 256), "bfloat16", 1)), cla.zeros(dev.queue, (3, 40), np.float32)
    for _ in range(3):
        w8a8.proj(dev, x, w, "float32", out=out, scratch=scratch)
    for wrong, error in (
        ({"x": x.view(np.uint16)}, pq.DTypeError),
        ({"x": x[:, :128]}, pq.ShapeError),
        ({"out": out[:2]}, pq.ShapeError),
        ({"dtype": "bfloat16"}, pq.DTypeError),
        ({"dtype": ["float32"]}, pq.DTypeError),
        ({"eps": -1.0}, pq.ShapeError),
        ({"eps": "1"}, pq.DTypeError),
        ({"force": "fast"}, pq.UnsupportedDeviceError),
    ):
        call = {"x": x, "dtype": "float32", "out": out, **wrong}
        with pytest.raises(error):
            w8a8.proj(dev, call.pop("x"), w, scratch=scratch, **call)


def test_prepare_writes_where_it_is_told(dev):
    w = Weight(dev, random_product(1, (40,), 256, "per_row").segments)
    x = put(dev, sample((5, 256), "bfloat16", 1))
    out, whole = inside(dev, np.zeros((5, 40), np.float32), 2, 3)
    w8a8.prepare(dev, x, w, "float32", out=out).enqueue().wait()
    got = whole.get()
    assert mismatch(got[:, 2:42], w8a8.proj(dev, x, w, "float32").get()) is None
    assert (np.ascontiguousarray(got[:, 42:]).view(np.uint8) == 0xA5).all()


def test_prepare_wants_arrays_on_the_device(dev):
    w = Weight(dev, random_product(1, (40,), 256, "per_row").segments)
    x = sample((5, 256), "bfloat16", 1)
    with pytest.raises(pq.DTypeError, match=r"x: expected a pyopencl.array.Array, got ndarray"):
        w8a8.prepare(dev, x, w)
    with pytest.raises(pq.DTypeError, match=r"up: expected a pyopencl.array.Array, got ndarray"):
        w8a8.prepare(dev, put(dev, x), w, up=x)


# ---- partial sums of several work-groups ----


@pytest.mark.parametrize(("splits", "n"), [(1, 1000), (4, 1), (4, 256), (4, 1000)])
def test_launches_cover_the_columns_and_their_partial_sums_have_room(dev, splits, n, monkeypatch):
    tile_m, tile_n = 32, 64
    monkeypatch.setattr(w8a8, "PARTIAL_BYTES", 4 * splits * tile_m * 256)  # of 256 columns
    plan = Plan("mma", 1, 64, 64, tile_n, {"TILE_M": tile_m, "WARPS_K": 4 // splits})
    launches = list(w8a8.split_launches(dev, plan, {}, [], [], n))
    ends = [int(launch.arguments[-1]) for launch in launches]
    assert [int(launch.arguments[-2]) for launch in launches] == [0, *ends[:-1]]
    assert ends[-1] == n
    assert len(launches) == (1 if splits == 1 else -(-n // 256))
    assert all(end % 128 == 0 for end in ends[:-1])
    for begin, end, launch in zip([0, *ends], ends, launches, strict=False):
        tiles = -(-(end - begin) // tile_n)
        assert plan.global_size(launch.blocks) == tiles * splits * plan.wg
        partials, arrivals = launch.arguments[:2]
        if splits == 1:
            assert partials is arrivals is None
            continue
        assert partials.size >= 4 * tiles * splits * tile_n * tile_m
        counters = np.full(arrivals.size // 4, 1, np.uint32)
        cl.enqueue_copy(dev.queue, counters, arrivals)
        assert counters.size >= tiles
        assert not counters.any()


@layouts
def test_several_launches_give_the_bits_of_one(dev, layout, monkeypatch):
    if reason := cannot(next(v for v in GEMV if v.name == "mma"), dev.capabilities, Product(40, 700, 1152, layout)):
        pytest.skip(reason)
    w = Weight(dev, random_product(1, (384, 316), 1152, layout).segments)
    for rows in (40, 100):
        acts = w8a8.act_quant(dev, sample((rows, 1152), "bfloat16", rows), layout)
        whole = w8a8.gemv(dev, acts, w, force="mma").get()
        with monkeypatch.context() as changed:
            changed.setattr(w8a8, "PARTIAL_BYTES", 1 << 18)
            assert len(w8a8.gemv_launches(dev, acts, w, w8a8.output(dev, rows, w, "bfloat16", None), None, "mma")) > 1
            assert mismatch(w8a8.gemv(dev, acts, w, force="mma").get(), whole) is None


# ---- queues, events, threads ----


def late(dev, x):
    """An event that the caller sets, and what does so after x has changed, on another queue."""
    start = cl.UserEvent(dev.context)
    other = cl.CommandQueue(dev.context)

    def change(host):
        cl.enqueue_copy(other, x.base_data, host).wait()
        start.set_status(cl.command_execution_status.COMPLETE)

    return start, change


def test_wait_for(dev):
    """Nothing reads x before the event; a result that came earlier would be that of the old x."""
    w = Weight(dev, random_product(1, (128, 40), 256, "block_128").segments)
    old, new = (sample((5, 256), "bfloat16", seed) for seed in (1, 2))
    want = w8a8.proj(dev, new, w).get()
    assert mismatch(w8a8.proj(dev, old, w).get(), want) is not None
    prepared_x = put(dev, old)
    prepared = w8a8.prepare(dev, prepared_x, w)
    for x, run in (
        (put(dev, old), lambda x, e: w8a8.proj(dev, x, w, wait_for=e)),
        (put(dev, old), lambda x, e: w8a8.gemv(dev, w8a8.act_quant(dev, x, "block_128", wait_for=e), w)),
        (prepared_x, lambda x, e: prepared.enqueue(e) and prepared.out),
    ):
        start, change = late(dev, x)
        y = run(x, [start])
        dev.queue.flush()
        change(new)
        dev.queue.finish()
        assert mismatch(y.get(), want) is None


def test_results_carry_their_events(dev):
    w = Weight(dev, random_product(1, (40,), 256, "per_row").segments)
    scratch = Scratch.alloc(dev, 256)
    y = w8a8.proj(dev, sample((5, 256), "bfloat16", 1), w, scratch=scratch)
    assert y.events
    assert scratch.codes.events
    assert scratch.scales.events
    y.finish()
    assert y.shape == (5, 40)


@layouts
def test_an_out_of_order_queue(dev, gemv_variant, layout):
    """Launches of one call wait for each other, also where scratch is shared and there are more than 128 rows."""
    properties = cl.command_queue_properties.OUT_OF_ORDER_EXEC_MODE_ENABLE
    if not dev.queue.device.queue_properties & properties:
        pytest.skip(f"{dev.name} has no out-of-order queues")
    other = pq.Device(cl.CommandQueue(dev.context, properties=properties), dev.capabilities)
    w = Weight(other, random_product(1, (128, 40), 1152, layout).segments)
    scratch = Scratch.alloc(other, 1152)
    for rows in (200, 3):
        hosts = [sample((rows, 1152), "bfloat16", seed) for seed in range(4)]
        want = [w8a8.proj(dev, host, w, force=gemv_variant).get() for host in hosts]
        xs = [put(other, host) for host in hosts]
        results = [w8a8.proj(other, x, w, scratch=scratch, force=gemv_variant) for x in xs]
        for got, expected in zip(results, want, strict=True):
            assert mismatch(got.get(), expected) is None
        prepared = w8a8.prepare(other, xs[1], w, scratch=scratch, force=gemv_variant)
        prepared.enqueue([e for y in results for e in y.events]).wait()
        assert mismatch(prepared.out.get(), want[1]) is None


def test_threads_share_a_device(dev):
    w = Weight(dev, random_product(1, (128, 40), 256, "block_128").segments)
    xs = [sample((9, 256), "bfloat16", seed) for seed in range(4)]
    want = [w8a8.proj(dev, x, w).get() for x in xs]
    wrong = []

    def work(i):
        for _ in range(8):
            failure = mismatch(w8a8.proj(dev, xs[i], w).get(), want[i])
            if failure:
                wrong.append(failure)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# ---- weights, kernels ----


def test_what_a_weight_says_of_itself(dev):
    p = random_product(1, (128, 256, 7), 256, "block_128")
    w = Weight(dev, p.segments)
    assert (w.n, w.k, w.scale_layout, w.boundaries) == (391, 256, "block_128", (128, 384))
    assert repr(w) == "<pyclquant.w8a8.Weight [391, 256] block_128, 3 segments>"
    assert Weight(dev, p.segments[:2]).boundaries == (128, 384)
    one = w.segment(2)
    assert (one.n, one.k, one.scale_layout, one.boundaries) == (7, 256, "block_128", (7, 7))
    alone = Weight(dev, Segment(*p.segments[2]))
    assert (alone.n, alone.boundaries) == (one.n, one.boundaries)
    for i in (-1, 3):
        with pytest.raises(pq.ShapeError, match=f"segment: expected 0 to 2, got {i}"):
            w.segment(i)


def test_a_weight_reads_its_segments_where_they_are(dev):
    p = random_product(1, (16, 5), 128, "per_row")
    on_device = [(put(dev, codes), put(dev, scales)) for codes, scales in p.segments]
    w = Weight(dev, on_device)
    assert all(a is b for got, given_ in zip(w.segments, on_device, strict=True) for a, b in zip(got, given_, strict=True))


def test_kernels_that_are_there(dev):
    scratch = Scratch.alloc(dev, 256)
    kernels = w8a8.Kernels.load(dev)
    assert kernels.missing == {}
    for layout in LAYOUTS:
        assert kernels.resolved(layout)
        w = Weight(dev, random_product(1, (40,), 256, layout).segments)
        assert [rows for rows in (0, 1, 256, 257) if w8a8.decode_available(kernels, w, rows, scratch)] == [1, 256]
        assert not w8a8.decode_available(kernels, w, 1, Scratch(scratch.codes[:255], scratch.scales, None))
        assert not w8a8.decode_available(w8a8.Kernels.none(), w, 1, scratch)
    only = w8a8.Kernels.load(dev, "float32", ["per_row"])
    assert (only.resolved("per_row"), only.resolved("block_128")) == (True, False)
    assert only.missing == {"block_128": "not loaded"}
    assert w8a8.Kernels.none().missing == dict.fromkeys(LAYOUTS, "not loaded")


def test_kernels_that_are_not_there(dev):
    """The reason is that of the table, or of the build."""
    other = device_of(dev, gemv_mma=False, gemv_vector=False, gemv_row_bf16=False, gemv_row=False, gemv_base=False)
    kernels = w8a8.Kernels.load(other)
    for layout in LAYOUTS:
        assert not kernels.resolved(layout)
        assert "gemv_base: as the test says" in kernels.missing[layout]


def test_kernels_that_do_not_build(dev, monkeypatch):
    real = program.source
    monkeypatch.setattr(program, "source", lambda file: real(file) + ("#error broken" if file.startswith("gemv") else ""))
    kernels = w8a8.Kernels.load(device_of(dev))
    assert all("did not build" in kernels.missing[layout] for layout in LAYOUTS)


def test_kernels_refuse_what_does_not_exist(dev):
    with pytest.raises(pq.ShapeError, match="scale_layout: expected one of per_row, block_128, got 'per_tensor'"):
        w8a8.Kernels.load(dev, scale_layouts=["per_tensor"])
    with pytest.raises(pq.DTypeError, match="dtype: expected float32, bfloat16, float16, got int8"):
        w8a8.Kernels.load(dev, "int8")
    with pytest.raises(pq.ShapeError, match="expected K a positive multiple of 128, got K=100"):
        w8a8.Kernels.load(dev, k=100)
    with pytest.raises(pq.ShapeError, match="scale_layout"):
        w8a8.Kernels.none().resolved("per_tensor")


@pytest.mark.parametrize(("row", "column"), [(0, 0), (0, 383), (129, 130), (200, 5), (207, 383)])
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_weight_that_is_not_a_number_is_found(dev, act_variant, row, column, code, monkeypatch):
    """The first of two, in its segment; the last element of all is the second."""
    table = tuple(replace(v, unsuited=never) for v in w8a8.ACT if v.name == act_variant)
    monkeypatch.setattr(w8a8, "ACT", table)
    p = random_product(1, (208, 3), 384, "per_row")
    (codes, scales), second = p.segments
    bad = codes.copy()
    bad.view(np.uint8)[row, column] = code
    bad.view(np.uint8)[207, 383] = 0x7F
    where = re.escape(f"NaN at ({row}, {column})")
    with pytest.raises(pq.ShapeError, match=f"segment 0 codes: expected finite weights, got {where}"):
        Weight(device_of(dev), [(bad, scales), second])
    Weight(device_of(dev), [(codes, scales), second])


# ---- what is refused, before anything is enqueued ----


class Bench:
    """A projection that works, and memory that shows whether anything was written."""

    ROWS, N, K = 5, 40, 384

    def __init__(self, dev):
        self.dev = dev
        self.segments = random_product(1, (16, 24), self.K, "per_row").segments
        self.w = Weight(dev, self.segments)
        self.x = put(dev, np.ones((self.ROWS, self.K), bfloat16))
        self.context = cl.Context([dev.queue.device])  # with Intel's CPU runtime a queue does not keep it alive
        self.other = cl.CommandQueue(self.context)
        self.out, self.whole = inside(dev, np.full((self.ROWS, 2 * self.N), 0xA5, np.uint8).view(bfloat16), 8, 8)
        self.scratch = Scratch.alloc(dev, self.K)
        for a in (self.scratch.codes, self.scratch.scales):
            cl.enqueue_fill_buffer(dev.queue, a.base_data, np.uint8(0xA5), 0, a.nbytes)

    def intact(self):
        """Whether outputs and scratch keep their bytes."""
        arrays = (self.whole, self.scratch.codes, self.scratch.scales)
        return all((np.ascontiguousarray(a.get()).view(np.uint8) == 0xA5).all() for a in arrays)

    def columns(self, before, behind, shape=None, dtype=bfloat16):
        """A view with an offset and a pitch."""
        return inside(self.dev, np.ones(shape or (self.ROWS, self.K), dtype), before, behind)[0]

    def ones(self, *shape, dtype=bfloat16):
        return np.ones(shape, dtype)


@pytest.fixture
def bench(dev):
    return Bench(dev)


@pytest.fixture
def nothing_runs(dev, bench, monkeypatch):
    """Fails the test when a kernel is enqueued."""

    def launch(*args):
        pytest.fail("a kernel was enqueued")

    monkeypatch.setattr(dev.programs, "launch", launch)
    monkeypatch.setattr(dev.programs, "bind", launch)


X_REFUSED = [
    (lambda b: b.ones(0, b.K), pq.ShapeError, r"x: expected 1 to 256 rows, got shape \(0, 384\)"),
    (lambda b: b.ones(257, b.K), pq.ShapeError, r"x: expected 1 to 256 rows, got shape \(257, 384\)"),
    (lambda b: b.ones(5, 100), pq.ShapeError, r"x: expected K a positive multiple of 128, got shape \(5, 100\)"),
    (lambda b: b.ones(5, 0), pq.ShapeError, r"x: expected K a positive multiple of 128, got shape \(5, 0\)"),
    (lambda b: b.ones(b.K), pq.ShapeError, r"x: expected a matrix \[M, K\], got shape \(384,\)"),
    (lambda b: b.ones(1, 5, b.K), pq.ShapeError, r"x: expected a matrix \[M, K\], got shape \(1, 5, 384\)"),
    (lambda b: b.ones(5, b.K, dtype=np.float64), pq.DTypeError, "x: expected float32, bfloat16, float16, got float64"),
    (lambda b: b.ones(5, b.K, dtype=np.int8), pq.DTypeError, "x: expected float32, bfloat16, float16, got int8"),
    (lambda b: b.ones(5, b.K, dtype=">f4"), pq.DTypeError, "x: expected native byte order, got dtype >f4"),
    (lambda b: [[1.0] * b.K], pq.DTypeError, r"x: expected a numpy.ndarray or a pyopencl.array.Array, got list"),
    (lambda b: b.columns(0, 4), pq.ShapeError, "x: expected a row pitch that is a multiple of 8 elements, got 388"),
    (lambda b: b.columns(4, 4), pq.ShapeError, "x: expected an offset that is a multiple of 8 elements, got 4"),
    (lambda b: b.columns(0, 0, (b.ROWS, 2 * b.K))[:, ::2], pq.ShapeError, "x: expected contiguous rows, got shape"),
    (lambda b: b.x.T, pq.ShapeError, r"x: expected contiguous rows, got shape \(384, 5\) with strides \(2, 768\)"),
    (lambda b: cla.to_device(b.other, b.ones(5, b.K)), pq.ContextError, "x: expected an array of this device's context"),
]
"""Activations, the error and what it says."""


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(("make", "error", "match"), X_REFUSED, ids=[match[:60] for _, _, match in X_REFUSED])
def test_refused_activations(dev, bench, make, error, match):
    x = make(bench)
    gate = match.replace("x: ", "gate: ", 1)
    with pytest.raises(error, match=f"^{match}"):
        w8a8.act_quant(dev, x, "per_row", scratch=bench.scratch)
    with pytest.raises(error, match=f"^{match}"):
        w8a8.proj(dev, x, bench.w, out=bench.out, scratch=bench.scratch)
    with pytest.raises(error, match=f"^{gate}"):
        w8a8.act_quant_silu(dev, x, bench.x, "per_row", scratch=bench.scratch)
    with pytest.raises(error, match=f"^{gate}"):
        w8a8.silu_mul(dev, x, bench.x)
    if "rows, got" not in match:
        with pytest.raises(error, match=f"^{match.replace('x: ', 'w: ', 1)}"):
            w8a8.quantize_weight(dev, x, "per_row")
    assert bench.intact()


UP_REFUSED = [
    (lambda b: b.columns(0, 0, (b.ROWS, 256)), pq.ShapeError, r"up: expected shape \(5, 384\), got \(5, 256\)"),
    (lambda b: b.columns(0, 0, (4, b.K)), pq.ShapeError, r"up: expected shape \(5, 384\), got \(4, 384\)"),
    (lambda b: b.columns(0, 0, dtype=np.float32), pq.DTypeError, "up: expected bfloat16, got float32"),
    (lambda b: b.columns(0, 8), pq.ShapeError, "up: expected the row pitch of gate, 768 bytes, got 784"),
    (lambda b: b.columns(4, 4), pq.ShapeError, "up: expected an offset that is a multiple of 8 elements, got 4"),
    (lambda b: b.ones(5, b.K), pq.DTypeError, "up: expected a Array like gate, got ndarray"),
    (lambda b: 3, pq.DTypeError, "up: expected a numpy.ndarray or a pyopencl.array.Array, got int"),
    (lambda b: cla.to_device(b.other, b.ones(5, b.K)), pq.ContextError, "up: expected an array of this device's context"),
]


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(("make", "error", "match"), UP_REFUSED, ids=[match[:60] for _, _, match in UP_REFUSED])
def test_refused_up(dev, bench, make, error, match):
    up = make(bench)
    for call in (
        lambda: w8a8.act_quant_silu(dev, bench.x, up, "per_row", scratch=bench.scratch),
        lambda: w8a8.silu_mul(dev, bench.x, up),
    ):
        with pytest.raises(error, match=f"^{match}"):
            call()
    assert bench.intact()


PROJ_REFUSED = [
    (lambda b: {"x": b.ones(5, 256)}, pq.ShapeError, r"x: expected K=384 columns as of the weight, got shape \(5, 256\)"),
    (lambda b: {"up": b.columns(0, 8)}, pq.ShapeError, "up: expected the row pitch of gate"),
    (lambda b: {"w": b.segments}, pq.DTypeError, "w: expected a Weight, got list"),
    (
        lambda b: {"w": Weight(pq.Device(b.other, b.dev.capabilities), b.segments)},
        pq.ContextError,
        "w: expected a Weight of this device's context",
    ),
    (lambda b: {"dtype": "int8"}, pq.DTypeError, "dtype: expected float32, bfloat16, float16, got int8"),
    (lambda b: {"dtype": "float32"}, pq.DTypeError, "out: expected float32, got bfloat16"),
    (lambda b: {"out": b.whole}, pq.ShapeError, r"out: expected shape \(5, 40\), got \(5, 56\)"),
    (lambda b: {"out": b.out[:4]}, pq.ShapeError, r"out: expected shape \(5, 40\), got \(4, 40\)"),
    (lambda b: {"out": b.ones(5, 40)}, pq.DTypeError, r"out: expected a pyopencl.array.Array, got ndarray"),
    (lambda b: {"out": 1}, pq.DTypeError, r"out: expected a numpy.ndarray or a pyopencl.array.Array, got int"),
    (lambda b: {"out": b.columns(0, 0, (5, 80))[:, ::2]}, pq.ShapeError, "out: expected contiguous rows, got shape"),
    (lambda b: {"out": b.columns(0, 0, (40, 5)).T}, pq.ShapeError, "out: expected contiguous rows, got shape"),
    (
        lambda b: {"out": cla.Array(b.dev.queue, (5, 40), bfloat16, data=b.whole.base_data, strides=(78, 2))},
        pq.ShapeError,
        r"out: expected a row pitch of at least 40 elements, got strides \(78, 2\)",
    ),
    (
        lambda b: {"out": cla.zeros(b.other, (5, 40), bfloat16)},
        pq.ContextError,
        "out: expected an array of this device's context",
    ),
    (
        lambda b: {"scratch": Scratch(b.scratch.codes[:1000], b.scratch.scales, None)},
        pq.ShapeError,
        r"scratch: expected room for 5 rows of K=384 \(per_row\), got 1000 codes",
    ),
    (
        lambda b: {"scratch": Scratch.alloc(pq.Device(b.other, b.dev.capabilities), 384)},
        pq.ContextError,
        "scratch: expected one of this device's context",
    ),
    (lambda b: {"eps": 0.0}, pq.ShapeError, r"eps: expected 2\*\*-100 to 1e30"),
    (lambda b: {"eps": float("nan")}, pq.ShapeError, "eps"),
    (
        lambda b: {"force": "fast"},
        pq.UnsupportedDeviceError,
        "force: expected one of mma, vector, row_bf16, row, base, got 'fast'",
    ),
]
"""Arguments of `proj` instead of those that work, the error and what it says."""


@pytest.mark.parametrize(("make", "error", "match"), PROJ_REFUSED, ids=[match[:60] for _, _, match in PROJ_REFUSED])
def test_refused_by_proj_and_prepare(dev, bench, make, error, match, request):
    arguments = {"x": bench.x, "w": bench.w, "out": bench.out, "scratch": bench.scratch} | make(bench)
    request.getfixturevalue("nothing_runs")  # from here on: weights are checked by a kernel
    with pytest.raises(error, match=f"^{match}"):
        w8a8.proj(dev, **arguments)
    if isinstance(arguments["x"], cla.Array):
        with pytest.raises(error, match=f"^{match}"):
            w8a8.prepare(dev, **arguments)
    assert bench.intact()


QUANTIZERS_REFUSED = [
    ({"scale_layout": "per_tensor"}, pq.ShapeError, "scale_layout: expected one of per_row, block_128, got 'per_tensor'"),
    ({"eps": 0.0}, pq.ShapeError, r"eps: expected 2\*\*-100 to 1e30"),
    ({"eps": -1.0}, pq.ShapeError, "eps"),
    ({"eps": float("inf")}, pq.ShapeError, "eps"),
    ({"force": "fast"}, pq.UnsupportedDeviceError, "force: expected one of vector, row, base, got 'fast'"),
]


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(("how", "error", "match"), QUANTIZERS_REFUSED, ids=str)
def test_refused_by_quantizers(dev, bench, how, error, match):
    how = {"scale_layout": "per_row"} | how
    with pytest.raises(error, match=match):
        w8a8.act_quant(dev, bench.x, scratch=bench.scratch, **how)
    with pytest.raises(error, match=match):
        w8a8.act_quant_silu(dev, bench.x, bench.x, scratch=bench.scratch, **how)
    with pytest.raises(error, match=match):
        w8a8.quantize_weight(dev, bench.x, **how)
    assert bench.intact()


@pytest.mark.parametrize("scratch_of", ["act_quant", "act_quant_silu"])
def test_refused_scratch(dev, bench, scratch_of):
    inputs = (bench.x,) if scratch_of == "act_quant" else (bench.x, bench.x)
    small = Scratch(bench.scratch.codes, bench.scratch.scales[:14], None)
    with pytest.raises(pq.ShapeError, match=r"scratch: expected room for 5 rows of K=384 \(block_128\)"):
        getattr(w8a8, scratch_of)(dev, *inputs, "block_128", scratch=small)
    foreign = Scratch.alloc(pq.Device(bench.other, dev.capabilities), 384)
    with pytest.raises(pq.ContextError, match="scratch: expected one of this device's context"):
        getattr(w8a8, scratch_of)(dev, *inputs, "block_128", scratch=foreign)
    assert bench.intact()


ACTS_REFUSED = [
    (
        lambda b, a: a._replace(codes=cla.zeros(b.dev.queue, (5, 256), E4M3)),
        pq.ShapeError,
        r"acts.codes: expected shape \(5, 384\), got \(5, 256\)",
    ),
    (lambda b, a: a._replace(codes=a.codes[:, :256]), pq.ShapeError, r"acts.codes: expected a C-contiguous array"),
    (lambda b, a: a._replace(codes=a.codes.view(np.uint8)), pq.DTypeError, "acts.codes: expected float8_e4m3fn, got uint8"),
    (
        lambda b, a: a._replace(codes=cla.empty(b.dev.queue, (0, b.K), E4M3)),
        pq.ShapeError,
        r"acts.codes: expected 1 to 256 rows, got",
    ),
    (
        lambda b, a: a._replace(codes=cla.zeros(b.dev.queue, (257, b.K), E4M3)),
        pq.ShapeError,
        r"acts.codes: expected 1 to 256 rows",
    ),
    (
        lambda b, a: a._replace(codes=[1]),
        pq.DTypeError,
        "acts.codes: expected a numpy.ndarray or a pyopencl.array.Array, got list",
    ),
    (lambda b, a: a._replace(scales=a.scales[:4]), pq.ShapeError, r"acts.scales: expected shape \(5,\), got \(4,\)"),
    (
        lambda b, a: a._replace(scales=cla.zeros(b.dev.queue, (5, 3), np.float32)),
        pq.ShapeError,
        r"acts.scales: expected shape \(5,\), got \(5, 3\)",
    ),
    (lambda b, a: a._replace(scales=a.scales.view(np.int32)), pq.DTypeError, "acts.scales: expected float32, got int32"),
    (
        lambda b, a: Activations(*(cla.to_device(b.other, part.get()) for part in a)),
        pq.ContextError,
        "acts.codes: expected an array of this device's context",
    ),
]
"""From good activations to others, the error and what it says."""


@pytest.mark.parametrize(("make", "error", "match"), ACTS_REFUSED, ids=[match[:60] for _, _, match in ACTS_REFUSED])
def test_refused_by_gemv(dev, bench, make, error, match, request):
    acts = make(bench, w8a8.act_quant(dev, bench.x, "per_row"))
    request.getfixturevalue("nothing_runs")
    with pytest.raises(error, match=f"^{match}"):
        w8a8.gemv(dev, acts, bench.w, out=bench.out, scratch=bench.scratch)
    assert bench.intact()


def segment(n=16, k=256, layout="per_row"):
    """A weight of ones."""
    return np.ones((n, k), E4M3), np.ones(w8a8.scales_shape(n, k, layout), np.float32)


def with_scale(value, where, **shape):
    codes, scales = segment(**shape)
    scales[where] = value
    return codes, scales


BLOCKS = {"layout": "block_128"}
WEIGHTS_REFUSED = [
    ([], pq.ShapeError, "segments: expected 1 to 3, got 0"),
    ([segment()] * 4, pq.ShapeError, "segments: expected 1 to 3, got 4"),
    ([segment(k=100)], pq.ShapeError, "segment 0 codes: expected K a positive multiple of 128, got K=100"),
    ([segment(k=0)], pq.ShapeError, "segment 0 codes: expected K a positive multiple of 128, got K=0"),
    (
        [segment(), segment(k=384)],
        pq.ShapeError,
        "segment 1: expected K=256 and per_row scales as of segment 0, got K=384 and per_row",
    ),
    (
        [segment(128, **BLOCKS), segment(128)],
        pq.ShapeError,
        "segment 1: expected K=256 and block_128 scales as of segment 0, got K=256 and per_row",
    ),
    ([segment(), segment(0)], pq.ShapeError, r"segment 1 codes: expected at least one row, got shape \(0, 256\)"),
    ([segment(24), segment()], pq.ShapeError, "segment 0 codes: expected a multiple of 16 rows before another, got 24"),
    (
        [segment(128, **BLOCKS), segment(192, **BLOCKS), segment(1, **BLOCKS)],
        pq.ShapeError,
        "segment 1 codes: expected a multiple of 128 rows before another, got 192",
    ),
    ([(segment()[0], np.ones(15, np.float32))], pq.ShapeError, r"segment 0 scales: expected shape \(16,\), got \(15,\)"),
    (
        [(segment(130)[0], np.ones((1, 2), np.float32))],
        pq.ShapeError,
        r"segment 0 scales: expected shape \(2, 2\), got \(1, 2\)",
    ),
    (
        [(segment(130)[0], np.ones((2, 1), np.float32))],
        pq.ShapeError,
        r"segment 0 scales: expected shape \(2, 2\), got \(2, 1\)",
    ),
    (
        [(segment()[0], np.ones((1, 1, 1), np.float32))],
        pq.ShapeError,
        r"segment 0 scales: expected \[n\] or \[ceil\(n / 128\), K / 128\], got shape \(1, 1, 1\)",
    ),
    ([(np.ones(256, E4M3), segment()[1])], pq.ShapeError, r"segment 0 codes: expected \[n, K\], got shape \(256,\)"),
    ([(np.ones((16, 256), np.uint8), segment()[1])], pq.DTypeError, "segment 0 codes: expected float8_e4m3fn, got uint8"),
    (
        [(np.ones((16, 256), ml_dtypes.float8_e4m3fnuz), segment()[1])],
        pq.DTypeError,
        "segment 0 codes: expected float8_e4m3fn, got float8_e4m3fnuz",
    ),
    ([(segment()[0], np.ones(16))], pq.DTypeError, "segment 0 scales: expected float32, got float64"),
    ([segment(), (segment()[0], [1.0])], pq.DTypeError, r"segment 1 scales: expected a numpy.ndarray or .*, got list"),
    ([(segment(k=512)[0][:, ::2], segment()[1])], pq.ShapeError, "segment 0 codes: expected a C-contiguous array"),
    ([with_scale(np.inf, 3)], pq.ShapeError, r"segment 0 scales: expected finite and not negative, got inf at \(3,\)"),
    ([with_scale(np.nan, 15)], pq.ShapeError, r"segment 0 scales: expected finite and not negative, got nan at \(15,\)"),
    ([segment(), with_scale(-0.5, 0)], pq.ShapeError, r"segment 1 scales: expected finite and not negative, got -0.5 at \(0,\)"),
    (
        [with_scale(-np.inf, (1, 0), n=130, **BLOCKS)],
        pq.ShapeError,
        r"segment 0 scales: expected finite and not negative, got -inf at \(1, 0\)",
    ),
]


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(("segments", "error", "match"), WEIGHTS_REFUSED, ids=[match[:70] for _, _, match in WEIGHTS_REFUSED])
def test_refused_weights(dev, segments, error, match):
    with pytest.raises(error, match=f"^{match}"):
        Weight(dev, segments)


def test_refused_weights_of_another_context(dev, bench):
    codes, scales = segment()
    for s in ((cla.to_device(bench.other, codes), scales), (codes, cla.to_device(bench.other, scales))):
        with pytest.raises(pq.ContextError, match=r"segment 0 (codes|scales): expected an array of this device's context"):
            Weight(dev, [s])


def test_refused_weights_on_the_device_keep_their_bytes(dev):
    codes, scales = segment()
    codes[3, 5] = np.nan
    on_device = put(dev, codes), put(dev, scales)
    with pytest.raises(pq.ShapeError, match=r"got NaN at \(3, 5\)"):
        Weight(dev, [on_device])
    assert mismatch(on_device[0].get(), codes) is None
    assert mismatch(on_device[1].get(), scales) is None


# ---- these tests see a kernel that is wrong ----

TO_BFLOAT16 = r"(\1 * 65537.0f - (\1 * 65537.0f - \1))"
"""Of a float32 expression, whether scalar or vector: 8 bits of mantissa are left."""

SWAPPED = """#if SCALES == PER_ROW
#undef SCALES
#define SCALES BLOCK_128
#else
#undef SCALES
#define SCALES PER_ROW
#endif
#ifndef SCALES"""

LAST_CHUNK = {
    "gemv_w8a8.cl": (r"if \(column >= k\)", "if (column >= k - CHUNK)"),
    "gemv_w8a8_row.cl": (r"chunk < chunks;", "chunk + 1 < chunks;"),
    "gemv_w8a8_mma.cl": (r"chunks / PARTS;", "chunks / PARTS - (part + 1 == PARTS);"),
}
COARSE_SUM = {
    "gemv_w8a8.cl": (r"#define multiply_add\(a, b, c\) (.*)", "#define multiply_add(a, b, c) " + TO_BFLOAT16),
    "gemv_w8a8_row.cl": (r"= (add_products\(.*\));\n", "= " + TO_BFLOAT16 + ";\n"),
    "gemv_w8a8_mma.cl": (r"return (sum);\n", "return as_float4(as_uint4(sum) & 0xffff0000u);\n"),
}
SHIFTED_SCALE = (r"\* chunks \+ c\]", "* chunks + (c + 1) % chunks]")
PER_ROW, ONE_CHUNK = Projection(3, (160,), 384, "per_row", "float32"), Projection(3, (160,), 128, "per_row", "float32")
FEW, BLOCK_128 = Projection(3, (3,), 384, "block_128"), Projection(3, (128, 7), 384, "block_128")
"""Layouts are swapped where each finds as many scales as it reads: one chunk, or no more rows than chunks."""


def each(row):
    return dict.fromkeys(LAST_CHUNK, row)


MUTATIONS = {
    "block scales shifted by one": (BLOCK_128, each(SHIFTED_SCALE)),
    "per_row read as block_128": (ONE_CHUNK, each(("#ifndef SCALES", SWAPPED))),
    "block_128 read as per_row": (FEW, each(("#ifndef SCALES", SWAPPED))),
    "sums in bfloat16, per_row": (PER_ROW, COARSE_SUM),
    "sums in bfloat16, block_128": (BLOCK_128, COARSE_SUM),
    "one chunk dropped, per_row": (PER_ROW, LAST_CHUNK),
    "one chunk dropped, block_128": (BLOCK_128, LAST_CHUNK),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_wrong_kernel_is_seen(dev, gemv_variant, mutation, monkeypatch):
    """check_gemv, which the probe and the self-test rest on, reports a sum that is off, not bytes or columns."""
    p, changes = MUTATIONS[mutation]
    real, changed = program.source, []

    def source(file):
        text = real(file)
        if file in changes:
            text, count = re.subn(*changes[file], text)
            changed.append(count)
        return text

    assert check_gemv(device_of(dev), p, gemv_variant) is None
    monkeypatch.setattr(program, "source", source)
    wrong = check_gemv(device_of(dev), p, gemv_variant)
    assert changed
    assert all(changed)
    assert wrong is not None
    assert wrong.startswith("result: expected")


# ---- the sizes of a real model ----

SEED_SHAPES = [
    ((10240, 6144), 5120),
    ((5120,), 6144),
    ((12288, 1024, 1024), 5120),
    ((17408, 17408), 5120),
    ((5120,), 17408),
    ((8192, 4096), 2048),
    ((8192, 512, 512), 2048),
    ((2048,), 4096),
    ((512, 512), 2048),
]
"""Rows of each segment, and K."""


def sampled(rng, n):
    """Some rows of a weight: the first and the last ones, some at the edges of blocks, and others."""
    edges = [r + d for r in rng.integers(1, n // 128, 3) * 128 for d in (-1, 0)]
    return sorted({0, 1, n - 2, n - 1, *(int(r) for r in edges), *(int(r) for r in rng.integers(0, n, 10))})


@pytest.mark.seed_shapes
@pytest.mark.parametrize(("segments", "k"), SEED_SHAPES, ids=str)
@layouts
def test_seed_shapes(dev, segments, k, layout):
    """All numbers of rows; a sample of columns against the exact sums, all columns against those of 256 rows."""
    rng = np.random.default_rng(k)
    weights = []
    for n in segments:
        codes = rng.integers(0, 256, (n, k), np.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0x35
        weights.append((codes.view(E4M3), rng.uniform(0.5, 2, w8a8.scales_shape(n, k, layout)).astype(np.float32) / 448))
    w = Weight(dev, weights)
    host = reference.act_quant(matrix(256, k, "bfloat16", 5), layout)
    acts = Activations(*(put(dev, a) for a in host))
    whole = w8a8.gemv(dev, acts, w).get()

    columns, ones = [], []
    for start, (codes, scales) in zip((0, *w.boundaries), weights, strict=False):
        for r in sampled(rng, len(codes)):
            columns.append(start + r)
            of = slice(r, r + 1) if layout == "per_row" else slice(r // 128, r // 128 + 1)
            ones.append((codes[r : r + 1], scales[of]))
    exactly(*host, ones, layout).accepts(np.ascontiguousarray(whole[:, columns]))

    for rows in ROWS:
        part = slice(0, rows) if rows % 2 else slice(256 - rows, 256)
        got = w8a8.gemv(dev, Activations(acts.codes[part], acts.scales[part]), w).get()
        assert mismatch(got, whole[part], f"{rows} rows from {part.start}") is None
