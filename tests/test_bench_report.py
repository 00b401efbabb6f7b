"""The report of a device: every section has its tables and its JSON, and what is wrong has no speed."""

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from pyclquant import Device, reference
from pyclquant.capabilities import Capabilities

TOOL = Path(__file__).resolve().parent.parent / "tools" / "bench_report.py"


@pytest.fixture(scope="module")
def tool():
    spec = spec_from_file_location("bench_report", TOOL)
    module = module_from_spec(spec)
    sys.modules["bench_report"] = module
    spec.loader.exec_module(module)
    return module


pytestmark = pytest.mark.usefixtures("quick_bench")


@pytest.fixture
def report(tool, tmp_path, capsys, monkeypatch):
    """Run it on tiny shapes: exit status, Markdown, JSON."""
    monkeypatch.setattr(tool, "find_spec", lambda name: None)  # no matplotlib

    def call(*only):
        options = [word for name in only for word in ("--only", name)]
        status = tool.main(["--small", "--seconds", "0", "--out", str(tmp_path / "to"), *options])
        text = (tmp_path / "to" / "bench.md").read_text()
        assert text.splitlines()[-1] in capsys.readouterr().out
        return status, text, json.loads((tmp_path / "to" / "bench.json").read_text())

    return call


def rows_of(text, first):
    """Cells of the rows of tables that begin with a word."""
    return [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith(f"| {first}")]


def test_report_of_quantizers(report, dev):
    status, text, found = report("kv", "act_quant")
    assert status == 0
    assert list(found["sections"]) == ["kv", "act_quant"]
    assert found["device"] == dev.capabilities.reported["name"]
    assert found["driver"] == dev.capabilities.reported["driver_version"]
    assert set(found) == {"date", "device", "platform", "driver", "host", "load", "versions", "seconds", "sections"}
    assert {"python", "numpy", "pyopencl"} <= set(found["versions"])
    assert text.startswith(f"# {found['device']}, {found['date']}\n")
    assert "Shapes are tiny" in text
    assert len(rows_of(text, "kv_")) == 8
    assert len(rows_of(text, "act_quant")) == 4
    for row in rows_of(text, "kv_"):
        assert row[3].endswith("s")
        assert row[5].endswith("%")
        assert row[6].endswith("s")  # NumPy's
    for r, row in zip(found["sections"]["act_quant"]["results"], rows_of(text, "act_quant"), strict=True):
        over, whole = map(float, row[5].split(", "))
        assert whole == pytest.approx(r["median_us"] / r["floor_us"], abs=0.01)
        launch = found["sections"]["act_quant"]["launch_us"]
        assert over == pytest.approx((r["median_us"] - launch) / r["floor_us"], abs=0.01)
    assert text.count("An empty kernel: ") == 2


def test_report_of_products(report):
    status, text, found = report("gemv_8192", "proj")
    assert status == 0
    assert list(found["sections"]) == ["gemv_8192x8192", "proj"]
    results = found["sections"]["gemv_8192x8192"]["results"]
    heading = next(line for line in text.splitlines() if line.startswith("| M |"))
    variants = dict.fromkeys(f"{r['format']} {r['variant']}" for r in results)
    assert [c.strip() for c in heading.strip("|").split("|")] == ["M", *variants, "NumPy"]
    assert len(rows_of(text, "1 ")) == 1
    assert len(rows_of(text, "8 ")) == 1
    assert len(rows_of(text, "per_row")) == len(rows_of(text, "block_128")) == 2
    assert all(r["host_us"]["enqueue"] > 0 for r in found["sections"]["proj"]["results"])
    assert "billion operations a second" in text


def test_wrong_result_has_no_speed_in_the_report(report, monkeypatch):
    right = reference.act_quant

    def wrong(x, layout, *eps):
        codes, scales = right(x, layout, *eps)
        return codes, scales * (2 if layout == "per_row" else 1)

    monkeypatch.setattr(reference, "act_quant", wrong)
    status, text, found = report("act_quant", "growth_act")
    assert status == 1
    assert [r["correct"] for r in found["sections"]["act_quant"]["results"]] == [False, True, False, True]
    rows = [row for row in rows_of(text, "act_quant") if "M=8" not in row[0]]
    assert [row[3].startswith("WRONG: scales: expected") for row in rows] == [True, False, True, False]
    assert [row[4:] == ["", "", ""] for row in rows] == [True, False, True, False]
    assert "WRONG: act_quant per_row [8, 1024]: scales: expected" in text
    assert "act_quant per_row row M=8" not in text


def test_growth_of_every_family(report):
    status, text, found = report("growth")
    assert status == 0
    assert list(found["sections"]) == ["growth_kv", "growth_act_quant", "growth_gemv"]
    for name, section in found["sections"].items():
        assert len({tuple(r["shape"]) for r in section["results"]}) >= 3, name
        assert all(r["peers"] == [] for r in section["results"])
    assert "The line time = launch + bytes / bandwidth" in text


def test_shapes_of_a_gpu(tool, dev):
    """Those of the bars: no device with so much memory is needed to know them."""
    gpu = Device(dev.queue, Capabilities(dev.capabilities.reported | {"device_type": "gpu"}, dev.capabilities.works))
    found = {s.name: s.jobs for s in tool.sections(gpu)}
    ((_, kv),) = found["kv"]
    assert kv.shape == (1048576, 128)
    ((_, act),) = found["act_quant"]
    assert (act.weight[1], act.rows, act.scales) == (17408, (256,), ("per_row", "block_128"))
    for n, k in ((8192, 8192), (16384, 5120), (5120, 17408), (1024, 5120)):
        ((op, spec),) = found[f"gemv_{n}x{k}"]
        assert (op, spec.weight, spec.rows) == ("gemv", (n, k), (1, 8, 16, 32, 64, 128))
        assert {"row", "base"}.isdisjoint(spec.variants)
        assert "vector" in spec.variants
    ((_, last),) = found["gemv_248064x5120"]
    assert (last.weight, last.rows) == ((248064, 5120), (1,))
    assert [spec.weight[0] for _, spec in found["growth_gemv"]] == [256 << n for n in range(9)]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (3.14159, "3.14 µs"), (999.4, "999 µs"), (999.6, "1 ms"), (123456.0, "123 ms"), (2.5e6, "2.5 s")],
)
def test_units(tool, value, text):
    assert tool.us(value) == text
