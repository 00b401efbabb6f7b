"""Drivers that hang or crash are left out; the others are used."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyopencl as cl
import pytest

from pyclquant import icd
from pyclquant.device import Discovery, candidates, discover
from pyclquant.errors import NoDeviceError
from pyclquant.icd import Icd

GOOD_FOLDER = Path(os.environ.get("OCL_ICD_VENDORS") or "/etc/OpenCL/vendors")
SECONDS = 5.0
"""Patience of the tests with a driver that hangs."""


@pytest.fixture
def vendors(tmp_path, monkeypatch):
    """A folder with copies of the session's .icd files that the loader would read, and an empty cache."""
    folder = tmp_path / "vendors"
    folder.mkdir()
    for path in GOOD_FOLDER.glob("*.icd"):
        shutil.copy(path, folder)
    monkeypatch.setenv("OCL_ICD_VENDORS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(icd, "_prepared", None)
    check = icd.check
    monkeypatch.setattr(icd, "check", lambda drivers, seconds=SECONDS: check(drivers, seconds))
    return folder


@pytest.fixture
def hangs(vendors):
    """A driver whose library is a FIFO: opening it blocks."""
    os.mkfifo(vendors / "hangs.so")
    (vendors / "hangs.icd").write_text(f"{vendors}/hangs.so\n")
    return Icd("hangs.icd", f"{vendors}/hangs.so", str(vendors))


@pytest.fixture
def crashes(vendors):
    """A driver whose library is cut off in the middle: the loader of shared libraries dies on it."""
    library = Path(sys.modules[np.__name__]._core._multiarray_umath.__file__).read_bytes()
    (vendors / "crashes.so").write_bytes(library[: len(library) // 2])
    (vendors / "crashes.icd").write_text(f"{vendors}/crashes.so\n")
    return Icd("crashes.icd", f"{vendors}/crashes.so", str(vendors))


# ---- broken drivers ----


def test_a_driver_that_hangs_is_named_within_the_time_limit(hangs):
    assert icd.check([hangs], 1.0) == "did not list its devices within 1 s"


def test_a_driver_that_crashes_is_named_with_its_signal(crashes):
    assert icd.check([crashes]).startswith("killed by signal 7 (SIGBUS)")


def test_prepare_leaves_broken_drivers_out_and_keeps_the_others(vendors, hangs, crashes):
    before = {d.name for d in icd.system_drivers()}
    prepared = icd.prepare()
    assert prepared.broken == {
        "hangs.icd": f"{hangs.library}: did not list its devices within {SECONDS:g} s",
        "crashes.icd": f"{crashes.library}: {icd.check([crashes])}",
    }
    folder = Path(os.environ["OCL_ICD_VENDORS"])
    assert folder != vendors
    assert {p.name for p in folder.iterdir()} == {d.name for d in prepared.drivers}
    assert before - set(prepared.broken) <= {d.name for d in prepared.drivers}


def test_devices_of_the_other_drivers_are_found_beside_broken_ones(dev, vendors, hangs, crashes):
    """The whole way, in a process of its own whose loader has not been used yet."""
    script = f"""
import json
from pyclquant import icd
from pyclquant.device import discover
check = icd.check
icd.check = lambda drivers: check(drivers, {SECONDS})
found = discover()
print(json.dumps([[f.reported["name"] for f in found.found], found.notes]))
"""
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    names, notes = json.loads(child.stdout.splitlines()[-1])
    assert dev.capabilities.reported["name"] in names
    assert f"driver left out: {hangs.library}: did not list its devices within {SECONDS:g} s" in notes
    assert any(note.startswith(f"driver left out: {crashes.library}: killed by signal") for note in notes)


# ---- the verdict on disk ----


def test_the_verdict_is_kept_and_fresh_ignores_it(crashes, monkeypatch):
    asked = []
    monkeypatch.setattr(icd, "check", lambda drivers: asked.append(drivers) or "broken")
    first = icd.find_broken([crashes])
    assert first == {"crashes.icd": f"{crashes.library}: broken"}
    count = len(asked)
    assert icd.find_broken([crashes]) == first
    assert len(asked) == count
    assert icd.find_broken([crashes], fresh=True) == first
    assert len(asked) == 2 * count


def test_the_verdict_is_not_used_for_a_changed_library(crashes):
    before = icd.fingerprint([crashes])
    with Path(crashes.library).open("ab") as library:
        library.write(b"mended")
    assert icd.fingerprint([crashes]) != before


def test_an_unreadable_verdict_is_made_again(crashes, monkeypatch):
    monkeypatch.setattr(icd, "check", lambda drivers: "broken")
    path = icd.cache_dir() / "drivers" / f"{icd.fingerprint([crashes])}.json"
    path.parent.mkdir(parents=True)
    for text in ("{", "[1]", ""):
        path.write_text(text)
        assert "crashes.icd" in icd.find_broken([crashes])
        assert "crashes.icd" in json.loads(path.read_text())


def test_a_cache_that_cannot_be_written_is_not_an_error(vendors, crashes, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # a folder below a file cannot be made, even by root
    prepared = icd.prepare()
    assert set(prepared.broken) == {"crashes.icd"}
    assert {p.name for p in Path(os.environ["OCL_ICD_VENDORS"]).iterdir()} == {d.name for d in prepared.drivers}


# ---- what is there ----


def test_system_drivers_are_the_first_lines_of_the_icd_files(vendors):
    have = {d.name for d in icd.system_drivers()}
    (vendors / "one.icd").write_text("libone.so\nsecond line\n")
    (vendors / "empty.icd").write_text("\n")
    (vendors / "note.txt").write_text("libnote.so\n")
    drivers = {d.name: d.library for d in icd.system_drivers()}
    assert set(drivers) == have | {"one.icd"}
    assert drivers["one.icd"] == "libone.so"


def test_no_folder_is_no_driver(monkeypatch, tmp_path):
    monkeypatch.setenv("OCL_ICD_VENDORS", str(tmp_path / "absent"))
    assert icd.system_drivers() == []


def test_the_intel_wheel_is_found_only_where_it_is_installed(monkeypatch, tmp_path):
    library = tmp_path / "libintelocl.so"
    library.touch()

    class File:
        name = "libintelocl.so"

        def locate(self):
            return library

    monkeypatch.setattr(importlib.metadata, "files", lambda name: [File()])
    assert [d.library for d in icd.wheel_drivers()] == [str(library)]
    library.unlink()
    assert icd.wheel_drivers() == []

    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    assert icd.wheel_drivers() == []


def test_without_wheels_and_broken_drivers_the_environment_is_left_alone(vendors, monkeypatch):
    monkeypatch.setattr(icd, "wheel_drivers", list)
    icd.prepare()
    assert os.environ["OCL_ICD_VENDORS"] == str(vendors)


def test_platforms_without_a_device_are_noted(monkeypatch):
    class Empty:
        name = "Empty"

        def get_devices(self):
            return []

    class Refuses(Empty):
        name = "Refuses"

        def get_devices(self):
            raise cl.Error("DEVICE_NOT_FOUND")

    monkeypatch.setattr(cl, "get_platforms", lambda: [Empty(), Refuses()])
    discovery = discover()
    assert discovery.found == ()
    assert "platform 0 (Empty): no device (it lists none)" in discovery.notes
    assert "platform 1 (Refuses): no device (DEVICE_NOT_FOUND)" in discovery.notes
    with pytest.raises(
        NoDeviceError, match=r"found none; searched OCL_ICD_VENDORS=.*platform 0 \(Empty\): no device.*pip install"
    ):
        candidates(discovery, None)


def test_a_selector_that_matches_nothing_lists_what_there_is(dev):
    discovery = Discovery(discover().found, ("a note",))
    with pytest.raises(NoDeviceError, match=r"expected one that matches 'no such', found 0:0 .*; a note"):
        candidates(discovery, "no such")


def test_exits_are_described_in_words():
    assert icd.describe_exit(3, b"first\nlast line\n") == "exited with 3: last line"
    assert icd.describe_exit(-6, b"") == "killed by signal 6 (SIGABRT)"
    assert icd.describe_exit(-200, b"x") == "killed by signal 200 (unknown): x"
