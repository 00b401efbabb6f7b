"""The device under test, and what the session runs on."""

import os
from pathlib import Path

import hypothesis
import pytest

from pyclquant import Device, NoDeviceError, bench, bench_peers, files, floor, tuned
from pyclquant.device import capabilities, discover
from pyclquant.variants import ACT, GEMV, KV, Blocks, Product, cannot, refusals

hypothesis.settings.register_profile("untimed", deadline=None)  # machines are busy, drivers compile
hypothesis.settings.load_profile("untimed")

USUAL = Blocks(dim=128, block=128, blocks=4096, itemsize=2)
"""Rows of 128 bfloat16: every variant that a device has can run on them."""

PROJECTION = Product(rows=8, n=1024, k=1024)
"""A weight of usual size: likewise."""

TABLES = {"kv": (KV, USUAL), "act_quant": (ACT, USUAL), "gemv": (GEMV, PROJECTION)}
"""The variants of each operation, and the shape that decides whether a device has them."""

picked: list[Device] = []
"""The device under test, once the session has begun."""


def pytest_sessionstart(session):
    """No device is a failure, never a reason to skip; whoever runs the tests may have tuned his own device."""
    os.environ[tuned.ENVIRONMENT] = "off"
    try:
        picked.append(Device.pick())
    except NoDeviceError as error:
        pytest.exit(str(error), returncode=1)


def header_of(op, caps):
    """Lines that tell which variants of an operation a device runs; `*` marks the one that it takes by itself."""
    table, shape = TABLES[op]
    refused = refusals(table, caps, shape)
    reasons = {row.name: cannot(row, caps, shape) for row in table}
    taken = next((name for name in reasons if name not in refused), None)
    runs = ", ".join(name + "*" * (name == taken) for name, reason in reasons.items() if reason is None)
    yield f"  {op} runs {runs or 'nothing'}"
    yield from (f"    not {name}: {reason}" for name, reason in reasons.items() if reason)


def pytest_report_header(config):
    """Every device, and which variants it runs."""
    lines = [f"device under test: {picked[0].name}"]
    discovery = discover()
    for found in discovery.found:
        caps = capabilities(found)
        lines.append(f"{found.label} ({found.reported['driver_version']}):")
        lines += [line for op in TABLES for line in header_of(op, caps)]
    return lines + list(discovery.notes)


@pytest.fixture(scope="session")
def dev():
    """The device under test: what `Device.pick()` takes, PYCLQUANT_DEVICE being honoured."""
    return picked[0]


def name_or_skip(dev, op, name):
    """The name of a variant, for `force`; skips one that this device cannot run, with the reason."""
    table, shape = TABLES[op]
    reason = cannot(next(row for row in table if row.name == name), dev.capabilities, shape)
    if reason:
        pytest.skip(f"{name} on {dev.name}: {reason}")
    return name


@pytest.fixture(params=[row.name for row in KV])
def variant(request, dev):
    """The name of each K/V variant that this device runs."""
    return name_or_skip(dev, "kv", request.param)


@pytest.fixture(params=[row.name for row in ACT])
def act_variant(request, dev):
    """The name of each variant of the W8A8 quantizers that this device runs."""
    return name_or_skip(dev, "act_quant", request.param)


@pytest.fixture(params=[row.name for row in GEMV])
def gemv_variant(request, dev):
    """The name of each variant of the W8A8 GEMV that this device runs."""
    return name_or_skip(dev, "gemv", request.param)


@pytest.fixture(scope="session")
def projections():
    """Rows of the projections of one layer of a real model: name -> bfloat16 [rows, K], K 512 or 1408."""
    sample = files.open_tensors(Path(__file__).parent / "data" / "w8a8_sample.safetensors")
    return {name.rsplit(".", 1)[1]: w for name, w in sample}


@pytest.fixture
def quick_bench(monkeypatch):
    """The bench takes every time once, searches no floor for long and finds no torch."""
    monkeypatch.setattr(floor, "SEARCH_SECONDS", 0.0)
    monkeypatch.setattr(floor, "STEPS", 4)
    monkeypatch.setattr(bench, "ROUNDS", 1)
    monkeypatch.setattr(bench_peers, "find_spec", lambda name: None)
