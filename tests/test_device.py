"""Choosing a device, what is reported of it, and how its verdicts are kept."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyopencl as cl
import pytest

import pyclquant as pq
from pyclquant import device, icd, probe, quirks
from pyclquant.capabilities import Capabilities, Verdict
from pyclquant.device import Discovery, Found, candidates, matches, preference
from pyclquant.variants import ACT, GEMV, KV, Blocks, Product, select

FIXTURE = json.loads((Path(__file__).parent / "devices" / "nvidia-rtx2080ti.json").read_text())


def found(platform=0, number=0, **reported):
    base = {
        "platform_name": "NVIDIA CUDA",
        "platform_version": "OpenCL 3.0 CUDA",
        "name": "NVIDIA H200",
        "vendor": "NVIDIA Corporation",
        "driver_version": "580.1",
        "device_type": "gpu",
        "global_mem_size": 1 << 37,
        "extra": {"host_unified_memory": False},
    }
    return Found(platform, number, None, base | reported)


CPU = found(1, platform_name="Portable Computing Language", name="pthread", vendor="AuthenticAMD", device_type="cpu")
IGPU = found(
    2,
    platform_name="Intel OpenCL",
    name="Intel(R) UHD Graphics",
    vendor="Intel",
    extra={"host_unified_memory": True},
    global_mem_size=1 << 38,
)
SMALL = found(3, name="NVIDIA T4", global_mem_size=1 << 34)
BIG = found(4)


def test_order_of_preference():
    order = sorted([CPU, IGPU, SMALL, BIG], key=preference)
    assert order == [BIG, SMALL, IGPU, CPU]


@pytest.mark.parametrize(
    ("selector", "chosen"),
    [
        ("nvidia", [SMALL, BIG]),
        ("h200", [BIG]),
        ("cpu", [CPU]),
        ("gpu", [IGPU, SMALL, BIG]),
        ("PORTABLE", [CPU]),
        ("4:0", [BIG]),
        ("4:1", []),
        ("580.1", [CPU, IGPU, SMALL, BIG]),
    ],
)
def test_selectors(selector, chosen):
    assert [f for f in (CPU, IGPU, SMALL, BIG) if matches(f, selector)] == chosen


def test_an_unknown_device_is_named_with_those_that_exist():
    with pytest.raises(pq.NoDeviceError, match=r"matches 'radeon', found 1:0 Portable Computing Language / pthread; broken one"):
        candidates(Discovery((CPU,), ("broken one",)), "radeon")


def test_no_device_at_all_tells_what_was_searched_and_what_to_install():
    with pytest.raises(
        pq.NoDeviceError, match=r"found none; searched OCL_ICD_VENDORS=.*pip install 'pyclquant\[pocl\]'.*apt-get"
    ):
        candidates(Discovery((), ()), None)


def test_a_device_on_which_nothing_runs_is_passed_over(monkeypatch):
    broken = Capabilities(CPU.reported, {"base": Verdict(False, "wrong bits")})
    monkeypatch.delenv("PYCLQUANT_DEVICE", raising=False)
    monkeypatch.setattr(device, "discover", lambda fresh=False: Discovery((CPU,), ()))
    monkeypatch.setattr(device, "capabilities", lambda found, fresh=False: broken)
    with pytest.raises(pq.NoDeviceError, match=r"expected one that runs a kernel, got 1:0 .*base: wrong bits"):
        pq.Device.pick()


def test_the_environment_selects(monkeypatch, dev):
    monkeypatch.setenv("PYCLQUANT_DEVICE", "no such device")
    with pytest.raises(pq.NoDeviceError, match="matches 'no such device'"):
        pq.Device.pick()
    reported = dev.capabilities.reported
    assert pq.Device.pick(reported["driver_version"]).name == dev.name


def test_a_report_has_the_keys_of_the_fixtures(dev):
    reported = device.report(dev.queue.device)
    unknown = set(reported) - set(FIXTURE)
    assert unknown == set()
    assert set(reported["extra"]) - set(FIXTURE["extra"]) == {"compute_capability"}
    assert reported["device_type"] in ("cpu", "gpu", "accelerator")
    assert reported["name"]
    assert reported["max_work_group_size"] >= 1


def test_a_compute_capability_is_a_version():
    assert device.compute_capability(SimpleNamespace(compute_capability_major_nv=9, compute_capability_minor_nv=0)) == "9.0"


def test_a_query_that_the_driver_refuses_is_unknown():
    def refuse():
        raise cl.LogicError("clGetDeviceInfo failed: INVALID_VALUE")

    assert device.ask(refuse) is None
    assert device.ask(lambda: 3) == 3


def test_verdicts_are_kept_and_fresh_ignores_them(monkeypatch, tmp_path):
    calls = []
    found_cpu = found(1, device_version="OpenCL 3.0", max_compute_units=2, device_type="cpu")

    def run(platform, number, reported):
        calls.append((platform, number))
        return {"base": Verdict(True, "right bits"), "work_group": Verdict(True, "seen", value=64)}

    monkeypatch.setattr(icd, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(probe, "run", run)
    first = device.capabilities(found_cpu)
    again = device.capabilities(found_cpu)
    assert calls == [(1, 0)]
    assert first.works == again.works
    assert again.max_work_group_size == 64
    device.capabilities(found_cpu, fresh=True)
    assert len(calls) == 2
    (file,) = tmp_path.glob("probe/*.json")
    file.write_text("{not json")
    assert device.capabilities(found_cpu).works == first.works
    assert len(calls) == 3


def test_a_new_driver_has_a_new_key():
    old = found(device_version="OpenCL 3.0", max_compute_units=2)
    new = found(device_version="OpenCL 3.0", max_compute_units=2, driver_version="581")
    assert device.verdict_key(old.reported) != device.verdict_key(new.reported)


def test_quirks_turn_off_only_where_they_match():
    works = {"dot_khr": Verdict(True, "right bits"), "fma": Verdict(True, "exact")}
    intel = {"platform_name": "Intel(R) OpenCL", "device_type": "cpu"}
    assert quirks.apply({**intel, "device_type": "gpu"}, works) == works
    turned = quirks.apply(intel, works)
    assert not turned["dot_khr"].ok
    assert "slower" in turned["dot_khr"].reason
    assert turned["fma"].ok
    for quirk in quirks.QUIRKS:
        assert quirk.symptom
        assert quirk.link


def test_a_device_of_no_platform_is_refused(monkeypatch, dev):
    monkeypatch.setattr(device, "discover", lambda fresh=False: Discovery((), ()))
    with pytest.raises(pq.NoDeviceError, match="queue: expected a device of this machine's platforms"):
        pq.Device.from_queue(dev.queue)


def test_profiling_queues(dev):
    timed = pq.Device.pick(dev.capabilities.reported["driver_version"], profiling=True)
    q = pq.kv.quantize(timed, np.ones((4, 64), np.float32), "int8")
    q.events[-1].wait()
    assert q.events[-1].profile.end >= q.events[-1].profile.start


def test_a_plan_is_that_of_the_table_and_remembered(dev):
    shapes = [
        (KV, Blocks(128, 128, 64, 2)),
        (KV, Blocks(64, 64, 64, 2)),
        (ACT, Blocks(128, 128, 64, 2)),
        (GEMV, Product(3, 64, 128)),
    ]
    for table, shape in shapes:
        for force in (None, "base"):
            plan = dev.plan(table, shape, force)
            assert plan == select(table, dev.capabilities, shape, force)
            assert dev.plan(table, shape, force) is plan
    for _ in range(2):
        with pytest.raises(pq.UnsupportedDeviceError, match="got 'fast'"):
            dev.plan(*shapes[0], "fast")
