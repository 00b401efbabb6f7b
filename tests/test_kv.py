"""The K/V kernels against the reference, byte for byte, and what they refuse."""

import threading

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pyopencl as cl
import pyopencl.array as cla
import pytest
from hypothesis import given, settings

import pyclquant as pq
from pyclquant import Device, kv, reference, selftest
from pyclquant import variants as variants_module
from pyclquant.formats import FLOAT_DTYPES, FORMATS, GRANULARITIES
from pyclquant.selftest import Case, check_case, guard_intact, guarded, sample
from pyclquant.testing import mismatch
from pyclquant.variants import KV

bfloat16 = ml_dtypes.bfloat16
FP8 = ("fp8_e4m3fn", "fp8_e5m2")
DIMS = (1, 2, 7, 40, 48, 64, 80, 96, 112, 128, 192, 256, 576)


def check(dev, case, variant):
    try:
        wrong = check_case(dev, case, variant)
    except pq.UnsupportedDeviceError as error:
        pytest.skip(str(error))
    assert wrong is None, wrong


@pytest.mark.oclgrind
@pytest.mark.parametrize("case", list(selftest.quick_cases()), ids=selftest.describe)
def test_quick_cases(dev, variant, case):
    check(dev, case, variant)


@pytest.mark.parametrize("format", FORMATS)
def test_every_granularity_and_input_type(dev, variant, format):
    result = selftest.run_one(dev, "kv", format, variant)
    assert result.ok, result.detail
    assert result.cases > 0


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("format", ["fp8_e4m3fn", "int4"])
def test_head_dims(dev, format, dim):
    """The variant that the device takes by itself, whatever the dim."""
    granularity = "per_group" if format == "int4" else "per_head"
    for rows in (1, 3):
        check(dev, Case(sample((rows, dim), "bfloat16", dim), format, granularity, 32 if format == "int4" else None), None)


@pytest.mark.parametrize("group_size", [16, 32, 64, 128, 1000])
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_group_sizes(dev, format, group_size):
    check(dev, Case(sample((5, 2, 96), "bfloat16", 7), format, "per_group", group_size), None)


@pytest.mark.oclgrind
@pytest.mark.parametrize("format", FP8)
def test_all_bfloat16_and_float16_values(dev, variant, format):
    """Each value alone in its row and scale 1: exactly the format's rounding. Then beside 1.0, so that scales vary."""
    fmt = FORMATS[format]
    for dtype in (bfloat16, np.float16):
        values = np.arange(65536, dtype=np.uint16).view(dtype)
        x = np.zeros((4096, 2 * 16), dtype)
        x[:, :16] = values.reshape(4096, 16)
        x[:, 16] = fmt.largest
        check(dev, Case(x, format, "per_head"), variant)


@pytest.mark.parametrize("format", FP8)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_all_codes_decode(dev, variant, format, dtype):
    fmt = FORMATS[format]
    codes = np.arange(256, dtype=np.uint8).view(fmt.codes_dtype).reshape(4, 64)
    scales = np.array([1, 3.7, 1e-4, 2.0**10], np.float32)
    q = pq.Quantized(format, "per_head", None, codes.shape, codes, scales)
    got = kv.dequantize(dev, q, dtype, force=variant).get()
    assert mismatch(got, reference.dequantize(codes, scales, None, fmt, codes.shape, dtype=dtype)) is None


@pytest.mark.parametrize("mode", ["DIVIDE_NATIVE", "DIVIDE_FMA", "DIVIDE_INT"])
def test_every_way_of_dividing(dev, variant, mode, monkeypatch):
    """Devices differ in which they take; each must give the same bytes where the probe says that it works."""
    feature = {"DIVIDE_NATIVE": "divide", "DIVIDE_FMA": "divide_fma", "DIVIDE_INT": "base"}[mode]
    if not dev.capabilities.ok(feature):
        pytest.skip(dev.capabilities.missing(feature))
    monkeypatch.setattr(variants_module, "division", lambda caps: ({"DIVIDE": mode}, ()))
    fresh = Device(dev.queue, dev.capabilities)  # which remembers no plan
    for case in selftest.quick_cases():
        check(fresh, case, variant)


def test_reciprocals_of_all_mantissas(dev):
    """DIVIDE_FMA rests on a correctly rounded 1 / b for every b in [1, 2): all 2^23 of them."""
    if not dev.capabilities.ok("divide_fma"):
        pytest.skip(dev.capabilities.missing("divide_fma"))
    source = """
    __kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
    void probe_reciprocal(__global const uint *x, __global float *y)
    {
        y[get_global_id(0)] = divisor(as_float(x[get_global_id(0)])).reciprocal;
    }
    """
    from pyclquant.program import source as text

    program = cl.Program(dev.context, text("common.h") + source).build(["-DWG=64", "-DX_TYPE=F32", "-DDIVIDE=DIVIDE_FMA"])
    bits = np.arange(1 << 23, dtype=np.uint32) | np.uint32(0x3F800000)
    x, y = cla.to_device(dev.queue, bits), cla.empty(dev.queue, bits.size, np.float32)
    program.probe_reciprocal(dev.queue, (bits.size,), (64,), x.data, y.data)
    assert mismatch(y.get(), np.float32(1) / bits.view(np.float32)) is None


@pytest.fixture(params=[False, True], ids=["in_the_caches", "past_the_caches"])
def sized(dev, request, monkeypatch):
    """The device, which takes tensors for what they are or for larger ones than its caches."""
    if request.param:
        monkeypatch.setattr(variants_module, "CACHED_BYTES", 0)
    return Device(dev.queue, dev.capabilities)  # which remembers no plan


@pytest.mark.parametrize("format", ["fp8_e4m3fn", "fp8_e5m2", "int8"])
def test_every_quotient_of_two_bfloat16_significands(sized, format):
    """The division of rows of pairs rests on these, and so do codes that are looked up: the largest element of each block has
    each of the 128 significands, and the others have all of them, at every exponent down to codes of 0."""
    significands = (np.arange(128, dtype=np.uint16) | np.uint16(0x3F80)).view(bfloat16).astype(np.float32)
    smaller = np.ldexp(significands[None, :], -np.arange(34 if format == "fp8_e5m2" else 21)[:, None]).ravel()
    rows = np.resize(smaller, (-(-smaller.size // 127), 127))
    x = np.stack([np.column_stack([np.full(len(rows), top, np.float32), np.minimum(rows, top)]) for top in significands])
    x[:, 1::2, 1:] *= -1
    check(sized, Case(x.astype(bfloat16), format, "per_head"), None)
    x *= np.ldexp(1.0, np.arange(len(rows)) % 7 - 3)[:, None]  # rows of one significand, and of several exponents
    check(sized, Case(x.astype(bfloat16), format, "per_head"), None)


def rows_of_pairs():
    """Enough rows for several vectors of scales and a rest; among plain ones some that are not."""
    x = sample((53, 128), "bfloat16", 11).astype(np.float32)
    x[3] = 0
    x[7, 5], x[8, 127], x[9, 0] = np.nan, np.inf, -np.inf
    x[11] *= 1e-30
    x[12] *= 1e30
    x[13] *= 1e-13  # of which eps is the scale
    x[16, ::2] = 0.0
    x[16, 1::4] = -0.0
    x[17, 4:20] = 2.0**-130
    x[31] = 1.0
    x[52, 100] = np.nan
    return x.astype(bfloat16)


@pytest.mark.oclgrind
@pytest.mark.parametrize("format", FORMATS)
def test_rows_that_are_not_plain_among_others(dev, format):
    granularity, sizes = ("per_group", (128, 64, 32)) if format == "int4" else ("per_head", (None,))
    for size in sizes:
        for scale_dtype in ("float32", "float16"):
            case = Case(rows_of_pairs(), format, granularity, size, scale_dtype=scale_dtype, out_dtype="bfloat16")
            check(dev, case, "row")
    check(dev, Case(rows_of_pairs(), format, "per_group", 64, out_dtype="bfloat16"), "row")


def test_every_quotient_of_int4_near_the_middle_between_two_codes(dev):
    """Where encode_differences() might take another code: quotients that are n + 0.5, rounded, or just are not."""
    missing = dev.capabilities.missing("fma", "denormals", "vector8")
    if missing:
        pytest.skip(missing)
    source = """
    __kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
    void probe_codes(__global const float *x, __global const float *scale, __global uint *codes)
    {
        const size_t i = get_global_id(0);
        codes[i] = encode_differences((vfloat)(x[i]), 0.0f, scale[i], 1.0f / scale[i]).s0 & 15u;
    }
    """
    from pyclquant.program import build_options
    from pyclquant.program import source as text

    x, scale = [], []
    for n in range(15):
        exponent = max(int(np.log2(n + 0.5)), 0)  # of the quotient
        near = np.arange(1 << exponent, (2 << exponent) + 1) << (23 - exponent)  # significands of the scale with such quotients
        for significand in (near[:, None] + np.arange(-64, 65)).ravel().clip(1 << 23, (1 << 24) - 1):
            middle = (n + 0.5 + np.array([-1, 1]) * 2.0 ** (exponent - 24)) * significand
            near_it = middle.astype(np.float32).view(np.int32)[:, None] + np.arange(-2, 3, dtype=np.int32)
            x.append(near_it.ravel().view(np.float32))
            scale.append(np.full(near_it.size, significand, np.float32))
    x, scale = np.concatenate(x), np.concatenate(scale)
    inputs = [cla.to_device(dev.queue, v).data for v in (x, scale)]
    macros = {"FORMAT": "INT4", "X_TYPE": "BF16", "SCALE_TYPE": "F32", "PAIRS": 4, "VEC": 8, "WG": 1, "LANES": 1}
    divides = "DIVIDE_NATIVE" if dev.capabilities.ok("divide") else "DIVIDE_FMA"
    program = cl.Program(dev.context, text("kv_quantize.cl") + source).build(build_options({**macros, "DIVIDE": divides}))
    codes = cla.empty(dev.queue, x.size, np.uint32)
    program.probe_codes(dev.queue, (x.size,), (1,), *inputs, codes.data)
    assert mismatch(codes.get(), np.rint(x / scale).astype(np.uint32)) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("format", FORMATS)
def test_many_rows_of_all_magnitudes(dev, variant, format, dtype):
    """More rows than a work-item takes at once, each of another magnitude, the last ones too."""
    x = sample((2011, 128), "bfloat16", 12).astype(np.float64)
    x *= np.ldexp(1.0, np.random.default_rng(12).permutation(2011) % 241 - 120)[:, None]
    with np.errstate(over="ignore"):
        x = x.astype(dtype)
    asymmetric = FORMATS[format].asymmetric
    granularity, size = ("per_group", 128) if asymmetric else ("per_head", None)
    check(dev, Case(x, format, granularity, size, out_dtype=dtype), variant)
    codes = reference.quantize(sample(x.shape, "float32", 13), format, group_size=size)[0]
    scales = np.ldexp(1.3, np.arange(2011) % 241 - 120).astype(np.float32)
    mins = np.ldexp(-1.7, np.arange(2011) * 7 % 241 - 120).astype(np.float32) if asymmetric else None
    if asymmetric:
        scales[100:400:60] = mins[120:420:60] = (np.inf, np.nan, 0.0, -1.0, 2.0**-126)
        scales, mins = scales[:, None], mins[:, None]
    q = pq.Quantized(format, granularity, size, x.shape, codes, scales, mins)
    got = kv.dequantize(dev, q, dtype, force=variant).get()
    want = reference.dequantize(codes, scales, mins, FORMATS[format], x.shape, group_size=size, dtype=dtype)
    assert mismatch(got, want) is None


@pytest.mark.parametrize("format", ["fp8_e4m3fn", "fp8_e5m2", "int8"])
def test_outputs_of_all_sizes(sized, format):
    """Large outputs are stored in another way, unless a slice begins in the middle of a cache line."""
    dev, x = sized, rows_of_pairs()
    check(dev, Case(x, format, "per_head", out_dtype="bfloat16"), "row")
    repeated = np.tile(x, (64, 1))  # each row is met again by its work-item
    check(dev, Case(repeated, format, "per_head", out_dtype="bfloat16"), "row")
    codes, scales, _ = reference.quantize(x, format)
    store = cla.zeros(dev.queue, 32 + x.size, np.uint8).view(codes.dtype)
    out = pq.Quantized(format, "per_head", None, x.shape, store[32:].reshape(x.shape), cla.empty(dev.queue, len(x), np.float32))
    kv.quantize(dev, x, format, out=out, force="row")
    assert mismatch(out.codes.get(), codes) is None
    assert mismatch(out.scales.get(), scales) is None


@pytest.mark.parametrize("format", ["fp8_e4m3fn", "fp8_e5m2", "int8"])
def test_products_of_all_codes_and_scales_of_few_bits(dev, format):
    """Products in the middle between two values of bfloat16 are common among these; NaN and Inf stay in rows of their own."""
    fmt = FORMATS[format]
    codes = np.arange(256, dtype=np.uint8)
    special = ~np.isfinite(codes.view(fmt.codes_dtype).astype(np.float32))
    codes = np.where(special, np.uint8(0x33), codes)
    bits = np.arange(1 << 12) / 2.0**12 + 1
    scales = np.concatenate([bits, bits * 2.0**-40, 2.0 ** np.arange(-100, 100)]).astype(np.float32)
    stored = np.ascontiguousarray(np.broadcast_to(codes, (scales.size, 256))).view(fmt.codes_dtype)
    q = pq.Quantized(format, "per_head", None, stored.shape, stored, scales)
    got = kv.dequantize(dev, q, "bfloat16").get()
    assert mismatch(got, reference.dequantize(stored, scales, None, fmt, stored.shape, dtype="bfloat16")) is None


@pytest.mark.parametrize("wg", [1, 3, 32, 96])
def test_base_runs_in_any_work_group(dev, wg, monkeypatch):
    def plan(caps, blocks):
        made = variants_module.plan_base(caps, blocks)
        return variants_module.Plan("base", made.vec, wg, wg, 2, made.macros, made.options)

    rows = [variants_module.Variant("base", "kv_base", variants_module.unsupported_base, variants_module.never, plan)]
    monkeypatch.setattr(kv, "KV", tuple(rows))
    fresh = Device(dev.queue, dev.capabilities)  # which remembers no plan
    for case in selftest.quick_cases():
        check(fresh, case, "base")


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_no_rows(dev, granularity):
    group = 16 if granularity == "per_group" else None
    x = np.zeros((0, 4, 32), np.float32)
    q = kv.quantize(dev, x, "int8", granularity=granularity, group_size=group)
    codes, scales, _ = reference.quantize(x, "int8", granularity=granularity, group_size=group)
    assert mismatch(q.get().codes, codes) is None
    assert mismatch(q.get().scales, scales) is None
    assert kv.dequantize(dev, q).shape == x.shape


def test_no_columns(dev):
    q = kv.quantize(dev, np.zeros((3, 0), np.float32), "int4")
    assert q.codes.shape == (3, 0)
    assert kv.dequantize(dev, q).get().shape == (3, 0)


def test_one_dimension(dev):
    x = sample((40,), "float32", 1)
    q = kv.quantize(dev, x, "int8").get()
    codes, scales, _ = reference.quantize(x, "int8")
    assert mismatch(q.codes, codes) is None
    assert mismatch(q.scales, scales) is None
    assert q.scales.shape == (1,)


@pytest.mark.parametrize("offset", [1, 2, 8, 17])
def test_slices_with_an_offset(dev, offset):
    """Device slices begin anywhere: nothing before them and behind them is touched."""
    host = sample((16, 64), "bfloat16", 3)
    whole = cla.to_device(dev.queue, np.concatenate([np.zeros(offset, bfloat16), host.ravel()]))
    x = whole[offset:].reshape(host.shape)
    codes_store = cla.to_device(dev.queue, np.full(host.size + offset, 0xA5, np.uint8)).view(np.int8)
    q = kv.quantize(dev, host, "int8")
    out = pq.Quantized("int8", "per_head", None, host.shape, codes_store[offset:].reshape(host.shape), q.scales)
    kv.quantize(dev, x, "int8", out=out)
    codes, scales, _ = reference.quantize(host, "int8")
    assert mismatch(out.codes.get(), codes) is None
    assert mismatch(out.scales.get(), scales) is None
    assert (codes_store.get()[:offset] == np.array(0xA5, np.uint8).view(np.int8)).all()
    y, stored = guarded(dev.queue, host.shape, np.dtype(bfloat16))
    kv.dequantize(dev, out, "bfloat16", out=y)
    assert mismatch(y.get(), reference.dequantize(codes, scales, None, "int8", host.shape, dtype="bfloat16")) is None
    assert guard_intact(stored)


def test_memory_of_the_user_may_be_anywhere(dev):
    """A buffer over host memory has no alignment: vectors must not count on one."""
    host = sample((16, 64), "float32", 3)
    raw = np.zeros(host.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + 4
    there = raw[start : start + host.nbytes]
    there[:] = host.ravel().view(np.uint8)
    memory = cl.Buffer(dev.context, cl.mem_flags.READ_ONLY | cl.mem_flags.USE_HOST_PTR, hostbuf=there)
    x = cla.Array(dev.queue, host.shape, np.float32, data=memory)
    q = kv.quantize(dev, x, "int8")
    assert mismatch(q.get().codes, reference.quantize(host, "int8")[0]) is None
    with pytest.raises(pq.UnsupportedDeviceError, match="offsets in multiples of 1"):
        kv.quantize(dev, x, "int8", force="vector")


def test_results_do_not_depend_on_neighbours(dev):
    x = sample((33, 64), "bfloat16", 5)
    together = kv.quantize(dev, x, "fp8_e4m3fn").get()
    for r in (0, 7, 32):
        alone = kv.quantize(dev, x[r : r + 1], "fp8_e4m3fn").get()
        assert mismatch(alone.codes, together.codes[r : r + 1]) is None
        assert mismatch(alone.scales, together.scales[r : r + 1]) is None


def test_repeated_runs_are_equal(dev, variant):
    """Races show as runs that differ."""
    x = sample((512, 2, 64), "bfloat16", 9)
    for format in ("int4", "int8"):
        granularity = "per_group" if format == "int4" else "per_head"
        first = kv.quantize(dev, x, format, granularity=granularity, force=variant).get()
        for _ in range(10):
            again = kv.quantize(dev, x, format, granularity=granularity, force=variant).get()
            assert mismatch(again.codes, first.codes) is None
            assert mismatch(again.scales, first.scales) is None


def test_events_and_wait_for(dev):
    start = cl.UserEvent(dev.context)
    x = cla.to_device(dev.queue, sample((8, 64), "float32", 2))
    q = kv.quantize(dev, x, "int8", wait_for=[start])
    assert q.events
    start.set_status(cl.command_execution_status.COMPLETE)
    y = kv.dequantize(dev, q)
    y.finish()
    assert y.shape == x.shape


def test_a_device_from_a_queue(dev):
    other = pq.Device.from_queue(cl.CommandQueue(dev.context))
    x = cla.to_device(other.queue, sample((4, 32), "float16", 2))
    assert mismatch(kv.quantize(other, x, "int8").get().codes, kv.quantize(dev, x.get(), "int8").get().codes) is None


def test_threads_share_a_device(dev):
    x = [sample((64, 64), "bfloat16", n) for n in range(4)]
    want = [reference.quantize(a, "int8")[0] for a in x]
    wrong = []

    def work(n):
        for _ in range(8):
            failure = mismatch(kv.quantize(dev, x[n], "int8").get().codes, want[n])
            if failure:
                wrong.append(failure)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@given(
    data=st.data(),
    format=st.sampled_from(sorted(FORMATS)),
    dtype=st.sampled_from(sorted(FLOAT_DTYPES)),
    scale_dtype=st.sampled_from(["float32", "float16"]),
    rows=st.integers(1, 5),
    dim=st.sampled_from([2, 7, 32]),
)
@settings(max_examples=60)
def test_any_values(dev, data, format, dtype, scale_dtype, rows, dim):
    """Any bit patterns at all, as inputs."""
    fmt = FORMATS[format]
    size = FLOAT_DTYPES[dtype].itemsize
    raw = data.draw(st.binary(min_size=rows * dim * size, max_size=rows * dim * size))
    x = np.frombuffer(raw, FLOAT_DTYPES[dtype]).reshape(rows, dim)
    granularity, group = ("per_group", 4) if fmt.asymmetric else ("per_head", None)
    wrong = check_case(dev, Case(x, format, granularity, group, scale_dtype), None)
    assert wrong is None, wrong


@given(
    format=st.sampled_from(sorted(FORMATS)),
    granularity=st.sampled_from(GRANULARITIES),
    dtype=st.sampled_from(sorted(FLOAT_DTYPES)),
    lead=st.lists(st.integers(1, 6), max_size=3),
    dim=st.integers(1, 300),
    group=st.integers(1, 80).map(lambda n: 2 * n),
    seed=st.integers(0, 9),
)
@settings(max_examples=60)
def test_any_shape(dev, format, granularity, dtype, lead, dim, group, seed):
    """Any leading axes, odd sizes, groups that do not divide a row."""
    granularity = "per_group" if format == "int4" else granularity
    case = Case(sample((*lead, dim), dtype, seed), format, granularity, group if granularity == "per_group" else None)
    wrong = check_case(dev, case, None)
    assert wrong is None, wrong


def needs_allocation(dev, nbytes):
    most = dev.capabilities.reported["max_mem_alloc_size"]
    if most < nbytes:
        pytest.skip(f"{dev.name} allocates {most} bytes at most, {nbytes} are needed")


@pytest.mark.large
def test_offsets_beyond_32_bits(dev):
    """2^31 elements and more before the slice: 6.6 GB on the device."""
    offset = 2**31 + 64
    needs_allocation(dev, 2 * offset)
    host = sample((16, 64), "bfloat16", 3)
    x = cla.empty(dev.queue, offset + host.size, bfloat16)
    cl.enqueue_copy(dev.queue, x.data, host, dst_offset=offset * 2)
    codes = cla.empty(dev.queue, offset + host.size, np.int8)
    want, scales, _ = reference.quantize(host, "int8")
    for variant in (row.name for row in KV):
        out = pq.Quantized(
            "int8", "per_head", None, host.shape, codes[offset:].reshape(host.shape), cla.empty(dev.queue, 16, np.float32)
        )
        try:
            kv.quantize(dev, x[offset:].reshape(host.shape), "int8", out=out, force=variant)
        except pq.UnsupportedDeviceError:
            continue
        assert mismatch(out.get().codes, want) is None
        assert mismatch(out.get().scales, scales) is None


@pytest.mark.large
def test_tensors_beyond_32_bits(dev):
    """More than 2^31 elements in one tensor, per head and per tensor: 6.6 GB on the device."""
    rows = 2**31 // 4096 + 3
    needs_allocation(dev, 2 * rows * 4096)
    x = cla.empty(dev.queue, (rows, 4096), bfloat16)
    piece = 1 << 30
    for start in range(0, x.nbytes, piece):
        cl.enqueue_fill_buffer(dev.queue, x.data, np.uint32(0), start, min(piece, x.nbytes - start))
    last = sample((2, 4096), "bfloat16", 3)
    cl.enqueue_copy(dev.queue, x.data, last, dst_offset=(rows - 2) * 4096 * 2)
    q = kv.quantize(dev, x, "int8")
    want, scales, _ = reference.quantize(last, "int8")
    assert mismatch(q.codes[rows - 2 :].get(), want) is None
    assert mismatch(q.scales[rows - 2 :].get(), scales) is None
    q = kv.quantize(dev, x, "int8", granularity="per_tensor", out=None)
    want, scales, _ = reference.quantize(last, "int8", granularity="per_tensor")
    assert mismatch(q.codes[rows - 2 :].get(), want) is None
    assert mismatch(q.scales.get(), scales) is None


# ---- what is refused, before anything is enqueued ----


X = np.ones((4, 64), np.float32)


def refused(x=X, format="int8", **how):
    return x, format, how


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (refused(x=X.astype(np.float64)), pq.DTypeError, "x: expected float32, bfloat16, float16, got float64"),
        (refused(x=X.tolist()), pq.DTypeError, "x: expected a numpy.ndarray or a pyopencl.array.Array, got list"),
        (refused(x=X.astype(">f4")), pq.DTypeError, "x: expected native byte order, got dtype >f4"),
        (refused(x=X.T), pq.ShapeError, r"x: expected a C-contiguous array, got shape \(64, 4\) with strides \(4, 256\)"),
        (refused(x=X[:, ::2]), pq.ShapeError, "C-contiguous"),
        (refused(x=np.array(1, np.float32)), pq.ShapeError, "at least one axis"),
        (refused(format="int3"), pq.DTypeError, "format: expected one of fp8_e4m3fn, fp8_e5m2, int8, int4, got 'int3'"),
        (refused(granularity="per_row"), pq.ShapeError, "granularity: expected one of per_tensor"),
        (refused(format="int4", granularity="per_head"), pq.ShapeError, "int4 has a scale and a min a group"),
        (refused(granularity="per_group", group_size=-1), pq.ShapeError, "group_size: expected a positive integer, got -1"),
        (refused(format="int4", group_size=7), pq.ShapeError, "even number"),
        (refused(scale_dtype="bfloat16"), pq.DTypeError, "scale_dtype: expected float32, float16, got bfloat16"),
        (refused(eps=0.0), pq.ShapeError, r"eps: expected 2\*\*-100 to 1e30"),
        (refused(eps=float("nan")), pq.ShapeError, "eps"),
        (
            refused(force="fast"),
            pq.UnsupportedDeviceError,
            "force: expected one of vector_shuffle, vector, row, base, got 'fast'",
        ),
        (refused(out=1), pq.DTypeError, "out: expected a Quantized, got int"),
    ],
)
def test_refused_by_quantize(dev, call, error, match):
    x, format, how = call
    with pytest.raises(error, match=match):
        kv.quantize(dev, x, format, **how)


def test_refused_arrays_of_another_context(dev):
    context = cl.Context([dev.queue.device])
    other = cl.CommandQueue(context)
    with pytest.raises(pq.ContextError, match="x: expected an array of this device's context"):
        kv.quantize(dev, cla.to_device(other, X), "int8")
    q = kv.quantize(dev, X, "int8")
    with pytest.raises(pq.ContextError, match="out: "):
        kv.dequantize(dev, q, out=cla.empty(other, X.shape, np.float32))


def test_refused_outputs_change_nothing(dev):
    q = kv.quantize(dev, X, "int8")
    before = q.get()
    small = kv.quantize(dev, X[:2], "int8")
    with pytest.raises(pq.ShapeError, match=r"out: expected shape \(4, 64\), got \(2, 64\)"):
        kv.quantize(dev, X * 2, "int8", out=small)
    with pytest.raises(pq.ShapeError, match="out: expected format fp8_e4m3fn, got int8"):
        kv.quantize(dev, X * 2, "fp8_e4m3fn", out=q)
    too_few = pq.Quantized("int8", "per_head", None, X.shape, q.codes, small.scales)
    with pytest.raises(pq.ShapeError, match=r"scales: expected shape \(4,\), got \(2,\)"):
        kv.quantize(dev, X * 2, "int8", out=too_few)
    with pytest.raises(pq.DTypeError, match=r"out.codes: expected a pyopencl.array.Array, got ndarray"):
        kv.quantize(dev, X * 2, "int8", out=before)
    with pytest.raises(pq.DTypeError, match="scales: expected float16, got float32"):
        kv.quantize(dev, X * 2, "int8", out=q, scale_dtype="float16")
    assert mismatch(q.get().codes, before.codes) is None
    assert mismatch(q.get().scales, before.scales) is None


def test_refused_by_dequantize(dev):
    q = kv.quantize(dev, X, "int4").get()
    with pytest.raises(pq.DTypeError, match="dtype: expected float32, bfloat16, float16, got int8"):
        kv.dequantize(dev, q, "int8")
    with pytest.raises(pq.ShapeError, match=r"out: expected shape \(4, 64\), got \(4, 32\)"):
        kv.dequantize(dev, q, out=cla.empty(dev.queue, (4, 32), np.float32))
    with pytest.raises(pq.DTypeError, match="out: expected float32, got bfloat16"):
        kv.dequantize(dev, q, out=cla.empty(dev.queue, (4, 64), bfloat16))
    wrong = {
        "codes: expected shape": pq.Quantized("int4", "per_group", 64, (4, 66), q.codes, q.scales, q.mins),
        "mins: expected a numpy": pq.Quantized("int4", "per_group", 64, (4, 64), q.codes, q.scales, None),
        "mins: expected None for int8": pq.Quantized(
            "int8", "per_group", 64, (4, 64), np.zeros((4, 64), np.int8), q.scales, q.mins
        ),
        "scales: expected float32, float16": pq.Quantized("int4", "per_group", 64, (4, 64), q.codes, q.codes, q.mins),
    }
    for match, bad in wrong.items():
        with pytest.raises(pq.PyclquantError, match=match):
            kv.dequantize(dev, bad)


def test_nbytes_and_sizes(dev):
    q = kv.quantize(dev, np.zeros((8, 4, 128), bfloat16), "int4", group_size=32)
    assert q.nbytes == 8 * 4 * (64 + 4 * 8)
    assert q.get().nbytes == q.nbytes
