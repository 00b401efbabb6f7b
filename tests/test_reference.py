"""The specification against its own tables, ml_dtypes and worked examples."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from pyclquant import DTypeError, ShapeError
from pyclquant import reference as ref
from pyclquant.formats import FORMATS, GRANULARITIES, Layout

E4M3, E5M2, INT8, INT4 = (FORMATS[n] for n in ("fp8_e4m3fn", "fp8_e5m2", "int8", "int4"))
FP8 = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
F32 = np.float32


@FP8
def test_decode_is_the_definition(fmt):
    np.testing.assert_array_equal(ref.decode(np.arange(256, dtype=np.uint8), fmt), ref.float8_values(fmt))


@FP8
def test_encode_inverts_decode(fmt):
    codes = np.arange(256, dtype=np.uint8)
    values = ref.float8_values(fmt)
    back = ref.encode(values, fmt).view(np.uint8)
    finite = np.isfinite(values)
    np.testing.assert_array_equal(back[finite], codes[finite])
    assert set(back[np.isnan(values)]) == {0x7F}


@FP8
def test_encode_takes_the_nearest_and_ties_go_to_even(fmt):
    values = ref.float8_values(fmt)[: 0x7F if fmt is E4M3 else 0x7C].astype(np.float64)
    middle = ((values[:-1] + values[1:]) / 2).astype(F32)
    lower = np.arange(len(middle))
    np.testing.assert_array_equal(ref.encode(middle, fmt).view(np.uint8), lower + lower % 2)
    np.testing.assert_array_equal(ref.encode(np.nextafter(middle, F32(0)), fmt).view(np.uint8), lower)
    np.testing.assert_array_equal(ref.encode(np.nextafter(middle, F32(np.inf)), fmt).view(np.uint8), lower + 1)


@pytest.mark.parametrize(
    ("fmt", "value", "code"),
    [
        (E4M3, 464, 0x7E),
        (E4M3, 465, 0x7E),
        (E4M3, np.inf, 0x7E),
        (E4M3, -np.inf, 0xFE),
        (E4M3, np.nan, 0x7F),
        (E4M3, -0.0, 0x80),
        (E4M3, 2.0**-10, 0x00),
        (E4M3, 2.0**-9, 0x01),
        (E5M2, 61440, 0x7B),
        (E5M2, 1e9, 0x7B),
        (E5M2, np.nan, 0x7F),
        (INT8, 0.5, 0),
        (INT8, 1.5, 2),
        (INT8, -127.6, -127),
        (INT8, np.inf, 127),
        (INT8, np.nan, 0),
        (INT4, 15.7, 15),
        (INT4, -0.6, 0),
        (INT4, np.inf, 15),
        (INT4, -np.inf, 0),
        (INT4, np.nan, 0),
    ],
)
def test_boundaries(fmt, value, code):
    got = ref.encode(np.array([value], F32), fmt)
    assert int(got.view(np.uint8 if fmt is not INT8 else np.int8)[0]) == code


def test_int4_nibble_order():
    packed = ref.pack(np.array([1, 2, 3], np.uint8), INT4)
    np.testing.assert_array_equal(packed, [0x21, 0x03])
    np.testing.assert_array_equal(ref.unpack(packed, 3, INT4), [1, 2, 3])


def test_subnormal_inputs_are_zeros_of_their_sign():
    x = np.array([1e-40, -1e-40, 2.0**-126], F32)
    np.testing.assert_array_equal(ref.widen(x), np.array([0.0, -0.0, 2.0**-126], F32))
    assert np.signbit(ref.widen(x))[1]
    np.testing.assert_array_equal(ref.widen(np.array([6e-8], np.float16)), np.array([6e-8], np.float16).astype(F32))


def test_worked_example_of_a_symmetric_block():
    codes, scales, mins = ref.quantize(np.array([[448.0, -1.0, 0.4375, np.nan, np.inf]], F32), E4M3)
    np.testing.assert_array_equal(scales, [1.0])
    np.testing.assert_array_equal(codes.view(np.uint8), [[0x7E, 0xB8, 0x2E, 0x7F, 0x7E]])
    assert mins is None


def test_worked_example_of_an_asymmetric_block():
    codes, scales, mins = ref.quantize(np.array([[2.0, 17.0, 9.4, 2.0]], F32), INT4, group_size=4)
    np.testing.assert_array_equal(scales, [[1.0]])
    np.testing.assert_array_equal(mins, [[2.0]])
    np.testing.assert_array_equal(codes, [[0xF0, 0x07]])


def test_zero_and_constant_blocks():
    x = np.zeros((2, 8), F32)
    x[1] = 3.3
    for fmt in FORMATS.values():
        codes, scales, mins = ref.quantize(x, fmt)
        back = ref.dequantize(codes, scales, mins, fmt, x.shape)
        np.testing.assert_array_equal(back[0], x[0])
        np.testing.assert_allclose(back[1], x[1], rtol=1e-6)
    assert ref.quantize(x, E4M3)[1][0] == F32(1e-12)
    codes, scales, mins = ref.quantize(x, INT4)
    assert scales.tolist() == [[0.0], [0.0]]
    np.testing.assert_array_equal(ref.dequantize(codes, scales, mins, INT4, x.shape), x)


def test_finite_int4_never_becomes_special():
    x = np.array([[3.4e38, -3.4e38, 0.0, 1.0]], F32)
    codes, scales, mins = ref.quantize(x, INT4, group_size=4)
    assert np.isfinite(ref.dequantize(codes, scales, mins, INT4, x.shape)).all()


def test_one_special_value_spoils_only_its_own_code():
    x = np.random.default_rng(0).normal(0, 1, (1, 64)).astype(F32)
    for fmt in FORMATS.values():
        clean = ref.quantize(x, fmt)
        for special in (np.nan, np.inf, -np.inf):
            dirty = x.copy()
            dirty[0, 5] = special
            dirty[0, np.argmin(np.abs(x))] = x[0, 5]  # the extremes stay
            got = ref.quantize(dirty, fmt)
            np.testing.assert_array_equal(got[1], clean[1])


def test_float16_scales_are_what_the_codes_were_made_with():
    x = np.random.default_rng(1).normal(0, 1e-6, (4, 32)).astype(F32)
    _, scales, _ = ref.quantize(x, INT8, scale_dtype="float16")
    assert scales.dtype == np.float16
    assert (scales >= 2.0**-14).all()
    codes, scales, _mins = ref.quantize(x + 1, INT8, scale_dtype="float16")
    want = ref.encode((x + 1) / scales.astype(F32)[:, None], INT8)
    np.testing.assert_array_equal(codes, want)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_scale_for_each_block(granularity):
    x = np.random.default_rng(2).normal(0, 1, (5, 3, 64)).astype(ml_dtypes.bfloat16)
    shapes = {"per_tensor": (1,), "per_token": (5,), "per_head": (5, 3), "per_group": (5, 3, 3)}
    codes, scales, _ = ref.quantize(x, INT8, granularity=granularity, group_size=24 if granularity == "per_group" else None)
    assert codes.shape == x.shape
    assert scales.shape == shapes[granularity]
    amax = {
        "per_tensor": np.abs(x).max(keepdims=True).reshape(1),
        "per_token": np.abs(x).max((1, 2)),
        "per_head": np.abs(x).max(2),
        "per_group": np.stack([np.abs(x[..., k : k + 24]).max(2) for k in (0, 24, 48)], -1),
    }[granularity]
    np.testing.assert_array_equal(scales, amax.astype(F32) / F32(127))


def test_layout_refuses_what_does_not_exist():
    with pytest.raises(ShapeError, match=r"granularity: expected per_group .*got per_head"):
        Layout.of((4, 8), INT4, "per_head", None)
    with pytest.raises(ShapeError, match=r"group_size: expected an even number .*got 3"):
        Layout.of((4, 8), INT4, "per_group", 3)
    with pytest.raises(ShapeError, match="group_size: expected a positive integer, got 0"):
        Layout.of((4, 8), INT8, "per_group", 0)
    with pytest.raises(ShapeError, match="group_size: expected None with per_head, got 4"):
        Layout.of((4, 8), INT8, "per_head", 4)
    with pytest.raises(ShapeError, match="expected one of per_tensor"):
        Layout.of((4, 8), INT8, "per_row", None)
    with pytest.raises(ShapeError, match="at least one axis"):
        Layout.of((), INT8, "per_head", None)


def test_names_of_formats():
    with pytest.raises(DTypeError, match=r"expected one of fp8_e4m3fn.*got 'float8_e4m3fnuz'; the fnuz formats"):
        ref.quantize(np.zeros((1, 1), F32), "float8_e4m3fnuz")
    with pytest.raises(DTypeError, match="say which FP8"):
        ref.quantize(np.zeros((1, 1), F32), "fp8")
    with pytest.raises(DTypeError, match="x: expected float32, bfloat16, float16, got float64"):
        ref.quantize(np.zeros((1, 1)), "int8")


# ---- W8A8 ----


def ulps(got, exact):
    """Distance of float32 from float64, in units of the last place of exact."""
    exponent = np.maximum(np.frexp(exact)[1], -125)
    return np.abs(got.astype(np.float64) - exact) / np.exp2(exponent - 24.0)


def test_exponential_is_about_within_an_ulp():
    x = np.concatenate([np.linspace(-30, 88, 2_000_001), np.geomspace(1e-30, 1, 2000), -np.geomspace(1e-30, 1, 2000)]).astype(F32)
    x = np.concatenate([x, np.array([0.0, -0.0, -30, 88, -29.1, 1, -1, 2.0**-149, np.log(2) / 2], F32)])
    got = ref.exponential(x)
    assert got.dtype == F32
    assert ulps(got, np.exp(x.astype(np.float64))).max() <= 1.05


def test_sigmoid_is_within_two_and_a_half_ulps():
    g = np.concatenate([np.linspace(-87, 100, 2_000_001), np.geomspace(1e-30, 1, 2000), -np.geomspace(1e-30, 1, 2000)]).astype(
        F32
    )
    assert ulps(ref.sigmoid(g), 1 / (1 + np.exp(-g.astype(np.float64)))).max() <= 2.5


def test_sigmoid_at_its_edges():
    """0 where the true value is subnormal, 1 where it rounds to that; NaN gives 1."""
    g = np.array([-np.inf, -3e38, -88, -87.4, -87.3, 17.4, 88, 3e38, np.inf, np.nan, 0.0, -0.0, 1e-40], F32)
    got = ref.sigmoid(g)
    np.testing.assert_array_equal(got[[0, 1, 2, 3]], 0)
    assert 0 < got[4] < 1.3e-38
    assert got[4] >= ref.SMALLEST_NORMAL
    np.testing.assert_array_equal(got[[5, 6, 7, 8, 9]], 1)
    np.testing.assert_array_equal(got[[10, 11, 12]], 0.5)


def test_worked_examples_of_silu():
    gate = np.array([[0.0, -0.0, 1.0, 100.0, -100.0, np.inf, np.nan, 1.0, 3.0, -80.0]], F32)
    up = np.array([[5.0, 5.0, 2.0, 3.0, 7.0, -1.0, 1.0, np.nan, 0.0, 1e-6]], F32)
    h = ref.silu_mul(gate, up)
    assert h.dtype == ml_dtypes.bfloat16
    want = [
        0.0,
        -0.0,
        1.4609375,
        300.0,
        -0.0,
        -np.inf,
        np.nan,
        np.nan,
        0.0,
        -0.0,
    ]  # 2 / (1 + 1 / e) = 1.46212; -1.4e-33 * 1e-6 is subnormal
    np.testing.assert_array_equal(h[0].astype(F32), np.array(want, F32))
    np.testing.assert_array_equal(np.signbit(h[0])[[0, 1, 4, 9]], [False, True, True, True])


def rounds_up_to_the_smallest_normal(factors, dtype):
    """Of products of float32 factors with normal numbers of a 16-bit type: how many are below 2^-126 and round to it."""
    info = ml_dtypes.finfo(dtype)
    a = np.abs(factors[factors != 0]).astype(np.float64)
    count = 0
    for significand in np.arange(1, 2, float(info.eps)):
        fraction, exponent = np.frexp(a * significand)  # exact: at most 35 bits
        other = significand * np.exp2(-126.0 - exponent)  # times a: fraction * 2^-126
        there = (other >= float(info.smallest_normal)) & (other <= float(info.max))
        count += np.count_nonzero(there & (fraction < 1) & (np.ldexp(fraction, -126).astype(F32) == ref.SMALLEST_NORMAL))
    return count


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_nothing_rounds_up_to_the_smallest_normal(dtype):
    """In SiLU of 16-bit types: so it does not matter whether a device flushes a product before or after rounding it."""
    g = np.arange(65536, dtype=np.uint16).view(dtype).astype(F32)
    g = g[np.isfinite(g)]
    sigmoid = ref.sigmoid(g)
    exact = np.abs(g.astype(np.float64) * sigmoid)
    assert not ((exact < ref.SMALLEST_NORMAL) & (exact.astype(F32) >= ref.SMALLEST_NORMAL)).any()
    assert rounds_up_to_the_smallest_normal(g * sigmoid, dtype) == 0
    assert rounds_up_to_the_smallest_normal(np.array([1 - 2.0**-24], F32), dtype) == (dtype is ml_dtypes.bfloat16)


def test_silu_is_that_of_float64():
    rng = np.random.default_rng(4)
    gate, up = (rng.normal(0, 4, (64, 64)).astype(ml_dtypes.bfloat16) for _ in range(2))
    g, u = gate.astype(np.float64), up.astype(np.float64)
    np.testing.assert_allclose(ref.silu_mul(gate, up).astype(np.float64), g / (1 + np.exp(-g)) * u, rtol=2.0**-8)


def test_worked_example_of_activations_and_weights():
    """A scale for each row or 128 columns of activations, for each row or 128 x 128 weights counted from the first row."""
    x = np.zeros((130, 256), F32)
    x[0, 3], x[0, 130], x[129, 255] = 448, -4480, 44.8
    codes, scales = ref.act_quant(x, "per_row")
    np.testing.assert_array_equal(scales, [F32(10)] + [F32(1e-12)] * 128 + [F32(44.8) / F32(448)])
    assert codes.astype(F32)[[0, 0, 129], [3, 130, 255]].tolist() == [44.0, -448.0, 448.0]  # 44.8 lies between 44 and 48
    _, scales = ref.act_quant(x, "block_128")
    np.testing.assert_array_equal(scales[[0, 129]], [[1, 10], [F32(1e-12), F32(44.8) / F32(448)]])
    codes, scales = ref.quantize_weight(x, "block_128")
    np.testing.assert_array_equal(scales, [[1, 10], [F32(1e-12), F32(44.8) / F32(448)]])
    assert codes.astype(F32)[[0, 0, 129], [3, 130, 255]].tolist() == [448.0, -448.0, 448.0]
    np.testing.assert_array_equal(ref.quantize_weight(x, "per_row")[1], ref.act_quant(x, "per_row")[1])


@pytest.mark.parametrize("layout", ["per_row", "block_128"])
def test_products_are_those_of_integers(layout):
    """A code is a multiple of 2^-9: sums in int64, then Python's own fractions for the scales."""
    rng = np.random.default_rng(5)
    m, k = 3, 384
    values = ref.float8_values(E4M3).astype(np.float64) * 512
    integers = np.where(np.isnan(values), 0, values).astype(np.int64)
    draw = [c for c in range(256) if c & 0x7F != 0x7F]
    codes = rng.choice(draw, (m, k)).astype(np.uint8)
    scales = rng.uniform(0.1, 2, (m,) if layout == "per_row" else (m, 3)).astype(F32)
    segments, exact, magnitude = [], [], []
    for n in (128, 5):
        w = rng.choice(draw, (n, k)).astype(np.uint8)
        w_scales = rng.uniform(0.1, 2, (n,) if layout == "per_row" else (-(-n // 128), 3)).astype(F32)
        segments.append((w.view(E4M3.codes_dtype), w_scales))
        for r in range(n):
            terms = integers[w[r]] * integers[codes]  # [m, k]
            row = []
            for i in range(m):
                chunks = [(0, k)] if layout == "per_row" else [(c * 128, c * 128 + 128) for c in range(3)]
                sums = [(Fraction(0), Fraction(0))]
                for c, (a, b) in enumerate(chunks):
                    pair = (w_scales[r], scales[i]) if layout == "per_row" else (w_scales[r // 128, c], scales[i, c])
                    factor = Fraction(float(pair[0] * pair[1])) / 2**18
                    part = terms[i, a:b]
                    sums.append((int(part.sum()) * factor, int(np.abs(part).sum()) * factor))
                row.append([float(sum(column)) for column in zip(*sums, strict=True)])
            exact.append([e for e, _ in row])
            magnitude.append([g for _, g in row])
    got = ref.gemv(codes.view(E4M3.codes_dtype), scales, segments, layout)
    np.testing.assert_allclose(got[0], np.transpose(exact), rtol=1e-14, atol=1e-9)
    np.testing.assert_allclose(got[1], np.transpose(magnitude), rtol=1e-14)
