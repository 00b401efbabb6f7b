"""Whether a cost grows linearly in bytes: a line through the times of one operation at several sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Line:
    """seconds = launch + nbytes / bandwidth. points: (nbytes, seconds), by size.

    worst: the largest deviation of a point from the line, as a part of the line's value there, with its sign.
    worst_nbytes: where that is.
    """

    points: tuple[tuple[int, float], ...]
    launch: float
    bandwidth: float
    worst: float
    worst_nbytes: int

    def seconds(self, nbytes: float) -> float:
        """What the line says."""
        return self.launch + nbytes / self.bandwidth

    @staticmethod
    def through(points: Sequence[tuple[int, float]]) -> Line | None:
        """The line with the smallest sum of squared relative deviations whose launch is not negative.

        None with fewer than three sizes: two are always on a line. Also when the time does not grow.
        """
        points = sorted(points)
        if len({nbytes for nbytes, _ in points}) < 3:
            return None
        x, t = (np.array(values, np.float64) for values in zip(*points, strict=True))
        (launch, slope), *_ = np.linalg.lstsq(np.stack([1 / t, x / t], axis=1), np.ones(len(t)), rcond=None)
        if launch < 0:
            launch, slope = 0.0, float(np.sum(x / t) / np.sum((x / t) ** 2))
        if slope <= 0:
            return None
        deviation = t / (launch + slope * x) - 1
        worst = int(np.argmax(np.abs(deviation)))
        return Line(tuple(points), float(launch), float(1 / slope), float(deviation[worst]), int(x[worst]))


def halved(largest: int, least: int, multiple: int = 1, factor: int = 2) -> tuple[int, ...]:
    """`largest`, a `factor`-th of it and so on, not below `least`, each rounded down to a multiple; in rising order."""
    sizes = [largest]
    while (smaller := sizes[-1] // factor // multiple * multiple) >= least:
        sizes.append(smaller)
    return tuple(reversed(sizes))
