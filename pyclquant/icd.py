"""Which OpenCL drivers this process loads: the system's, those in Python wheels, less the broken ones.

An OpenCL loader opens every installed driver at the first platform query; one that crashes or hangs
there takes the process with it. `prepare()` is called before that query. It loads all drivers in a
child process first; when the child does not come back it tries them one at a time, and points
OCL_ICD_VENDORS to a folder of those that answered. The verdict is kept on disk.

It also makes the drivers of wheels usable without root: Intel's CPU runtime (`intel-opencl-rt`)
needs its libraries loaded and an .icd file; PoCL's wheel is found by pyopencl's own loader.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import platformdirs

CHECK_SECONDS = 60.0
"""How long a driver may take to list its devices."""

INTEL_LIBRARIES = ("libintlc.so.5", "libirng.so", "libsvml.so", "libimf.so", "libtbb.so.12", "libcommon_clang.so")
"""What libintelocl.so needs from its own folder, in the order of loading."""


@dataclass(frozen=True)
class Icd:
    """One driver: the name of its .icd file, the library named there, and where it was found."""

    name: str
    library: str
    source: str


@dataclass(frozen=True)
class Prepared:
    """What `prepare` did. broken: name of each driver left out -> why."""

    drivers: tuple[Icd, ...]
    broken: dict[str, str]


_prepared: Prepared | None = None


def cache_dir() -> Path:
    """Folder of what pyclquant keeps between runs (verdicts about drivers and devices)."""
    return Path(platformdirs.user_cache_dir("pyclquant", appauthor=False))


def system_drivers() -> list[Icd]:
    """Drivers that the loader would find by itself: OCL_ICD_VENDORS if it is a folder, else /etc/OpenCL/vendors."""
    folder = Path(os.environ.get("OCL_ICD_VENDORS") or "/etc/OpenCL/vendors")
    if not folder.is_dir():
        return []
    return [
        Icd(p.name, line.strip(), str(folder))
        for p in sorted(folder.glob("*.icd"))
        if (line := p.read_text(errors="replace").partition("\n")[0]).strip()
    ]


def wheel_drivers() -> list[Icd]:
    """Intel's CPU runtime, when its wheels are installed in this environment."""
    try:
        files = importlib.metadata.files("intel-opencl-rt") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = [Path(str(f.locate())).resolve() for f in files if f.name == "libintelocl.so"]
    return [Icd("pyclquant-intel-cpu.icd", str(p), "wheel intel-opencl-rt") for p in found if p.exists()]


def preload(driver: Icd) -> None:
    """Load what a wheel's driver needs beside it; the loader would look in system folders only."""
    folder = Path(driver.library).parent
    for library in INTEL_LIBRARIES:
        path = folder / library
        if path.exists():
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def write_folder(drivers: list[Icd], folder: Path) -> Path:
    """A folder of .icd files that name these drivers."""
    folder.mkdir(parents=True, exist_ok=True)
    for d in drivers:
        target = folder / d.name
        if not target.exists() or target.read_text() != d.library + "\n":
            with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".tmp", delete=False) as f:
                f.write(d.library + "\n")
            Path(f.name).replace(target)
    return folder


def check(drivers: list[Icd], seconds: float = CHECK_SECONDS) -> str | None:
    """Load these drivers and list their devices in a child process: None, or what went wrong."""
    with tempfile.TemporaryDirectory(prefix="pyclquant-icd-") as folder:
        env = dict(os.environ, OCL_ICD_VENDORS=str(write_folder(drivers, Path(folder))))
        wheels = [d.library for d in drivers if d.source.startswith("wheel")]
        try:
            child = subprocess.run(
                [sys.executable, "-m", "pyclquant.icd", *wheels],
                env=env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"did not list its devices within {seconds:g} s"
    return None if child.returncode == 0 else describe_exit(child.returncode, child.stderr)


def describe_exit(returncode: int, stderr: bytes) -> str:
    """How a child process ended, in words, with the last line that it wrote."""
    lines = stderr.decode(errors="replace").strip().splitlines()
    last = f": {lines[-1].strip()[:200]}" if lines else ""
    if returncode >= 0:
        return f"exited with {returncode}{last}"
    import signal

    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = "unknown"
    return f"killed by signal {-returncode} ({name}){last}"


def fingerprint(drivers: list[Icd]) -> str:
    """Changes when a driver file does: names, libraries, their sizes and times, pyopencl's version."""
    rows: list[object] = [importlib.metadata.version("pyopencl"), sys.prefix]
    for d in drivers:
        path = Path(d.library)
        stat = path.stat() if path.is_absolute() and path.is_file() else None
        rows.append([d.name, d.library, [stat.st_size, stat.st_mtime] if stat else None])
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:24]


def find_broken(drivers: list[Icd], fresh: bool = False) -> dict[str, str]:
    """Drivers that do not survive listing their devices, with the reason; cached by `fingerprint`."""
    path = cache_dir() / "drivers" / f"{fingerprint(drivers)}.json"
    if not fresh:
        try:
            cached = json.loads(path.read_text())
            return {str(k): str(v) for k, v in cached.items()}
        except (OSError, ValueError, AttributeError):
            pass
    broken: dict[str, str] = {}
    if check(drivers) is not None:
        broken = {d.name: f"{d.library}: {why}" for d in drivers if (why := check([d])) is not None}
    write_cache(path, broken)
    return broken


def write_cache(path: Path, content: object) -> None:
    """Write JSON beside `path`, then rename; a cache that cannot be written is not an error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as f:
            json.dump(content, f, indent=1)
        Path(f.name).replace(path)
    except OSError:
        pass


def prepare(fresh: bool = False) -> Prepared:
    """Decide, once a process, which drivers the loader sees. Sets OCL_ICD_VENDORS when that differs
    from what it would find by itself. fresh: ignore the cached verdict.
    """
    global _prepared
    if _prepared is not None:
        return _prepared
    wheels = wheel_drivers()
    have = {os.path.realpath(d.library) for d in system_drivers()}
    drivers = system_drivers() + [w for w in wheels if os.path.realpath(w.library) not in have]
    broken = find_broken(drivers, fresh) if drivers else {}
    kept = [d for d in drivers if d.name not in broken]
    for d in kept:
        if d.library in {w.library for w in wheels}:
            preload(d)
    if len(kept) != len(system_drivers()) or broken:
        folder = cache_dir() / "vendors" / fingerprint(kept)
        try:
            write_folder(kept, folder)
        except OSError:
            folder = write_folder(kept, Path(tempfile.mkdtemp(prefix="pyclquant-icd-")))
        os.environ["OCL_ICD_VENDORS"] = str(folder)
    _prepared = Prepared(tuple(kept), broken)
    return _prepared


def _child(wheel_libraries: list[str]) -> None:
    for library in wheel_libraries:
        preload(Icd("", library, "wheel"))
    import pyopencl as cl

    try:
        platforms = cl.get_platforms()
    except cl.Error:
        return  # no platform: nothing that could be broken
    for platform in platforms:
        with contextlib.suppress(cl.Error):
            platform.get_devices()


if __name__ == "__main__":
    _child(sys.argv[1:])
