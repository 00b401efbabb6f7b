"""Tuning: no candidate changes a bit, wrong ones are left out, and a real run with kernel-tuner whose file is then used."""

import json
import math
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyopencl.array as cla
import pytest
from conftest import TABLES

import pyclquant as pq
from pyclquant import cli, reference, tune, tuned
from pyclquant.bench_work import sample
from pyclquant.variants import cannot

TENSOR, WEIGHT = (521, 128), (384, 512)
MANY_ROWS = (70001, 8)
"""So many that a GPU shares them out differently with each number of work-items."""
SMALL = tune.Choice(tensor=TENSOR, weight=WEIGHT)
FAR = 4096
"""Work-items for each core, farther from 16 than any that is tried."""


@pytest.fixture
def sixteen_is_fastest(monkeypatch):
    """All is launched and timed; the times of `row` are called 1 µs for 16 work-items and 1 µs more for each power of two."""
    genuine = tune.Bench.run

    def run(bench, keys, iterations):
        times = genuine(bench, keys, iterations)
        assert all(us > 0 for us in times.values())
        return {key: 1 + abs(math.log2(key[0] / 16)) for key in times}

    monkeypatch.setattr(tune.Bench, "run", run)


@pytest.fixture
def kernel(request, dev):
    """An op/variant; skips one that the device cannot run."""
    op, _, variant = request.param.partition("/")
    table, shape = TABLES[op.partition("_")[0] if op.startswith("kv") else op]
    reason = cannot(next(row for row in table if row.name == variant), dev.capabilities, shape)
    if reason:
        pytest.skip(f"{variant} on {dev.name}: {reason}")
    return request.param


def own(dev, kernel, **values):
    """The device with launch parameters of a user."""
    entries = {kernel: dict.fromkeys(tuned.sizes(kernel), values)}
    return pq.Device(dev.queue, replace(dev.capabilities, tuned=(("own", entries),)))


def task_of(dev, kernel, rows=None, tensor=TENSOR):
    """The first small task of a kernel."""
    return next(iter(tune.tasks(dev, replace(SMALL, ops=(kernel,), rows=rows, tensor=tensor))))[1]()


# ---- candidates ----


@pytest.mark.parametrize("kernel", tune.SPACES, indirect=True)
def test_no_candidate_changes_a_bit(dev, kernel):
    for name, make in tune.tasks(dev, replace(SMALL, ops=(kernel,), rows=(1,) if kernel.startswith("gemv") else (200,))):
        task = make()
        present = tuned.find(dev.capabilities, kernel, task.size).values
        one_at_a_time = [present | {name: value} for name, values in tune.SPACES[kernel].items() for value in values]
        launches = tune.distinct(dev, task, [present, *one_at_a_time])
        assert len(launches) > 1
        want = None
        for key in launches:
            values = dict(zip(tuned.PARAMETERS[kernel], key, strict=True))
            for a in task.outputs:
                a.view(np.uint8).fill(0xA5)
            tune.launch_with(dev, task, values, run=True)
            got = [a.get() for a in task.outputs]
            if want is None:
                want = got
                assert task.check(got) is None
            assert [a.tobytes() for a in got] == [a.tobytes() for a in want], (name, values)


def test_spaces_hold_only_what_kernels_take():
    assert tune.SPACES.keys() == tuned.PARAMETERS.keys()
    for kernel, space in tune.SPACES.items():
        content = {"default": {kernel: {"*": {}}}}
        for name, values in space.items():
            for value in values:
                content["default"][kernel]["*"][name] = value
                tuned.parse(json.dumps(content), "space")


def test_quick_tries_the_neighbours_of_each_parameter_alone():
    present = {"wg": 128, "tile_n": 8, "spans": 1, "spread": 4}
    assert tune.around("gemv/vector", present) == [
        present,
        present | {"wg": 64},
        present | {"wg": 256},
        present | {"tile_n": 4},
        present | {"spans": 2},
        present | {"spread": 1},
    ]
    odd = tune.settings("gemv/vector", present | {"tile_n": 16})
    assert odd[0] == present | {"tile_n": 16}
    assert len(odd) == len({tuple(values.values()) for values in odd}) == 3 * 5 * 4 * 2
    changes = [sum(values[name] != odd[0][name] for name in odd[0]) for values in odd]
    assert changes == sorted(changes)


@pytest.mark.parametrize("kernel", ["gemv/row"])
def test_tiles_whose_sums_fit_no_registers_are_not_tried(dev, kernel):
    """All the same the present one is."""
    for rows, most in ((1, 16), (8, 4)):
        task = task_of(dev, kernel, rows=(rows,))
        tried = tune.settings(kernel, {"tile_n": 16, "item_bytes": 1 << 20, "items": 16})
        plans = [launch.plan.macros for launch in tune.distinct(dev, task, tried).values()]
        assert (plans[0]["TILE_M"], plans[0]["TILE_N"]) == (rows, 16)
        assert max(macros["TILE_N"] for macros in plans[1:]) == most


def test_rows_choose_the_size_classes(dev):
    def sizes(kernel, rows):
        return [name.partition(" ")[2] for name, _ in tune.tasks(dev, replace(SMALL, ops=(kernel,), rows=rows))]

    assert sizes("gemv/row", (1, 200)) == ["per_row 1", "per_row 8", "block_128 1", "block_128 8"]
    assert sizes("gemv/row", (3,)) == ["per_row 4", "block_128 4"]
    assert len(sizes("gemv/row", None)) == 8
    assert sizes("act_quant/row", (3,)) == ["*", "block_128"]


# ---- runs with kernel-tuner ----


@pytest.mark.parametrize("kernel", ["kv_quantize/row"], indirect=True)
@pytest.mark.usefixtures("sixteen_is_fastest")
def test_the_fastest_parameters_are_found(dev, kernel):
    row = tune.tune(own(dev, kernel, items=FAR), task_of(dev, kernel, tensor=MANY_ROWS))
    assert (row.present, row.present_us) == ({"items": FAR}, 9.0)
    assert (row.best, row.best_us) == ({"items": 16}, 1.0)
    assert row.left_out == {}


def test_what_is_not_faster_in_each_round_is_not_taken(dev, monkeypatch):
    """Nor what is faster by less than GAIN."""
    task = task_of(dev, "kv_quantize/base")
    rounds = iter([{16: 5, 32: 5, 64: 9, 128: 9, 256: 9}, *[{16: 5, 32: 8.9, 64: 9, 128: 99}] * 4, {16: 9, 32: 8.9, 64: 9}])
    monkeypatch.setattr(tune.Bench, "run", lambda bench, keys, iterations: {(wg,): us for wg, us in next(rounds).items()})
    monkeypatch.setattr(tune, "CPU_ROUNDS", 5)
    cpu = replace(dev.capabilities, reported={**dev.capabilities.reported, "device_type": "cpu"})
    row = tune.tune(pq.Device(dev.queue, cpu), task)
    assert (row.present, row.best) == ({"wg": 64}, {"wg": 64})


@pytest.mark.parametrize("kernel", ["kv_quantize/row"], indirect=True)
@pytest.mark.usefixtures("sixteen_is_fastest")
def test_of_many_combinations_those_around_the_fastest_are_tried(dev, kernel, monkeypatch):
    monkeypatch.setattr(tune, "MOST_LAUNCHES", 1)
    monkeypatch.setattr(tune, "STEPS", 2)
    row = tune.tune(own(dev, kernel, items=1), task_of(dev, kernel, tensor=MANY_ROWS))
    assert (row.tried, row.best) == (3, {"items": 16})


@pytest.mark.parametrize("kernel", ["kv_quantize/base"], indirect=True)
def test_kernels_of_a_gpu_are_built_ahead(dev, kernel):
    task = task_of(dev, kernel)
    launches = tune.distinct(dev, task, tune.settings(kernel, {"wg": 64}))
    bench = tune.Bench(dev, task, launches, launches[64,], [])
    bench.backend = SimpleNamespace(ctx=dev.context)
    bench.build_all(launches)
    assert bench.wrong == {}
    assert bench.built.keys() == launches.keys()
    built = dict(bench.built)
    bench.build_all(launches)
    assert all(bench.built[key] is built[key] for key in built)


@pytest.mark.parametrize("kernel", ["kv_quantize/base"], indirect=True)
def test_room_for_partial_sums_is_as_large_as_a_candidate_wants(dev, kernel):
    task = task_of(dev, kernel)
    first = tune.launch_with(dev, task, {"wg": 64}, run=True)
    room = cla.to_device(dev.queue, np.arange(8, dtype=np.uint8))
    larger = cla.to_device(dev.queue, np.full(32, 9, np.uint8))

    def launch(*more):
        return replace(first, arguments=[*first.arguments, *more])

    launches = {(64,): launch(room.base_data, None, None), (32,): launch(larger.base_data, room.base_data, None)}
    arguments = tune.Bench(dev, task, launches, launches[64,], []).arguments
    assert arguments[-3].tolist() == [*range(8), *[0] * 24]
    assert arguments[-2].tolist() == [0] * 8
    assert arguments[-1] is None
    inputs = [a for a in arguments[:-3] if isinstance(a, np.ndarray)]
    assert [a.min() == a.max() == 0xA5 for a in inputs] == [False, *[True] * len(task.outputs)]


@pytest.mark.parametrize("kernel", ["gemv/base", "kv_quantize/base"])
def test_what_has_no_parameters_is_not_tuned(dev, kernel):
    names = [name for name, _ in tune.tasks(dev, replace(SMALL, ops=(kernel,)))]
    assert names == ([] if kernel == "gemv/base" else [f"{kernel} *", f"{kernel} int4"])


@pytest.mark.parametrize("kernel", ["gemv/row", "gemv/vector"], indirect=True)
def test_a_product_is_tuned(dev, kernel):
    row = tune.tune(dev, task_of(dev, kernel, rows=(4,)), quick=True)
    assert row.left_out == {}
    assert row.tried >= 3
    assert row.best_us <= row.present_us


@pytest.mark.parametrize("kernel", ["kv_quantize/row"], indirect=True)
@pytest.mark.usefixtures("sixteen_is_fastest")
def test_candidates_that_give_other_bytes_or_do_not_build_are_left_out(dev, kernel, monkeypatch):
    genuine = tune.launch_with

    def launch_with(device, task, values, run=False):
        launch = genuine(device, task, values, run)
        if values["items"] == 16:
            return replace(launch, macros={**launch.macros, "FORMAT": "FP8_E5M2"})
        if values["items"] == 64:
            return replace(launch, macros={**launch.macros, "FORMAT": "nonsense"})
        return launch

    monkeypatch.setattr(tune, "launch_with", launch_with)
    row = tune.tune(own(dev, kernel, items=FAR), task_of(dev, kernel, tensor=MANY_ROWS))
    assert row.left_out.keys() == {"items=16", "items=64"}
    assert row.left_out["items=16"].endswith("bytes differ from the checked result")
    assert "kv_quantize.cl: did not build" in row.left_out["items=64"]
    assert row.best == {"items": 4}


@pytest.mark.parametrize("kernel", ["kv_quantize/base"], indirect=True)
def test_a_device_that_is_wrong_now_is_not_tuned(dev, kernel):
    task = replace(task_of(dev, kernel), check=lambda got: "codes differ")
    with pytest.raises(pq.UnsupportedDeviceError, match=r"base \*, 521×128: expected the reference's result .*: codes differ"):
        tune.tune(dev, task)


@pytest.mark.parametrize("kernel", ["kv_dequantize/base"], indirect=True)
def test_caches_are_emptied_before_each_launch(dev, kernel, monkeypatch):
    calls = []
    genuine = tune.Flush.enqueue

    def enqueue(flush):
        genuine(flush)
        calls.append(flush.nbytes)

    monkeypatch.setattr(tune.Flush, "enqueue", enqueue)
    row = tune.tune(dev, task_of(dev, kernel), quick=True)
    assert len(calls) >= 7 * row.tried
    assert min(calls) >= min(64 << 20, dev.capabilities.reported["global_mem_size"] // 16)


# ---- files and the command line ----


def row_of(kernel, size, present, best):
    return tune.Row(kernel, size, "any", present, 2.0, best, 1.0, 2, {})


def test_an_entry_for_any_size_does_not_change_those_of_other_sizes(dev):
    quantize, dequantize = "kv_quantize/vector", "kv_dequantize/vector"
    now = {op: tuned.find(dev.capabilities, op).values for op in (quantize, dequantize)}
    rows = [
        row_of(quantize, "int4", now[quantize], now[quantize] | {"wg": 32}),
        row_of(quantize, "*", now[quantize], now[quantize] | {"wg": 256}),
        row_of(dequantize, "*", now[dequantize], now[dequantize] | {"wg": 256}),
        row_of("act_quant/base", "*", {"wg": 64}, {"wg": 64}),
    ]
    before = {"vendor": {"x": {}}, "device": {dev.capabilities.reported["name"]: {"gemv/row": {"*": {"items": 3}}}}}
    content = tune.updated(before, dev, "device", rows, "me")
    tuned.parse(json.dumps(content), "mine")
    entries = content["device"][dev.capabilities.reported["name"]]
    assert content["vendor"] == {"x": {}}
    assert entries.pop("about").startswith("me, 20")
    assert entries == {
        "gemv/row": {"*": {"items": 3}},
        quantize: {"*": now[quantize] | {"wg": 256}, "int4": now[quantize] | {"wg": 32}},
        dequantize: {"*": now[dequantize] | {"wg": 256}, "int4": tuned.find(dev.capabilities, dequantize, "int4").values},
    }


def run(capsys, *arguments):
    """Exit code, standard output and error of the command."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return ended.value.code, *capsys.readouterr()


@pytest.mark.parametrize("kernel", ["kv_quantize/row"], indirect=True)
@pytest.mark.usefixtures("sixteen_is_fastest")
def test_a_run_of_the_command_writes_a_file_that_is_then_used(dev, kernel, monkeypatch, tmp_path, capsys):
    file = tmp_path / "tuned.json"
    name = dev.capabilities.reported["name"]
    file.write_text(json.dumps({"default": {kernel: {"*": {"items": FAR}}}}))
    monkeypatch.setenv(tuned.ENVIRONMENT, str(file))
    code, out, _ = run(capsys, "tune", "--op", kernel, "--shape", "70001,8", "--json")
    assert code == 0
    report = json.loads(out)
    assert (report["level"], report["key"], report["output"]) == ("device", name, str(file))
    best = {row["size"]: row["best"] for row in report["rows"]}
    assert best == {"*": {"items": 16}, "int4": {"items": 16}}
    content = tuned.read(file)
    assert content["default"] == {kernel: {"*": {"items": FAR}}}
    assert content["device"][name][kernel] == best
    device = pq.Device.from_queue(dev.queue)
    x = sample(MANY_ROWS, "bfloat16")
    plan = pq.kv.plan_for(device, x.shape, "bfloat16", "fp8_e4m3fn", force="row")
    items = 16 * dev.capabilities.reported["max_compute_units"]
    assert (plan.tuned, plan.blocks_per_team) == (f"{file}: device {name}", -(-MANY_ROWS[0] // items))
    codes, scales, _ = reference.quantize(x, "fp8_e4m3fn")
    got = pq.kv.quantize(device, x, "fp8_e4m3fn", force="row").get()
    assert (got.codes.tobytes(), got.scales.tobytes()) == (codes.tobytes(), scales.tobytes())


def test_the_command_begins_nothing_without_time(monkeypatch, tmp_path, capsys):
    file = tmp_path / "new" / "tuned.json"
    code, out, _ = run(capsys, "tune", "--op", "kv_quantize/base", "--seconds", "0", "-o", str(file))
    assert code == 1
    assert "no time for kv_quantize/base int4" in out
    assert tuned.read(file).keys() == {"device"}


def test_one_failure_leaves_the_others(dev, monkeypatch):
    def fails(device, task, quick):
        if task.size == "*":
            raise pq.UnsupportedDeviceError("device: expected another")
        return row_of(task.kernel, task.size, {}, {})

    monkeypatch.setattr(tune, "tune", fails)
    report = tune.run(dev, replace(SMALL, ops=("kv_quantize/base",)), lambda name: None)
    assert report.failed == {"kv_quantize/base *": "device: expected another"}
    assert [row.size for row in report.rows] == ["int4"]


def test_without_kernel_tuner_the_command_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tune, "find_spec", lambda name: None)
    code, _, err = run(capsys, "tune", "-o", str(tmp_path / "x.json"))
    assert (code, err) == (
        1,
        "pyclquant: tune: expected kernel-tuner to be installed, found none; pip install 'pyclquant[tune]'\n",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "gemm"], "expected one of kv, act_quant, gemv, kv_quantize, "),
        (["--op", "gemv/base"], "expected one of kv, act_quant, gemv, kv_quantize, "),
        (["--shape", "1,2"], "expected with --op: kv takes ROWS,DIM, the others N,K"),
        (["--op", "gemv/row", "--shape", "64,100"], "expected K a multiple of 128, got 100"),
        (["--rows", "0"], "expected 1 to 256, got '0'"),
        ([], "expected a file while PYCLQUANT_TUNED is off"),
    ],
)
def test_bad_usage(monkeypatch, capsys, arguments, message):
    monkeypatch.setenv("COLUMNS", "400")
    code, _, err = run(capsys, "tune", *arguments, *(["-o", "x.json"] if arguments else []))
    assert code == 2
    assert message in err


def test_the_probe_tells_which_file_served(dev, monkeypatch, tmp_path, capsys):
    file = tmp_path / "mine.json"
    entries = {
        f"kv_quantize/{row.name}": {"*": dict(tuned.find(dev.capabilities, f"kv_quantize/{row.name}").values)}
        for row in TABLES["kv"][0]
    }
    file.write_text(json.dumps({"default": entries}))
    monkeypatch.setenv(tuned.ENVIRONMENT, str(file))
    selector = dev.capabilities.reported["driver_version"]
    assert cli.app(["probe", "--json", "--device", selector], standalone_mode=False) is None
    used = json.loads(capsys.readouterr().out)["devices"][0]["used"]
    assert used["kv_quantize"]["tuned"] == f"{file}: default"
    assert used["kv_dequantize"]["tuned"].startswith("tuned.json: ")
    assert cli.app(["probe", "--device", selector], standalone_mode=False) is None
    out = capsys.readouterr().out
    assert "launch parameters of kv_quantize: " in out
    file.write_text("{")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, _, err = run(capsys, "probe", "--json", "--device", selector)
    assert (code, err.startswith(f"pyclquant: launch parameters left out: {file}: content: expected JSON")) == (0, True)
