"""The device under test, and what the session runs on."""

import hypothesis
import pytest

from pyclquant import Device, NoDeviceError
from pyclquant.device import capabilities, discover
from pyclquant.variants import KV, Blocks, cannot, refusals

hypothesis.settings.register_profile("untimed", deadline=None)  # machines are busy, drivers compile
hypothesis.settings.load_profile("untimed")

USUAL = Blocks(dim=128, block=128, blocks=4096, itemsize=2)
"""Rows of 128 bfloat16: every variant that a device has can run on them."""

picked: list[Device] = []
"""The device under test, once the session has begun."""


def pytest_sessionstart(session):
    """No device is a failure, never a reason to skip."""
    try:
        picked.append(Device.pick())
    except NoDeviceError as error:
        pytest.exit(str(error), returncode=1)


def pytest_report_header(config):
    """Every device, and which variants it runs; `*` marks the one that it takes by itself."""
    lines = [f"device under test: {picked[0].name}"]
    discovery = discover()
    for found in discovery.found:
        caps = capabilities(found)
        refused = refusals(KV, caps, USUAL)
        reasons = {row.name: cannot(row, caps, USUAL) for row in KV}
        taken = next((name for name in reasons if name not in refused), None)
        runs = ", ".join(name + "*" * (name == taken) for name, reason in reasons.items() if reason is None)
        lines.append(f"{found.label} ({found.reported['driver_version']}): runs {runs or 'nothing'}")
        lines += [f"  not {name}: {reason}" for name, reason in reasons.items() if reason]
    return lines + list(discovery.notes)


@pytest.fixture(scope="session")
def dev():
    """The device under test: what `Device.pick()` takes, PYCLQUANT_DEVICE being honoured."""
    return picked[0]


@pytest.fixture(params=[row.name for row in KV])
def variant(request, dev):
    """The name of each K/V variant, for `force`; skips those that this device cannot run, with the reason."""
    row = next(row for row in KV if row.name == request.param)
    reason = cannot(row, dev.capabilities, USUAL)
    if reason:
        pytest.skip(f"{row.name} on {dev.name}: {reason}")
    return row.name
