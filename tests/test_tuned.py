"""Launch parameters: which entries a device gets, what a file may hold, and that a user's file wins."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import pyclquant as pq
from pyclquant import tuned
from pyclquant.capabilities import Capabilities
from pyclquant.variants import ACT, GEMV, KV, Blocks, Product, select

REPORTS = {p.stem: json.loads(p.read_text()) for p in sorted((Path(__file__).parent / "devices").glob("*.json"))}
ROWS = Product(rows=8, n=4096, k=4096)


def caps_of(name, *own, **extra):
    """A real device. own: what a user's file holds, for this device.  extra: queries that its dump does not show."""
    report = REPORTS[name]
    caps = Capabilities.from_report({**report, "extra": {**report["extra"], **extra}})
    contents = [tuned.parse(json.dumps(content), "own.json") for content in own]
    return replace(caps, tuned=tuple(layer for c in contents for layer in tuned.layers(c, caps.reported, "own.json")))


# ---- which entries ----


@pytest.mark.parametrize(
    ("name", "extra", "architecture", "vendor"),
    [
        ("nvidia-rtx2080ti", {"compute_capability": "7.5"}, "sm_75", "nvidia"),
        ("nvidia-h100-partial", {"compute_capability": "9.0"}, "sm_90", "nvidia"),
        ("nvidia-gtx1080-pascal", {}, None, "nvidia"),
        ("amd-gfx90a-mi250-partial", {}, "gfx90a", "amd"),
        ("amd-gfx1030-rx6800xt", {}, "gfx1030", "amd"),
        ("amd-apu-spectre-kaveri", {}, None, "amd"),
        ("intel-uhd-gen9-9b41", {}, None, "intel"),
        ("intel-cpu-i5-12400f", {}, "intel-256", "cpu"),
        ("intel-cpu-runtime-on-ryzen", {}, "intel-256", "cpu"),
        ("pocl-x86-64-cascadelake", {}, "pocl-512", "cpu"),
        ("pocl-aarch64-phytium", {}, "pocl-128", "cpu"),
        ("oclgrind-simulator", {}, "oclgrind-32", "cpu"),
        ("rusticl-adreno-fd643", {}, None, "qualcomm"),
        ("mali-g52-partial", {}, None, "arm"),
        ("vivante-phytium-ftg340", {}, None, None),
    ],
)
def test_keys_of_real_devices(name, extra, architecture, vendor):
    reported = caps_of(name, **extra).reported
    assert tuned.keys(reported) == {"device": reported["name"], "architecture": architecture, "vendor": vendor}


def test_a_device_that_reports_nothing_gets_the_default():
    caps = Capabilities({}, {})
    assert tuned.keys(caps.reported) == {"device": None, "architecture": None, "vendor": None}
    assert tuned.find(caps, "gemv/vector").source == "tuned.json: default"


def test_the_more_specific_level_wins_and_each_parameter_falls_back_by_itself():
    def entry(**values):
        return {"gemv/vector": {"*": values}}

    levels = {
        "device": {"NVIDIA GeForce RTX 2080 Ti": entry(tile_n=1), "another": entry(tile_n=16, wg=32)},
        "architecture": {"sm_75": entry(tile_n=2, wg=64), "sm_90": entry(tile_n=16, wg=32)},
        "vendor": {"nvidia": entry(tile_n=8, wg=128, spans=1, spread=1)},
    }
    want = [(1, 64), (2, 64), (8, 128), (4, 256)]  # the last is ours
    ours = tuned.shipped()["default"]["gemv/vector"]["*"]
    for n, (tile_n, wg) in enumerate(want):
        content = {level: levels[level] for level in tuned.LEVELS[n:-1]}
        found = tuned.find(caps_of("nvidia-rtx2080ti", content, compute_capability="7.5"), "gemv/vector")
        assert found.values == ours | {"tile_n": tile_n, "wg": wg}
    assert found.source == "tuned.json: default"
    both = tuned.find(caps_of("nvidia-rtx2080ti", {"vendor": levels["vendor"]}, {"default": entry(wg=32)}), "gemv/vector")
    assert (both.values, both.source) == (ours | {"tile_n": 8, "wg": 128}, "own.json: vendor nvidia")


def test_a_size_class_wins_over_any_size_of_its_level_alone():
    content = {"default": {"gemv/row": {"*": {"tile_n": 2, "items": 3}, "per_row 4": {"tile_n": 1}}}}
    caps = caps_of("pocl-x86-64-cascadelake", content, {"vendor": {"cpu": {"gemv/row": {"per_row 1": {"tile_n": 16}}}}})

    def of(size):
        return tuned.find(caps, "gemv/row", size).values

    assert of("per_row 4") == {"tile_n": 1, "items": 3, "item_bytes": 65536}
    assert of("per_row 1")["tile_n"] == of("block_128 4")["tile_n"] == 2  # the earlier layer, whatever its size class


def test_our_defaults_are_complete_and_known():
    default = tuned.shipped()["default"]
    assert default.keys() == tuned.PARAMETERS.keys()
    for kernel, parameters in tuned.PARAMETERS.items():
        assert default[kernel]["*"].keys() == parameters.keys()
    tables = {"kv_quantize": KV, "kv_dequantize": KV, "act_quant": ACT, "gemv": GEMV}
    variants = {f"{op}/{row.name}" for op, table in tables.items() for row in table}
    assert variants - tuned.PARAMETERS.keys() == {"gemv/base"}  # its work-group is the order of its sum
    assert tuned.PARAMETERS.keys() <= variants


def test_our_file_is_written_as_it_is_read():
    assert tuned.text_of(tuned.shipped()) == tuned.SHIPPED.read_text()


# ---- what a file may hold ----


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "content: expected an object, got []"),
        ({"defaults": {}}, "content: expected one of device, architecture, vendor, default, got 'defaults'"),
        ({"vendor": []}, "vendor: expected an object, got []"),
        ({"vendor": {"amd": 3}}, "vendor.amd: expected an object, got 3"),
        ({"default": {"about": 3}}, "default.about: expected a text, got 3"),
        ({"default": {"gemv/fast": {}}}, "default: expected one of kv_quantize/vector_shuffle, "),
        ({"default": {"gemv/row": {"per_row 3": {}}}}, "default.gemv/row: expected one of *, per_row 1, per_row 2, "),
        ({"default": {"gemv/row": {"*": []}}}, "default.gemv/row.*: expected an object, got []"),
        ({"default": {"gemv/mma": {"*": {"wg": 64}}}}, "default.gemv/mma.*: expected one of warps_k, "),
        ({"device": {"X": {"gemv/mma": {"*": {"warps_k": 3}}}}}, "device.X.gemv/mma.*.warps_k: expected one of 1, 4 (teams "),
        (
            {"default": {"kv_quantize/row": {"*": {"items": 0}}}},
            "default.kv_quantize/row.*.items: expected 1 to 4096 (work-items",
        ),
        ({"default": {"kv_quantize/base": {"*": {"wg": "64"}}}}, "default.kv_quantize/base.*.wg: expected one of 8, 16, "),
        ({"default": {"kv_quantize/vector": {"*": {"held": True}}}}, "default.kv_quantize/vector.*.held: expected one of 0, 1"),
    ],
)
def test_a_file_is_refused_by_its_name_and_the_key(content, message):
    with pytest.raises(pq.TunedError) as raised:
        tuned.parse(json.dumps(content), "mine.json")
    assert str(raised.value).startswith(f"mine.json: {message}")


def test_what_is_no_json_is_refused(tmp_path):
    file = tmp_path / "mine.json"
    for data in (b"{", b"\xff"):
        file.write_bytes(data)
        with pytest.raises(pq.TunedError, match=r"mine\.json: content: expected "):
            tuned.read(file)


# ---- plans ----


@pytest.mark.parametrize(
    ("table", "variant", "shape", "kernel", "values", "has"),
    [
        (KV, "vector", Blocks(128, 128, 4096, 2), "kv_quantize/vector", {"wg": 32, "vectors": 1}, {"wg": 32, "lanes": 16}),
        (KV, "vector", Blocks(4096, 4096, 8, 2), "kv_quantize/vector", {"lanes": 8}, {"lanes": 8}),
        (KV, "vector", Blocks(64, 64, 99, 2, 2, restore=True), "kv_dequantize/vector", {"vectors": 8}, {"lanes": 1}),
        (KV, "row", Blocks(128, 128, 4096, 2), "kv_quantize/row", {"items": 1}, {"blocks_per_team": 64}),
        (KV, "base", Blocks(128, 128, 4096, 2, restore=True), "kv_dequantize/base", {"wg": 8}, {"wg": 8, "lanes": 8}),
        (ACT, "vector", Blocks(4096, 4096, 8, 2), "act_quant/vector", {"wg": 64}, {"wg": 64, "lanes": 64}),
        (ACT, "row", Blocks(4096, 128, 4096, 2), "act_quant/row", {"items": 4}, {"blocks_per_team": 16}),
        (ACT, "base", Blocks(4096, 128, 256, 2), "act_quant/base", {"wg": 16}, {"wg": 16}),
        (GEMV, "vector", ROWS, "gemv/vector", {"wg": 64, "tile_n": 16}, {"wg": 64, "blocks_per_team": 16}),
        (GEMV, "row", ROWS, "gemv/row", {"tile_n": 16, "item_bytes": 1 << 17}, {"blocks_per_team": 16}),
    ],
)
def test_a_tuned_entry_changes_the_plan(table, variant, shape, kernel, values, has):
    name = "pocl-x86-64-cascadelake"
    content = {"architecture": {"pocl-512": {kernel: {"*": values} | dict.fromkeys(tuned.sizes(kernel), values)}}}
    before, after = (select(table, caps, shape, force=variant) for caps in (caps_of(name), caps_of(name, content)))
    assert {key: getattr(after, key) for key in has} == has
    assert {key: getattr(before, key) for key in has} != has
    assert after.tuned.startswith("own.json: architecture pocl-512")
    assert "own.json" not in before.tuned
    assert (after.vec, after.variant) == (before.vec, before.variant)


# ---- a user's file ----


def write(path, content):
    path.write_text(json.dumps(content))
    return path


SLOW = {"default": {"kv_quantize/row": {"*": {"items": 1}}}}


def test_a_users_file_is_found_and_wins(dev, monkeypatch, tmp_path):
    monkeypatch.setattr(tuned.platformdirs, "user_config_dir", lambda name, appauthor: str(tmp_path))
    monkeypatch.delenv(tuned.ENVIRONMENT, raising=False)
    reported = dev.capabilities.reported
    assert tuned.user_layers(reported) == ()
    file = write(tmp_path / "tuned.json", SLOW)
    assert tuned.user_layers(reported) == ((f"{file}: default", SLOW["default"]),)
    caps = pq.Device.from_queue(dev.queue).capabilities
    found = tuned.find(caps, "kv_quantize/row")
    assert (found.values, found.source) == ({"items": 1}, f"{file}: default")
    monkeypatch.setenv(tuned.ENVIRONMENT, "off")
    assert tuned.user_layers(reported) == ()
    other = write(tmp_path / "other.json", {"device": {reported["name"]: SLOW["default"], "another": {}}})
    monkeypatch.setenv(tuned.ENVIRONMENT, str(other))
    assert tuned.user_layers(reported) == ((f"{other}: device {reported['name']}", SLOW["default"]),)


@pytest.mark.parametrize("text", [None, "{", '{"default": {"kv_quantize/row": {"*": {"items": "many"}}}}'])
def test_a_broken_file_of_a_user_is_a_warning_that_names_it(dev, monkeypatch, tmp_path, text):
    file = tmp_path / "mine.json"
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv(tuned.ENVIRONMENT, str(file))
    with pytest.warns(RuntimeWarning, match=r"launch parameters left out: .*mine\.json: .*expected"):
        device = pq.Device.from_queue(dev.queue)
    assert device.capabilities.tuned == ()
