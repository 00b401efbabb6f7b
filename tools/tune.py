"""Tune the kernels for a device and write the entries that the package ships.

As `pyclquant tune`, with the level of the entries to choose, so that they serve more devices than the one at hand. Needs
kernel-tuner and no network. On a new GPU: python tools/tune.py --op gemv/mma,gemv/vector,kv,act_quant --seconds 170 -o OUT.json
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pyclquant import cli, tuned


def main(
    op: Annotated[list[str] | None, typer.Option(help="As of `pyclquant tune`, like those below.")] = None,
    shape: Annotated[str | None, typer.Option()] = None,
    rows: Annotated[list[str] | None, typer.Option()] = None,
    level: Annotated[str, typer.Option(help=f"Of {', '.join(tuned.LEVELS[:-1])}.")] = "architecture",
    output: Annotated[Path, typer.Option("-o", "--output", help="Updated where it exists.")] = tuned.SHIPPED,
    quick: Annotated[bool, typer.Option("--quick")] = False,
    seconds: Annotated[float | None, typer.Option()] = None,
    device: cli.DeviceOption = None,
    as_json: cli.JsonOption = False,
) -> None:
    """Tune the kernels for a device and write the entries that the package ships."""
    if level not in tuned.LEVELS[:-1]:
        raise typer.BadParameter(f"expected one of {', '.join(tuned.LEVELS[:-1])}, got {level!r}", param_hint="--level")
    choice = cli.chosen_tuning(op, shape, rows, quick, seconds)
    cli.tune_into(output, level, choice, device, as_json, "tools/tune.py")


if __name__ == "__main__":
    cli.run_and_exit(lambda: typer.run(main))
