"""Which variant each of 31 real devices would get, and the pure functions behind the choice."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyclquant import tuned
from pyclquant.capabilities import Capabilities, Verdict
from pyclquant.errors import UnsupportedDeviceError
from pyclquant.variants import (
    ACT,
    GEMV,
    KV,
    TILES,
    Blocks,
    Plan,
    Product,
    arithmetic,
    cannot,
    division,
    power_of_two,
    refusals,
    register_rows,
    select,
    shuffle,
    tile_rows,
    vendor_macros,
)

REPORTS = {p.stem: json.loads(p.read_text()) for p in sorted((Path(__file__).parent / "devices").glob("*.json"))}
DEVICES = {name: Capabilities.from_report(report) for name, report in REPORTS.items()}
USUAL = Blocks(dim=128, block=128, blocks=4096, itemsize=2)
ACTIVATIONS = Blocks(dim=4096, block=4096, blocks=8, itemsize=2)
PROJECTION = Product(rows=8, n=4096, k=4096)

TAKES = {
    "adreno-650": "vector",
    "amd-apu-spectre-kaveri": "vector",
    "amd-gfx1030-rx6800xt": "vector",
    "amd-gfx1100-rx7900xtx-wsl": "vector",
    "amd-gfx701-r9-390-hang": None,  # its driver hangs at the first compiled kernel
    "amd-gfx906-radeon-vii": "vector",
    "amd-gfx90a-mi250-partial": "base",  # partial reports: the work-group limit is not known
    "amd-gfx90c-pal-windows": "vector",
    "amd-mi355x-partial": "base",
    "intel-arc-a750-partial": "base",
    "intel-arc-b580-benchmark-partial": "base",
    "intel-cpu-i5-10210u": "row",
    "intel-cpu-i5-12400f": "row",
    "intel-cpu-i5-4590-opencl12": "row",
    "intel-cpu-runtime-on-ryzen": "row",
    "intel-hd-haswell-gen75": "vector_shuffle",
    "intel-pvc-max1100-partial": "base",
    "intel-uhd-gen9-9b41": "vector_shuffle",
    "mali-g52-partial": "vector",
    "mali-lodx-g610-older-driver": "vector",
    "nvidia-b300-partial": "base",
    "nvidia-gtx1080-pascal": "vector_shuffle",
    "nvidia-h100-partial": "base",
    "nvidia-rtx2080ti": "vector_shuffle",
    "nvidia-rtx3050-laptop-windows": "vector_shuffle",
    "oclgrind-simulator": "vector",
    "pocl-aarch64-phytium": "row",
    "pocl-x86-64-cascadelake": "row",
    "rusticl-adreno-fd643": "vector",
    "rusticl-adreno-fd690": "vector",
    "vivante-phytium-ftg340": "vector",
}


OF_KV = {"vector_shuffle": "vector"}
"""What a device takes for W8A8 that takes this for K/V, where it is not the same: no quantizer shuffles."""

GEMV_TAKES = {"mali-g52-partial": "base"}
"""Its report does not tell of local memory."""


def caps_with(device_type="gpu", **works):
    """A device with these features: True, False, or a Verdict."""
    reported = {
        "name": "made up",
        "device_type": device_type,
        "max_work_group_size": 256,
        "max_compute_units": 8,
        "local_mem_size": 49152,
    }
    always = {"base": True, "index64": True, **{f"vector{n}": True for n in (2, 4, 8, 16)}}
    verdicts = {f: v if isinstance(v, Verdict) else Verdict(v, f"{f} is {v}") for f, v in {**always, **works}.items()}
    return Capabilities(reported, verdicts)


# ---- real devices ----


@pytest.mark.parametrize("name", REPORTS)
def test_every_real_device_takes_what_suits_it(name):
    caps = DEVICES[name]
    if TAKES[name] is None:
        with pytest.raises(UnsupportedDeviceError, match=r"device: expected one that runs a kernel, got .*base: "):
            select(KV, caps, USUAL)
    else:
        assert select(KV, caps, USUAL).variant == TAKES[name]


@pytest.mark.parametrize("name", REPORTS)
def test_every_refusal_has_a_reason_and_the_first_row_without_one_is_taken(name):
    caps = DEVICES[name]
    refused = refusals(KV, caps, USUAL)
    assert all(len(reason) > 10 for reason in refused.values()), refused
    assert next((row.name for row in KV if row.name not in refused), None) == TAKES[name]


@pytest.mark.parametrize("name", [n for n in REPORTS if "partial" in n and REPORTS[n]["max_work_group_size"] is None])
def test_an_unknown_limit_is_not_taken_for_a_large_one(name):
    plan = select(KV, DEVICES[name], USUAL)
    assert (plan.wg, plan.lanes, plan.vec) == (1, 1, 1)


def test_a_work_group_limit_that_is_no_power_of_two_gives_one_that_is():
    mali = REPORTS["mali-g52-partial"]
    assert mali["max_work_group_size"] == 384
    for limit, wg in ((384, 128), (96, 64), (63, 32)):
        assert select(KV, Capabilities.from_report({**mali, "max_work_group_size": limit}), USUAL).wg == wg


def test_the_smallest_of_the_limits_counts():
    # 2048 work-items a group, but no more than 1024 in a dimension; 256 is our own limit
    assert DEVICES["rusticl-adreno-fd690"].max_work_group_size == 256
    measured = caps_with(work_group=Verdict(True, "measured", value=64))
    assert measured.max_work_group_size == 64
    one_dimension = Capabilities({"max_work_group_size": 2048, "max_work_item_sizes": [128, 1, 1]}, {})
    assert one_dimension.max_work_group_size == 128


@pytest.mark.parametrize("name", REPORTS)
def test_every_real_device_takes_for_w8a8_what_suits_it(name):
    caps = DEVICES[name]
    act = OF_KV.get(TAKES[name], TAKES[name])
    for table, shape, takes in ((ACT, ACTIVATIONS, act), (GEMV, PROJECTION, GEMV_TAKES.get(name, act))):
        refused = refusals(table, caps, shape)
        assert all(len(reason) > 10 for reason in refused.values()), refused
        assert next((row.name for row in table if row.name not in refused), None) == takes
        if takes is None:
            with pytest.raises(UnsupportedDeviceError, match=r"device: expected one that runs a kernel, got .*base: "):
                select(table, caps, shape)
        else:
            assert select(table, caps, shape).variant == takes


@pytest.mark.parametrize("name", [name for name in REPORTS if TAKES[name]])
@pytest.mark.parametrize("layout", ["per_row", "block_128"])
def test_rows_do_not_change_the_variant_of_the_gemv(name, layout):
    """Or the bits of a row would depend on how many others there are; nor do they change how a row is split."""
    plans = [select(GEMV, DEVICES[name], Product(rows, 4096, 4096, layout)) for rows in range(1, 129)]
    assert len({(plan.variant, plan.vec, plan.lanes) for plan in plans}) == 1
    for rows, plan in enumerate(plans, 1):
        if plan.variant != "base":
            assert plan.macros["TILE_M"] == register_rows(rows)


# ---- select ----


def test_rows_of_pairs_where_they_fit_and_past_the_caches_where_they_are_large():
    caps = caps_with("cpu", fma=True, fma_speed=True, denormals=True, divide=True)

    def taken(caps, **changes):
        macros = select(KV, caps, replace(USUAL, **changes), force="row").macros
        return macros.get("PAIRS"), macros.get("STREAM")

    assert taken(caps) == (8, 0)
    large = 1 << 20
    assert taken(caps, blocks=large) == taken(caps, blocks=large, align=64) == (8, 1)
    assert taken(caps, blocks=large, align=32) == (8, 0)
    assert taken(caps, dim=64, block=64) == (4, 0)
    assert taken(caps, codes_per_byte=2) == (8, 0)
    assert taken(caps, codes_per_byte=2, dim=32, block=32) == (2, 0)
    for block in (32, 96, 320):
        assert taken(caps, dim=block, block=block) == (None, None)
    for changes in ({"itemsize": 4}, {"block": 64}):
        assert taken(caps, **changes) == (None, None)
    fine = {"fma": True, "fma_speed": True, "denormals": True, "divide": True, "x86_bf16": Verdict(True, "ok", value=2)}
    x86 = caps_with("cpu", **fine, x86_look_up=True)

    def spelling(caps=x86, **changes):
        return select(KV, caps, replace(USUAL, **changes), force="row").macros.get("X86_BF16")

    assert spelling(blocks=large) == 2
    assert spelling(caps_with("cpu", **fine, x86_look_up=False), blocks=large) is None
    assert spelling() is spelling(blocks=large, restore=True) is spelling(blocks=large, itemsize=4) is None
    for feature in ("fma", "fma_speed", "denormals", "vector8"):
        lacking = {"fma": True, "fma_speed": True, "denormals": True, "divide": True, feature: False}
        lacking |= {"vector16": False} if feature == "vector8" else {}
        assert taken(caps_with("cpu", **lacking)) == (None, None)


def test_force_takes_a_row_that_only_does_not_suit():
    caps = DEVICES["nvidia-rtx2080ti"]
    assert "row" in refusals(KV, caps, USUAL)
    assert select(KV, caps, USUAL, force="row").variant == "row"


def test_force_refuses_a_row_that_cannot_run():
    with pytest.raises(UnsupportedDeviceError, match=r"force: vector_shuffle cannot run on gfx906: .*cl_khr_subgroup_shuffle"):
        select(KV, DEVICES["amd-gfx906-radeon-vii"], USUAL, force="vector_shuffle")


def test_force_refuses_an_unknown_name():
    with pytest.raises(UnsupportedDeviceError, match="force: expected one of vector_shuffle, vector, row, base, got 'fast'"):
        select(KV, DEVICES["nvidia-rtx2080ti"], USUAL, force="fast")


@pytest.mark.parametrize("device_type", ["cpu", "gpu"])
def test_a_wrong_known_answer_moves_the_choice_to_the_next_row(device_type):
    caps = caps_with(device_type)
    first = select(KV, caps, USUAL).variant
    wrong = {f"kv_{first}": Verdict(False, "codes: expected 1, got 2")}
    worse = replace(caps, works={**caps.works, **wrong})
    assert select(KV, worse, USUAL).variant == "base"
    assert refusals(KV, worse, USUAL)[first] == f"kv_{first}: codes: expected 1, got 2"


def test_a_device_without_a_working_kernel_is_refused_with_the_reason():
    with pytest.raises(UnsupportedDeviceError, match="base: base: wrong bits"):
        select(KV, caps_with(base=Verdict(False, "wrong bits")), USUAL)


@pytest.mark.parametrize(
    ("blocks", "why"),
    [
        (replace(USUAL, dim=63, block=63), "rows of 63"),
        (replace(USUAL, dim=2, block=2), "aligned vectors of 4 bytes"),
        (replace(USUAL, align=1), "offsets in multiples of 1 elements"),
        (replace(USUAL, block=6), "blocks of 6"),
    ],
)
def test_shapes_that_cut_vectors_refuse_them(blocks, why):
    caps = DEVICES["nvidia-rtx2080ti"]
    refused = refusals(KV, caps, blocks)
    assert why in refused["vector"]
    assert why in refused["vector_shuffle"]
    assert select(KV, caps, blocks).variant == "base"


def test_a_width_that_does_not_work_is_not_used():
    no16 = caps_with("cpu", vector16=False)
    assert select(KV, no16, USUAL).vec == 8
    no8 = caps_with("gpu", vector8=Verdict(False, "killed by signal 6"))
    assert refusals(KV, no8, USUAL)["vector"] == "vector8: killed by signal 6"


def test_oclgrind_says_cpu_and_gpu_at_once_and_is_a_cpu():
    assert DEVICES["oclgrind-simulator"].is_cpu
    assert not DEVICES["intel-arc-a750-partial"].is_cpu  # its type is not known


def test_matrix_units_come_first_where_they_give_the_right_products():
    caps = caps_with(nv_mma=True)
    assert select(GEMV, caps, PROJECTION).variant == "mma"
    assert select(GEMV, caps_with(nv_mma=True, gemv_mma=False), PROJECTION).variant == "vector"
    assert refusals(GEMV, caps_with(nv_mma=False), PROJECTION)["mma"] == "nv_mma: nv_mma is False"


@pytest.mark.parametrize("spelling", [1, 2])
def test_dot_products_of_bfloat16_come_first_on_cpus_that_have_them(spelling):
    found = Verdict(True, "right bits", value=spelling)
    caps = caps_with("cpu", x86_bf16=found)
    plan = select(GEMV, caps, PROJECTION)
    assert (plan.variant, plan.vec, plan.macros["X86_BF16"]) == ("row_bf16", 16, spelling)
    assert select(GEMV, caps_with("cpu", x86_bf16=found, gemv_row_bf16=False), PROJECTION).variant == "row"
    assert refusals(GEMV, caps_with("cpu", x86_bf16=False), PROJECTION)["row_bf16"] == "x86_bf16: x86_bf16 is False"
    assert select(GEMV, caps_with("gpu", x86_bf16=found), PROJECTION).variant == "vector"


@pytest.mark.parametrize("device_type", ["cpu", "gpu"])
@pytest.mark.parametrize(("table", "op", "shape"), [(ACT, "act", ACTIVATIONS), (GEMV, "gemv", PROJECTION)], ids=["act", "gemv"])
def test_a_wrong_known_answer_of_w8a8_moves_the_choice_to_the_next_row(device_type, table, op, shape):
    caps = caps_with(device_type)
    first = select(table, caps, shape).variant
    worse = replace(caps, works={**caps.works, f"{op}_{first}": Verdict(False, "at (0, 1)")})
    assert select(table, worse, shape).variant == "base"
    assert refusals(table, worse, shape)[first] == f"{op}_{first}: at (0, 1)"


@pytest.mark.parametrize(
    ("reported", "shape", "why"),
    [
        ({}, replace(PROJECTION, align=8), "weights at multiples of 8 bytes, 16 are needed"),
        ({"max_work_group_size": 32}, PROJECTION, "work-groups of 32, 64 are needed"),
        ({"local_mem_size": None}, PROJECTION, "0 bytes of local memory, 16384 are needed"),
        ({"local_mem_size": 16383}, PROJECTION, "16383 bytes of local memory, 16384 are needed"),
    ],
)
def test_what_the_vectors_of_the_gemv_need(reported, shape, why):
    caps = caps_with()
    less = replace(caps, reported={**caps.reported, **reported})
    assert refusals(GEMV, caps, PROJECTION).keys() == {"mma", "row_bf16", "row"}
    assert refusals(GEMV, less, shape)["vector"] == why
    assert select(GEMV, less, shape).variant == "base"
    assert select(GEMV, replace(less, reported={**less.reported, "device_type": "cpu"}), shape).variant == "row"


def test_large_weights_need_64_bit_indices():
    caps = caps_with(index64=Verdict(False, "wrong bits"))
    assert select(GEMV, caps, Product(1, 2**20, 2**10)).variant == "vector"
    assert refusals(GEMV, caps, Product(1, 2**21, 2**10))["base"] == "index64: wrong bits"


# ---- the pieces ----


def test_division_takes_the_cheapest_that_is_right():
    option = Verdict(True, "correctly rounded", options="-cl-fp32-correctly-rounded-divide-sqrt")
    fma = {"DIVIDE": "DIVIDE_FMA"}
    native = {"DIVIDE": "DIVIDE_NATIVE"}
    assert division(caps_with("cpu", divide=True, divide_option=option, divide_fma=True)) == (native, ())
    assert division(caps_with("cpu", divide=False, divide_option=option, divide_fma=True)) == (native, (option.options,))
    assert division(caps_with("cpu", divide_fma=True)) == (fma, ())
    assert division(caps_with("gpu", divide=True, divide_fma=True)) == (fma, ())
    assert division(caps_with("gpu", divide=True, divide_fma=False)) == (native, ())
    assert division(caps_with("gpu")) == ({"DIVIDE": "DIVIDE_INT"}, ())


def test_shuffle_takes_the_first_that_works_with_its_lanes_and_options():
    nv, khr = Verdict(True, "", value=32), Verdict(True, "", value=16, options="-cl-std=CL3.0")
    assert shuffle(caps_with()) is None
    assert shuffle(caps_with(shuffle_nv=nv, shuffle_khr=khr)) == ({"SHUFFLE": 3}, 32, "")
    assert shuffle(caps_with(shuffle_nv=False, shuffle_khr=khr)) == ({"SHUFFLE": 1}, 8, "-cl-std=CL3.0")
    sized = caps_with(shuffle_intel=Verdict(True, "", value=16), subgroup_size=Verdict(True, "", value=16))
    assert shuffle(sized) == ({"SHUFFLE": 2, "SUBGROUP_SIZE": 16}, 16, "")


def test_vendor_macros_follow_the_verdicts():
    assert vendor_macros(caps_with()) == {"HALF": 0, "CONVERT_NV": 0}
    assert vendor_macros(caps_with(half_convert=True, nv_convert=True)) == {"HALF": 1, "CONVERT_NV": 1}


def test_missing_names_the_first_feature_that_does_not_work():
    caps = caps_with(a=True, b=Verdict(False, "no"))
    assert caps.missing("a") is None
    assert caps.missing("a", "b", "c") == "b: no"
    assert caps.missing("c") == "c: not probed"


def test_a_verdict_survives_json():
    for verdict in (Verdict(True, "fine"), Verdict(False, "no", 3, "-cl-std=CL3.0"), Verdict(True, "none", 0)):
        assert Verdict.of(json.loads(json.dumps(verdict.json()))) == verdict


def test_tiles_hold_their_rows_and_no_more_than_needed():
    assert [tile_rows(rows) for rows in (1, 8, 9, 16, 17, 32, 33, 64, 65, 128)] == [8, 8, 16, 16, 32, 32, 64, 64, 128, 128]
    for rows in range(1, 129):
        smaller = [t for t in TILES if t < tile_rows(rows)]
        assert rows <= tile_rows(rows)
        assert all(t < rows for t in smaller)


def test_rows_in_registers():
    assert [register_rows(rows) for rows in (1, 2, 3, 4, 5, 8, 9, 128)] == [1, 2, 4, 4, 8, 8, 8, 8]


def test_arithmetic_is_what_works_and_is_fast():
    """Weights decode with subnormal operands only where the sums keep them."""

    def of(**works):
        macros = arithmetic(caps_with(**works))
        return macros["FMA"], macros["DENORMALS"], macros["HALF"]

    assert of() == (0, 0, 0)
    assert of(fma=True) == (0, 0, 0)
    assert of(fma=True, fma_speed=False, denormals=True) == (0, 1, 0)
    assert of(fma=True, fma_speed=True) == (1, 0, 0)
    assert of(fma=True, fma_speed=True, denormals=True) == (1, 0, 0)
    assert of(fma=True, fma_speed=True, denormals=True, fma_denormals=True) == (1, 1, 0)
    assert of(fma=True, fma_speed=True, fma_denormals=True) == (1, 0, 0)
    assert of(fma=False, fma_speed=True, denormals=True, half_convert=True) == (0, 1, 1)


def test_half_a_work_group_keeps_what_the_kernels_ask():
    whole = Plan("vector", 4, 32, 256, 2, {"SPREAD": 4})
    plans = [whole := whole.halved() for _ in range(4)]
    assert [(p.wg, p.lanes, p.macros["SPREAD"]) for p in plans] == [(128, 32, 4), (64, 32, 2), (32, 32, 1), (16, 16, 1)]
    assert Plan("base", 1, 64, 64, 1, {"CHUNKS": 3}).halved() == Plan("base", 1, 32, 32, 1, {"CHUNKS": 0})


def test_local_memory_is_what_the_probe_found():
    caps = caps_with()
    assert caps.local_memory == 49152
    found = {Verdict(True, "more", 98304): 98304, Verdict(True, "less", 4096): 4096, Verdict(False, "none"): 49152}
    for verdict, size in found.items():
        assert replace(caps, works={**caps.works, "local_memory": verdict}).local_memory == size
    assert replace(caps, reported={**caps.reported, "local_mem_size": None}).local_memory == 0


def test_weights_of_many_rows_take_larger_tiles_where_they_fit():
    """H200: 132 compute units; 224 kB of local memory, of which the driver reports 48."""
    extra = {"compute_capability": "9.0"}
    caps = caps_with(nv_mma=True, local_memory=Verdict(True, "probed", 224 << 10))
    caps = replace(caps, reported={**caps.reported, "vendor": "NVIDIA Corporation", "max_compute_units": 132, "extra": extra})

    def tile(n, rows, caps=caps):
        plan = select(GEMV, caps, Product(rows, n, 8192))
        return plan.blocks_per_team, plan.macros["STAGES"]

    assert (tile(48 * 132, 16), tile(48 * 132 - 1, 16)) == ((32, 4), (16, 3))
    assert (tile(8192, 64), tile(5120, 64)) == ((64, 2), (64, 3))
    small = replace(caps, works={**caps.works, "local_memory": Verdict(True, "probed", 49152)})
    assert (tile(8192, 16, small), tile(5120, 16, small)) == ((32, 2), (16, 3))


# ---- properties ----

powers = st.sampled_from([1 << n for n in range(21)])


@given(st.integers(1, 1 << 40))
def test_power_of_two(n):
    p = power_of_two(n)
    assert p & (p - 1) == 0
    assert p // 2 < n <= p


@given(st.integers(1, 4096), st.integers(1, 4096), powers, st.sampled_from([1, 2, 4, 8, 16]))
def test_vec_is_the_widest_that_divides(dim, block, align, limit):
    v = Blocks(dim, block, 1, 2).vec(limit, align)

    def fits(n):
        return n <= limit and all(size % n == 0 for size in (dim, block, align))

    assert v & (v - 1) == 0
    assert fits(v)
    assert not fits(2 * v)


@given(st.integers(1, 1 << 40), powers.filter(lambda n: n <= 256), powers.filter(lambda n: n <= 256), st.integers(1, 4096))
def test_global_size_serves_all_blocks_and_no_more_groups_than_needed(blocks, wg, lanes, blocks_per_team):
    plan = Plan("any", 1, min(lanes, wg), wg, blocks_per_team, {})
    size = plan.global_size(blocks)

    def served(items):
        return items // plan.lanes * blocks_per_team

    assert size % wg == 0
    assert served(size) >= blocks
    assert served(size - wg) < blocks


@st.composite
def tensors(draw):
    """Blocks as `pyclquant.kv` makes them: of int4 the groups are even, but the last of an odd row."""
    pack = draw(st.sampled_from([1, 2]))
    dim = draw(st.one_of(st.integers(1, 600), st.sampled_from([64, 80, 96, 128, 192, 256, 576, 4096, 8192])))
    whole_row = draw(st.booleans())
    block = dim if whole_row else min(dim, pack * draw(st.integers(1, 300)))
    itemsize = draw(st.sampled_from([2, 4]))
    return Blocks(dim, block, draw(st.integers(1, 1 << 33)), itemsize, pack, draw(powers), draw(st.booleans()))


@settings(max_examples=500)
@given(st.sampled_from(sorted(DEVICES)), st.one_of(st.none(), st.integers(1, 300)), st.sampled_from(KV + ACT), tensors())
def test_every_plan_keeps_what_the_kernels_ask_of_their_macros(name, limit, row, blocks):
    """For every device, work-group limit and shape, and every smaller work-group that a built kernel may ask for."""
    caps = DEVICES[name]
    if limit is not None:
        caps = replace(caps, reported={**caps.reported, "max_work_group_size": limit})
    if cannot(row, caps, blocks):
        return
    plan = row.plan(caps, blocks)
    assert plan.variant == row.name
    check_plan(row, plan, caps, blocks)
    while plan.wg > 1:
        plan = plan.halved()
        check_plan(row, plan, caps, blocks)


def check_plan(row, plan, caps, blocks):
    """The rules of the headers of cl/common.h, cl/kv_quantize.cl and cl/act_quant.cl."""
    assert plan.vec in (1, 2, 4, 8, 16)
    assert plan.wg % plan.lanes == 0
    assert plan.wg <= caps.max_work_group_size
    assert plan.wg * 8 <= 16384  # bytes of local memory that every device has
    assert plan.vec >= blocks.codes_per_byte
    pairs_of_int4 = blocks.codes_per_byte == 2 and plan.vec == 2
    assert pairs_of_int4 or (blocks.dim % plan.vec == 0 and blocks.block % plan.vec == 0)
    if plan.macros["ALIGNED"]:
        assert blocks.align % plan.vec == 0
        assert blocks.dim % plan.vec == 0
    if plan.macros.get("SHUFFLE"):
        assert plan.lanes & (plan.lanes - 1) == 0
        assert plan.lanes <= (plan.macros.get("SUBGROUP_SIZE") or 32)
    chunks = plan.macros.get("CHUNKS")
    if chunks and row in ACT:
        assert blocks.rows == 1
        assert blocks.block <= plan.lanes * plan.vec * chunks
    elif chunks:
        assert blocks.dim == blocks.block == plan.lanes * plan.vec * chunks
    assert plan.defines() == {"VEC": plan.vec, "LANES": plan.lanes, "WG": plan.wg, **plan.macros}


@st.composite
def products(draw):
    """As `pyclquant.w8a8` makes them."""
    layout = draw(st.sampled_from(tuned.LAYOUTS))
    return Product(draw(st.integers(1, 128)), draw(st.integers(1, 40000)), 128 * draw(st.integers(1, 200)), layout, draw(powers))


@settings(max_examples=500)
@given(
    st.sampled_from(sorted(DEVICES)), st.one_of(st.none(), st.integers(1, 300)), st.booleans(), st.sampled_from(GEMV), products()
)
def test_every_gemv_plan_keeps_what_the_kernels_ask_of_their_macros(name, limit, units, row, product):
    """The rules of the headers of cl/gemv_w8a8*.cl."""
    caps = DEVICES[name]
    if limit is not None:
        caps = replace(caps, reported={**caps.reported, "max_work_group_size": limit})
    drawn = {"nv_mma": Verdict(units, "as drawn"), "x86_bf16": Verdict(units, "as drawn", value=1)}
    if units:
        drawn["local_memory"] = Verdict(True, "as drawn", value=224 << 10)
    caps = replace(caps, works={**caps.works, **drawn})
    if cannot(row, caps, product):
        return
    plan = row.plan(caps, product)
    assert plan.variant == row.name
    assert plan.wg <= caps.max_work_group_size
    assert plan.wg % plan.lanes == 0
    tile_m, tile_n = plan.macros["TILE_M"], plan.macros["TILE_N"]
    walks = plan.variant in ("row_bf16", "row")
    if walks:
        assert plan.blocks_per_team % tile_n == 0
    else:
        assert plan.blocks_per_team == tile_n
    assert plan.global_size(product.n) // plan.wg * (plan.wg // plan.lanes) * plan.blocks_per_team >= product.n
    if plan.variant == "mma":
        warps_k, warps_n, warps_m = (plan.macros[f"WARPS_{axis}"] for axis in "KNM")
        assert plan.wg == 32 * warps_k * warps_n * warps_m
        assert 4 % warps_k == 0
        assert product.rows <= tile_m
        assert (tile_m % (8 * warps_m), tile_n % (16 * warps_n)) == (0, 0)
        assert plan.macros["STAGES"] >= 2
        assert 128 * warps_k * plan.macros["STAGES"] * (tile_n + tile_m) <= caps.local_memory
        return
    assert 16 % tile_n == 0
    assert 128 % (4 * plan.vec) == 0
    if walks:
        assert plan.wg == 1
        assert plan.vec == 16 or plan.variant == "row"
        return
    assert tile_m <= plan.lanes  # lane m adds up row m
    sums, memory = plan.wg // plan.lanes * (plan.lanes + 1), caps.local_memory or 16384
    spans, spread = plan.macros.get("SPANS", 1), plan.macros.get("SPREAD", 1)
    assert plan.lanes % spread == plan.wg % (plan.lanes * spread) == 0
    staged = plan.macros["BUFFERS"] * spans * 4 * plan.lanes * plan.vec
    assert sums <= staged
    assert 4 * tile_m * staged <= memory
    if plan.macros["ALIGNED"]:
        assert product.align % (4 * plan.vec) == 0
