"""The probe: what works is measured, and nothing that a driver does ends more than a child process."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyopencl as cl
import pytest
from conftest import TABLES

from pyclquant import BuildError, icd, probe, program, quirks
from pyclquant.capabilities import Capabilities, Verdict
from pyclquant.device import capabilities, discover, report, verdict_key
from pyclquant.variants import ACT, GEMV, KV

REPORTS = [json.loads(p.read_text()) for p in (Path(__file__).parent / "devices").glob("*.json")]


@pytest.fixture
def found(dev):
    """The device under test as enumerated."""
    return next(f for f in discover().found if f.device == dev.queue.device)


@pytest.fixture
def child(tmp_path, monkeypatch):
    """Makes the probe's child a script: `child(body)`, where body runs once a feature called `name`."""

    def install(body):
        script = tmp_path / "child"
        script.write_text(
            f"#!{sys.executable}\n"
            "import json, os, sys, time\n"
            "def say(**message): print('" + probe.MARK + "' + json.dumps(message), flush=True)\n"
            "def done(ok=True): say(done=name, verdict={'ok': ok, 'reason': 'as asked'})\n"
            "for name in json.load(sys.stdin)['features']:\n"
            "    say(start=name)\n" + "".join(f"    {line}\n" for line in body.splitlines())
        )
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return install


# ---- the device under test ----


def test_every_feature_has_a_verdict_with_a_reason(dev):
    works = dev.capabilities.works
    assert set(works) == set(probe.FEATURES)
    assert all(verdict.reason.strip() for verdict in works.values())


def test_what_every_device_must_do_works(dev):
    for feature in ("base", "index64", "work_group", "local_memory", "half_load", "kv_base", "act_base", "gemv_base"):
        assert dev.capabilities.missing(feature) is None


def test_every_variant_has_a_known_answer():
    """By which the choice moves on where it is wrong."""
    answers = {row.answer for table in (KV, ACT, GEMV) for row in table}
    assert answers == {name for name in probe.FEATURES if name.startswith(("kv_", "act_", "gemv_"))}


def test_known_answers_come_last():
    """They are asked with the verdicts that decide the macros."""
    names = [name.startswith(("kv_", "act_", "gemv_")) for name in probe.FEATURES]
    assert names == sorted(names)


def test_a_real_child_answers_for_one_feature(found):
    works = {}
    request = {"platform": found.platform_index, "device": found.device_index, "reported": found.reported}
    guilty, how = probe.one_child({**request, "features": ["base"], "works": {}}, works, 60.0)
    assert works == {"base": Verdict(True, "right bits")}
    assert (guilty, how.split(":")[0]) == (None, "the process exited with 0")


def test_a_real_child_refuses_another_device_than_the_one_meant(found):
    reported = {**found.reported, "name": "another"}
    request = {"platform": found.platform_index, "device": found.device_index, "reported": reported}
    _, how = probe.one_child({**request, "features": ["base"], "works": {}}, {}, 60.0)
    assert how == f"the process exited with 1: expected device another, found {found.device.name}"


def test_wide_built_ins_of_pocl_3_0_abort_its_compiler(dev):
    """On CPUs with AVX-512 that driver dies on most built-ins of 16 elements; the probe survives and says so."""
    reported = dev.capabilities.reported
    avx512 = "avx512f" in Path("/proc/cpuinfo").read_text()
    if not (avx512 and reported["driver_version"].startswith("3.0") and "Portable" in reported["platform_name"]):
        pytest.skip("for PoCL 3.0 on a CPU with AVX-512")
    # killed the first time; after that the driver finds what it left in its own cache
    assert re.match("vector16: .*(killed by signal|INVALID_KERNEL_NAME)", dev.capabilities.missing("vector16"))
    assert dev.capabilities.ok("vector8")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("0x7f434343u", "0x43434343u"),
        ("0xc0800000u", "0x80800000u"),
        ("codes & 0x80808080u", "0u"),
        ("ALTERNATELY(8)", "ALTERNATELY(0)"),
    ],
    ids=["NaN", "subnormal", "sign", "order"],
)
def test_a_wrong_decoding_to_bfloat16_is_seen(dev, right, wrong, monkeypatch):
    if reason := dev.capabilities.missing("x86_bf16"):
        pytest.skip(reason)
    text = program.source("probe.cl")
    assert right in text
    bench = probe.Bench(dev.queue.device, dev.capabilities)
    assert probe.x86_bf16(bench).value == dev.capabilities.works["x86_bf16"].value
    monkeypatch.setattr(program, "source", lambda file: text.replace(right, wrong))
    assert probe.x86_bf16(bench).reason.startswith("decoded: expected")


def test_a_wrong_look_up_is_seen(dev, monkeypatch):
    if reason := dev.capabilities.missing("x86_bf16"):
        pytest.skip(reason)
    bench = probe.Bench(dev.queue.device, dev.capabilities)
    assert probe.x86_look_up(bench).ok
    text = program.source
    monkeypatch.setattr(program, "source", lambda file: text(file).replace("odd * 0x01010101u", "odd * 0x01010102u"))
    assert "expected" in probe.x86_look_up(bench).reason


class LocalMemory:
    """A device whose kernels get so many bytes, and one that fails beyond."""

    def __init__(self, vendor, reported, limit):
        self.caps = Capabilities({"vendor": vendor, "local_mem_size": reported}, {})
        self.limit = limit
        self.asked = []

    def run(self, name, inputs, outputs, macros):
        size = 4 * macros["WORDS"]
        self.asked.append(size)
        if size > self.limit:
            raise BuildError(f"{size} bytes are too many")
        values = (np.arange(size // 4, dtype=np.uint64) * 2654435761 & 0xFFFFFFFF).astype(np.uint32)
        return [np.array([np.bitwise_xor.reduce(values[31 - lid :: 32]) for lid in range(32)] * 2, np.uint32)]


@pytest.mark.parametrize(
    ("vendor", "reported", "limit", "asked", "value"),
    [
        ("NVIDIA Corporation", 49152, 227 << 10, [224 << 10], 224 << 10),
        ("NVIDIA Corporation", 49152, 163 << 10, [224 << 10, 160 << 10], 160 << 10),
        ("NVIDIA Corporation", 49152, 49152, [224 << 10, 160 << 10, 96 << 10, 49152], 49152),
        ("another", 65536, 1 << 20, [65536], 65536),
        ("another", 65536, 20000, [65536, 32768, 16384], 16384),
        ("another", 32768, 1000, [1 << n for n in range(15, 9, -1)], None),
    ],
)
def test_local_memory_beyond_what_is_reported_is_asked_of_nvidia_alone(vendor, reported, limit, asked, value):
    device = LocalMemory(vendor, reported, limit)
    verdict = probe.local_memory(device)
    assert (device.asked, verdict.value, verdict.ok) == (asked, value, value is not None)


def test_the_report_of_a_device_has_the_keys_of_the_collected_ones(dev):
    reported = report(dev.queue.device)
    for known in REPORTS:
        assert set(reported) <= set(known)
        assert set(reported["extra"]) - {"compute_capability"} <= set(known["extra"])  # no dump shows it
    json.dumps(reported)


@pytest.mark.oclgrind
def test_what_can_run_gives_the_known_answers(dev):
    """A variant that the probe refuses for its bits alone is skipped by every other test: a wrong kernel fails here."""
    for table, shape in TABLES.values():
        for row in table:
            if row.unsupported(dev.capabilities, shape) is None:
                assert dev.capabilities.missing(row.answer) is None


# ---- children that die ----


def test_a_feature_that_kills_or_hangs_its_child_gets_a_verdict_and_the_others_go_on(child):
    child("""
if name == "fma": os.abort()
if name == "divide": time.sleep(600)
if name == "subgroup": print("boom", file=sys.stderr); sys.exit(3)
print("a driver that talks"); done(ok=name != "half_load")
""")
    works = probe.run(0, 0, {}, seconds=2.0)
    assert list(works) == list(probe.FEATURES)
    assert works.pop("fma") == Verdict(False, "the process was killed by signal 6 (SIGABRT)")
    assert works.pop("divide") == Verdict(False, "took longer than 2 s, building or running")
    assert works.pop("subgroup") == Verdict(False, "the process exited with 3: boom")
    assert works.pop("half_load") == Verdict(False, "as asked")
    assert set(works.values()) == {Verdict(True, "as asked")}


def test_a_child_that_never_answers_leaves_nothing_that_works(child):
    child("sys.exit(1)")
    works = probe.run(0, 0, {}, seconds=10.0)
    assert set(works) == set(probe.FEATURES)
    assert {v.reason for v in works.values()} == {"the process exited with 1"}
    assert not any(v.ok for v in works.values())


def test_a_child_that_floods_its_streams_does_not_block(child):
    child("sys.stdout.write('x' * 1000000 + '\\n'); sys.stderr.write('y' * 1000000); done()")
    works = {}
    guilty, _ = probe.one_child({"features": ["base", "fma"]}, works, 20.0)
    assert guilty is None
    assert set(works) == {"base", "fma"}


def test_later_features_are_told_the_earlier_verdicts(child, tmp_path):
    child(f"""
if name == "fma": os.abort()
open({str(tmp_path / "seen")!r}, "a").write(name + " ")
done()
""")
    probe.run(0, 0, {}, seconds=10.0)
    assert (tmp_path / "seen").read_text().split() == [name for name in probe.FEATURES if name != "fma"]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (BuildError("first\n  x.cl:3: error: no such thing\nmore"), "x.cl:3: error: no such thing"),
        (BuildError("only line"), "only line"),
        (cl.Error(""), "Error"),
        (BuildError("e" * 1000), "e" * 200),
    ],
)
def test_the_telling_line_of_an_error(error, words):
    assert probe.describe(error) == words


# ---- verdicts on disk ----


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """An empty cache and a probe that only counts how often it ran."""
    runs = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(probe, "run", lambda *device: runs.append(device) or {"base": Verdict(True, "fine", 3, "-cl-std=CL3.0")})
    return runs


def test_verdicts_are_kept_and_fresh_ignores_them(found, counted):
    first = capabilities(found)
    assert capabilities(found) == first
    assert len(counted) == 1
    assert capabilities(found, fresh=True) == first
    assert len(counted) == 2


def test_verdicts_of_another_driver_version_are_not_used(found, counted):
    capabilities(found)
    capabilities(replace(found, reported={**found.reported, "driver_version": "next"}))
    assert len(counted) == 2
    assert verdict_key(found.reported) != verdict_key({**found.reported, "platform_name": "another"})


@pytest.mark.parametrize("text", ["", "{", "[]", '{"works": {"base": {}}}', '{"works": 3}'])
def test_an_unreadable_file_is_probed_again(found, counted, text):
    path = icd.cache_dir() / "probe" / f"{verdict_key(found.reported)}.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert capabilities(found).ok("base")
    assert len(counted) == 1


def test_a_cache_that_cannot_be_written_is_not_an_error(found, counted, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert capabilities(found).ok("base")
    assert capabilities(found).ok("base")
    assert len(counted) == 2


# ---- what the probe cannot see ----


def test_a_quirk_turns_a_feature_off_with_its_symptom():
    reported = {"platform_name": "Intel(R) OpenCL", "device_type": "cpu"}
    works = {"dot_khr": Verdict(True, "right bits"), "fma": Verdict(True, "right bits")}
    changed = quirks.apply(reported, works)
    assert not changed["dot_khr"].ok
    assert "slower" in changed["dot_khr"].reason
    assert changed["fma"] == works["fma"]
    assert quirks.apply({**reported, "device_type": "gpu"}, works) == works


# ---- the tests themselves ----


def test_a_session_without_a_device_fails():
    env = {**os.environ, "PYCLQUANT_DEVICE": "no such device"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", __file__]
    session = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert session.returncode == 1
    assert "expected one that matches 'no such device'" in session.stdout + session.stderr
