"""What is known of a device: what it reports, and what was seen to work. Pure data, no OpenCL calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

Entries = Mapping[str, Mapping[str, Mapping[str, int]]]
"""Launch parameters: op/variant -> size class -> parameter -> value, see `pyclquant.tuned`."""


@dataclass(frozen=True)
class Verdict:
    """What the probe found about one feature.

    ok: whether it works.  reason: what was seen.  value: a measured size, where the feature has one.
    options: build options that it needs.
    """

    ok: bool
    reason: str
    value: int | None = None
    options: str = ""

    @staticmethod
    def of(row: Mapping[str, Any]) -> Verdict:
        """From the JSON form."""
        return Verdict(bool(row["ok"]), str(row["reason"]), row.get("value"), row.get("options", ""))

    def json(self) -> dict[str, Any]:
        """The JSON form; value and options only where there are any."""
        return {k: v for k, v in asdict(self).items() if k == "reason" or v not in (None, "")}


@dataclass(frozen=True)
class Capabilities:
    """reported: the driver's words, keys as in `tests/devices/*.json`.  works: feature -> verdict.

    tuned: (source, launch parameters) that win over those shipped, the first over the others.
    """

    reported: Mapping[str, Any]
    works: Mapping[str, Verdict]
    tuned: tuple[tuple[str, Entries], ...] = ()

    def ok(self, feature: str) -> bool:
        """Whether a feature was seen to work."""
        verdict = self.works.get(feature)
        return verdict is not None and verdict.ok

    def missing(self, *features: str) -> str | None:
        """The first of these features that does not work, with the reason; None if all work."""
        for feature in features:
            verdict = self.works.get(feature)
            if verdict is None:
                return f"{feature}: not probed"
            if not verdict.ok:
                return f"{feature}: {verdict.reason}"
        return None

    @property
    def is_cpu(self) -> bool:
        """A CPU driver. A device that says CPU and GPU at once (Oclgrind) is software, so a CPU."""
        return self.reported.get("device_type") == "cpu"

    @property
    def walks_rows(self) -> bool:
        """A CPU driver that runs a work-item at a time, so that vectors are up to the kernel.

        One whose native width of float is 1 (Mesa's llvmpipe) puts work-items side by side into vectors,
        as a GPU does; Intel's reports 8 and more, and PoCL too.
        """
        native = (self.reported.get("native_vector_width") or {}).get("float")
        return self.is_cpu and native != 1

    @property
    def local_memory(self) -> int:
        """Bytes of local memory that a kernel may have: as probed, else as reported; 0 when unknown."""
        probed = self.works.get("local_memory")
        return int(probed.value or 0) if probed and probed.ok else int(self.reported.get("local_mem_size") or 0)

    @property
    def max_work_group_size(self) -> int:
        """Largest work-group taken in any dimension 0 launch, 256 at the most, 1 when unknown.

        256 is what AMD's drivers compile for by default, and no kernel here gains from more.
        """
        measured = self.works.get("work_group")
        limits = [
            self.reported.get("max_work_group_size"),
            (self.reported.get("max_work_item_sizes") or [None])[0],
            measured.value if measured else None,
        ]
        known = [int(n) for n in limits if n]
        return min([256, *known]) if known else 1

    @staticmethod
    def from_report(reported: Mapping[str, Any]) -> Capabilities:
        """What one may expect of a device that is not at hand: the report, taken at its word where
        nothing contradicts it. For tests and offline compilation; a real device is probed.
        """
        extensions = reported.get("extensions") or []
        extra = reported.get("extra") or {}
        fp_config = reported.get("single_fp_config") or []
        failed = bool(extra.get("kernel_query_failed"))

        def expect(ok: bool, reason: str, value: int | None = None) -> Verdict:
            if failed:
                return Verdict(False, "the driver failed at the first query that needs a compiled kernel")
            return Verdict(ok, reason, value)

        def listed(name: str, value: int | None = None) -> Verdict:
            return expect(name in extensions, f"{name} is {'listed' if name in extensions else 'not listed'}", value)

        nvidia = "NVIDIA" in str(reported.get("vendor"))
        wave = reported.get("warp_or_wavefront") or reported.get("preferred_work_group_size_multiple")
        sized = "cl_intel_required_subgroup_size" in extensions
        lanes = 16 if sized or not wave else min(32, int(wave))  # of a width that the compiler may choose, the probe asks for 16
        works = {f"vector{n}": expect(True, "not probed: expected of every OpenCL 1.2 device") for n in (2, 4, 8, 16)}
        works["base"] = expect(True, "not probed: expected of every OpenCL 1.2 device")
        works["index64"] = expect(extra.get("address_bits") in (64, None), f"address bits: {extra.get('address_bits')}")
        rounded = "CORRECTLY_ROUNDED_DIVIDE_SQRT" in fp_config
        works["divide_option"] = Verdict(
            rounded and not failed,
            f"single_fp_config {'has' if rounded else 'lacks'} CORRECTLY_ROUNDED_DIVIDE_SQRT",
            options="-cl-fp32-correctly-rounded-divide-sqrt",
        )
        works["divide_fma"] = expect("FMA" in fp_config, f"single_fp_config {'has' if 'FMA' in fp_config else 'lacks'} FMA")
        for bit, features in (("FMA", ("divide_fma", "fma", "fma_speed")), ("DENORM", ("denormals", "fma_denormals"))):
            for feature in features:
                works[feature] = expect(bit in fp_config, f"single_fp_config {'has' if bit in fp_config else 'lacks'} {bit}")
        works["half_convert"] = listed("cl_khr_fp16")
        works["subgroup_size"] = listed("cl_intel_required_subgroup_size", 16)
        works["shuffle_khr"] = listed("cl_khr_subgroup_shuffle", lanes)
        works["shuffle_intel"] = listed("cl_intel_subgroups", 16 if sized else 8)
        works["shuffle_nv"] = expect(nvidia, f"vendor {reported.get('vendor')}", 32)
        for feature in ("nv_convert", "nv_mma"):
            works[feature] = expect(False, "not probed: needs an NVIDIA device of sm_89 or later")
        for feature in ("x86_bf16", "x86_look_up"):
            works[feature] = expect(False, "not probed: needs an x86 CPU with AVX512_BF16 and AVX512_VBMI")
        return Capabilities(reported, works)
