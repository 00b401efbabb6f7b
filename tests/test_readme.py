"""The README's example runs, its links lead somewhere, and what it names exists."""

import re
from pathlib import Path

import pytest

from pyclquant import quirks
from pyclquant.formats import FORMATS
from pyclquant.variants import KV

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()


def test_the_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    printed = [float(word) for word in capsys.readouterr().out.split()]
    assert printed == pytest.approx([0.516, 0.375, 0.035], abs=0.003)


def test_links_lead_to_files():
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert links
    assert [link for link in links if not link.startswith("http") and not (ROOT / link).exists()] == []


def test_every_format_and_variant_is_named():
    assert [f for f in FORMATS if f"| `{f}` |" not in TEXT] == []
    assert [v.name for v in KV if f"`{v.name}`" not in TEXT] == []
    assert quirks.QUIRKS


def test_it_is_short():
    assert len(TEXT.splitlines()) <= 200


def test_every_module_is_on_the_map():
    on_the_map = TEXT.partition("## Map")[2].partition("**To add")[0]
    modules = {p.name for p in (ROOT / "pyclquant").glob("*.py")} - {"__init__.py", "__main__.py", "errors.py"}
    assert [m for m in sorted(modules) if m not in on_the_map] == []
    assert [f.name for f in (ROOT / "cl").glob("*.h") if f.name not in on_the_map] == []
