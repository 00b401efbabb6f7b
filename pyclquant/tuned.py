"""Launch parameters of the kernels for each device: `tuned.json`, and a user's own file, which wins.

A file is JSON of four levels, the most specific first: `device`, `architecture` and `vendor`, each key -> entries, and `default`,
entries alone. Entries: "op/variant" -> size class -> parameter -> value; size class `*` is any other; `about` may tell where
they come from. Each parameter is looked up by itself: in the user's file, then in ours; from the device's name to the default;
its size class before `*`. `pyclquant tune` writes a user's file, `tools/tune.py` ours.

No parameter here changes a bit of a result, so that any may differ between sizes and devices. What changes the order of a sum is
not here: VEC and LANES of the GEMVs, WG of `base`. They are part of what a variant is: a row of activations has the same bits
whatever the number of rows, and on two devices of a kind.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import platformdirs

from pyclquant.capabilities import Capabilities, Entries
from pyclquant.errors import TunedError

ENVIRONMENT = "PYCLQUANT_TUNED"
"""Environment variable with the user's file; `off` for none."""

SHIPPED = Path(__file__).resolve().with_name("tuned.json")
"""Our own file."""

LEVELS = ("device", "architecture", "vendor", "default")
ANY = "*"
"""The size class of every size."""
ABOUT = "about"


@dataclass(frozen=True)
class Parameter:
    """A launch parameter. meaning: for people.  values: those that the kernels take."""

    meaning: str
    values: Sequence[int]

    @property
    def expected(self) -> str:
        """The values in words."""
        v = self.values
        return f"{v.start} to {v.stop - 1}" if isinstance(v, range) else f"one of {', '.join(map(str, v))}"


WG = Parameter("work-items of a work-group, fewer where the device takes no more", (8, 16, 32, 64, 128, 256))
ITEMS = Parameter("work-items for each core", range(1, 4097))
VECTORS = Parameter("vectors of a block that a lane takes", (1, 2, 4, 8, 16))
LANES = Parameter("most lanes of a team", (8, 16, 32, 64, 128, 256))
HELD = Parameter("whether a lane holds its vectors in registers between finding a scale and dividing by it", (0, 1))
MOST_HELD = Parameter("most vectors that a lane holds in registers between finding a scale and dividing by it", range(33))
TILE_N = Parameter("rows of weights taken together", (1, 2, 4, 8, 16))
ITEM_BYTES = Parameter("bytes of weights that a work-item walks", range(1 << 10, 1 << 27))

SIDE_BY_SIDE = {"wg": WG, "lanes": LANES, "vectors": VECTORS, "held": HELD}
KV_PARAMETERS = {"vector_shuffle": SIDE_BY_SIDE, "vector": SIDE_BY_SIDE, "row": {"items": ITEMS}, "base": {"wg": WG}}
PARAMETERS: dict[str, dict[str, Parameter]] = {
    **{f"{op}/{variant}": p for op in ("kv_quantize", "kv_dequantize") for variant, p in KV_PARAMETERS.items()},
    "act_quant/vector": {"wg": Parameter(WG.meaning, (*WG.values, 512, 1024)), "most_held": MOST_HELD},
    "act_quant/row": {"items": ITEMS, "most_held": MOST_HELD},
    "act_quant/base": {"wg": WG},
    "gemv/mma": {
        "warps_k": Parameter("teams of a work-group, each with a part of K", (1, 4)),
        "warps_n": Parameter("warps of a team side by side in N", (1, 2, 4, 8)),
        "warps_m": Parameter("warps of a team side by side in M", (1, 2, 4)),
        "tiles_n": Parameter("times 16 rows of weights of a warp", (1, 2)),
        "stages": Parameter("chunks of a team in local memory, fewer where they do not fit", range(2, 9)),
    },
    "gemv/vector": {
        "wg": Parameter(WG.meaning, (32, 64, 128, 256)),
        "tile_n": TILE_N,
        "spans": Parameter("times 512 columns whose activations are decoded at once, fewer where they do not fit", (1, 2, 4, 8)),
        "spread": Parameter("teams that share their sub-groups", (1, 2, 4)),
    },
    **{f"gemv/{variant}": {"tile_n": TILE_N, "item_bytes": ITEM_BYTES, "items": ITEMS} for variant in ("row_bf16", "row")},
}
"""op/variant -> parameters, all of which an entry of `default` has."""

LAYOUTS = ("per_row", "block_128")
MANY = "many"
"""Ends the size class of a weight of many rows, which falls back on the class without it; see `variants.mma_size`."""
MANY_OR_NOT = ("", f" {MANY}")
SIZES: dict[str, tuple[str, ...]] = {
    "kv_quantize": ("int4",),
    "kv_dequantize": ("int4",),
    "act_quant": ("block_128",),
    "gemv/mma": tuple(f"{layout} {rows}{many}" for layout in LAYOUTS for rows in (8, 16, 32, 64, 128) for many in MANY_OR_NOT),
    "gemv/vector": tuple(f"{layout} {rows}" for layout in LAYOUTS for rows in (1, 2, 4, 8)),
    "gemv/row_bf16": tuple(f"{layout} {rows}" for layout in LAYOUTS for rows in (1, 2, 4)),
    "gemv/row": tuple(f"{layout} {rows}" for layout in LAYOUTS for rows in (1, 2, 4, 8)),
}
"""op, or op/variant -> size classes beside `*`: two codes a byte; tiles of 128; scale layout, TILE_M and MANY."""


def sizes(kernel: str) -> tuple[str, ...]:
    """Size classes of an op/variant, `*` first."""
    return ANY, *(SIZES.get(kernel) or SIZES[kernel.partition("/")[0]])


# ---- which entries are for a device ----

CPU_DRIVERS = {"Portable Computing Language": "pocl", "Intel(R) OpenCL": "intel", "rusticl": "rusticl", "Oclgrind": "oclgrind"}
"""Platform -> driver, of CPUs."""
VENDORS = {
    "nvidia": "nvidia",
    "intel": "intel",
    "advanced micro devices": "amd",
    "amd": "amd",
    "qualcomm": "qualcomm",
    "arm": "arm",
}
"""How the vendor's name begins -> vendor, of other devices than CPUs."""


def architecture(reported: Mapping[str, Any]) -> str | None:
    """sm_90, gfx90a, or of a CPU the driver and the bits of its vectors (pocl-512); None when the report does not tell.

    Intel's GPUs are told apart by their names: pyopencl does not hand out their architecture.
    """
    extra = reported.get("extra") or {}
    if reported.get("device_type") == "cpu":
        driver = CPU_DRIVERS.get(str(reported.get("platform_name")))
        lanes = (reported.get("native_vector_width") or {}).get("float")
        return f"{driver}-{32 * lanes}" if driver and lanes else None
    if capability := extra.get("compute_capability"):
        return "sm_" + str(capability).replace(".", "")
    gfx = re.match(r"gfx[0-9a-f]+", str(reported.get("name")))
    return gfx[0] if gfx else None


def vendor(reported: Mapping[str, Any]) -> str | None:
    """nvidia, intel, amd, qualcomm, arm or, whoever made it, cpu; None for others."""
    if reported.get("device_type") == "cpu":
        return "cpu"
    name = str(reported.get("vendor")).lower()
    return next((v for start, v in VENDORS.items() if name.startswith(start)), None)


def keys(reported: Mapping[str, Any]) -> dict[str, str | None]:
    """Level -> key of a device, but of the default."""
    name = str(reported["name"]) if reported.get("name") else None
    return {"device": name, "architecture": architecture(reported), "vendor": vendor(reported)}


# ---- files ----


def parse(text: str, file: object) -> dict[str, Any]:
    """The content of a file, checked. Raises TunedError with the file and the key of what is wrong."""

    def refuse(where: str, expected: str, got: object) -> TunedError:
        return TunedError(f"{file}: {where}: expected {expected}, got {got!r}")

    def table(value: object, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise refuse(where, "an object", value)
        return value

    def known(key: str, names: tuple[str, ...], where: str) -> None:
        if key not in names:
            raise refuse(where, f"one of {', '.join(names)}", key)

    def check_entries(entries: object, where: str) -> None:
        for kernel, by_size in table(entries, where).items():
            at = f"{where}.{kernel}"
            if kernel == ABOUT:
                if not isinstance(by_size, str):
                    raise refuse(at, "a text", by_size)
                continue
            known(kernel, tuple(PARAMETERS), where)
            for size, values in table(by_size, at).items():
                known(size, sizes(kernel), at)
                for name, value in table(values, f"{at}.{size}").items():
                    known(name, tuple(PARAMETERS[kernel]), f"{at}.{size}")
                    parameter = PARAMETERS[kernel][name]
                    if type(value) is not int or value not in parameter.values:
                        raise refuse(f"{at}.{size}.{name}", f"{parameter.expected} ({parameter.meaning})", value)

    try:
        content = json.loads(text)
    except ValueError as error:
        raise TunedError(f"{file}: content: expected JSON, got: {error}") from error
    for level, by_key in table(content, "content").items():
        known(level, LEVELS, "content")
        if level == "default":
            check_entries(by_key, level)
        else:
            for key, entries in table(by_key, level).items():
                check_entries(entries, f"{level}.{key}")
    return dict(content)


def read(path: Path) -> dict[str, Any]:
    """The content of a file, checked. Raises TunedError."""
    try:
        return parse(path.read_text(), path)
    except (OSError, UnicodeDecodeError) as error:
        raise TunedError(f"{path}: content: expected a file of launch parameters, got: {error}") from error


def layers(content: Mapping[str, Any], reported: Mapping[str, Any], file: str) -> tuple[tuple[str, Entries], ...]:
    """What a file has for a device: (source, entries), the most specific first."""
    found = [(f"{file}: {level} {key}", content.get(level, {}).get(key)) for level, key in keys(reported).items()]
    return tuple((source, entries) for source, entries in (*found, (f"{file}: default", content.get("default"))) if entries)


def user_file() -> Path | None:
    """The user's file, whether it exists or not; None when the environment says `off`."""
    named = os.environ.get(ENVIRONMENT)
    if named == "off":
        return None
    return Path(named) if named else Path(platformdirs.user_config_dir("pyclquant", appauthor=False)) / "tuned.json"


def user_layers(reported: Mapping[str, Any]) -> tuple[tuple[str, Entries], ...]:
    """What the user's file has for a device. A file that cannot be used is a warning that names it."""
    path = user_file()
    if path is None or not (path.exists() or os.environ.get(ENVIRONMENT)):
        return ()
    try:
        return layers(read(path), reported, str(path))
    except TunedError as error:
        warnings.warn(f"launch parameters left out: {error}", RuntimeWarning, stacklevel=2)
        return ()


@cache
def shipped() -> dict[str, Any]:
    """Our own file."""
    return read(SHIPPED)


@dataclass(frozen=True)
class Tuned:
    """The parameters of a launch. values: all that PARAMETERS names.  source: files and levels that they come from, in order."""

    values: dict[str, int]
    source: str

    def __getitem__(self, name: str) -> int:
        return self.values[name]


def find(caps: Capabilities, kernel: str, size: str = ANY) -> Tuned:
    """The parameters of an op/variant for a device and a size class."""
    classes = dict.fromkeys((size, size.removesuffix(f" {MANY}"), ANY))
    stack = (*caps.tuned, *layers(shipped(), caps.reported, SHIPPED.name))
    values: dict[str, int] = {}
    used: set[str] = set()
    for name in PARAMETERS[kernel]:
        for source, entries in stack:
            by_size = entries.get(kernel, {})
            found = [by_size[s][name] for s in classes if name in by_size.get(s, {})]
            if found:
                values[name] = found[0]
                used.add(source)
                break
    return Tuned(values, "; ".join(source for source, _ in stack if source in used))


def text_of(content: Mapping[str, Any]) -> str:
    """A file of this content, a size class a line."""

    def written(value: Any, depth: int) -> str:
        if not isinstance(value, dict) or not any(isinstance(v, dict) for v in value.values()):
            return json.dumps(value)
        pad = "  " * (depth + 1)
        rows = [f"{pad}{json.dumps(key)}: {written(v, depth + 1)}" for key, v in value.items()]
        return "{\n" + ",\n".join(rows) + "\n" + "  " * depth + "}"

    return written(dict(content), 0) + "\n"
