"""What the probe cannot see: overrides for a device or driver, each with its symptom and where to read on.

Everything else is decided by capability. A row here needs a symptom that a small kernel does not show.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyclquant.capabilities import Verdict


@dataclass(frozen=True)
class Quirk:
    """Features that are not to be used where all the patterns match (case-insensitive, anywhere in the value)."""

    where: Mapping[str, str]
    features: tuple[str, ...]
    symptom: str
    link: str

    def matches(self, reported: Mapping[str, Any]) -> bool:
        """Whether the device's report matches every pattern."""
        return all(re.search(pattern, str(reported.get(key)), re.IGNORECASE) for key, pattern in self.where.items())


QUIRKS: tuple[Quirk, ...] = (
    Quirk(
        {"platform_name": r"Intel\(R\) OpenCL$", "device_type": "cpu"},
        ("dot_khr",),
        "the integer dot product gives right bits but is slower than plain code on Intel's CPU runtime",
        "ProjectPhysX/OpenCL-Benchmark issue 27",
    ),
    Quirk(
        {"platform_name": "Oclgrind"},
        ("vector16",),
        "its check for unset memory takes the upper half of a loaded vector of 16 for unset (y = x.hi is enough)",
        "seen with Oclgrind 21.10",
    ),
)


def apply(reported: Mapping[str, Any], works: Mapping[str, Verdict]) -> dict[str, Verdict]:
    """The verdicts with those of matching quirks turned off."""
    result = dict(works)
    for quirk in QUIRKS:
        if quirk.matches(reported):
            for feature in quirk.features:
                if feature in result and result[feature].ok:
                    result[feature] = Verdict(False, f"{quirk.symptom} ({quirk.link})")
    return result
