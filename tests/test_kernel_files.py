"""The rules of cl/: each file's header tells what its code does and needs, and nothing else."""

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pyopencl as cl
import pytest

from pyclquant import reference
from pyclquant.errors import BuildError
from pyclquant.program import CL_DIR, build, source
from pyclquant.selftest import Case, check_case, sample
from pyclquant.testing import mismatch

ROOT = Path(__file__).parent.parent
FILES = {p.name: p.read_text() for p in sorted(CL_DIR.glob("*.[ch]*"))}
KERNEL_FILES = [name for name in FILES if name.endswith(".cl")]

PARTS = ["Computes", "Layouts", "Launch", "Macros", "Needs", "Reference"]
OPENCL_NAMES = {"CLK_LOCAL_MEM_FENCE", "CLK_GLOBAL_MEM_FENCE", "NAN", "INFINITY", "MAXFLOAT"}
COMPLETE = {
    "WG": 1,
    "X_TYPE": "F32",
    "FORMAT": "INT8",
    "SCALE_TYPE": "F32",
    "SCALES": "PER_ROW",
    "TILE_M": 8,
    "TILE_N": 16,
}
"""A value for every macro that some file requires."""


# ---- reading a file ----


def header_of(text):
    """The comment that begins a file."""
    return re.match(r"/\*.*?\*/", text, re.DOTALL)[0]


def part_of(header, part):
    """One of the six parts of a header."""
    return re.search(rf"^\d\. {part}\b(.*?)(?=^\d\. |\*/)", header, re.DOTALL | re.MULTILINE)[1]


def code_of(text):
    """The text without comments, strings and pragmas."""
    return re.sub(r"/\*.*?\*/|\"[^\"\n]*\"|^ *#pragma[^\n]*$", " ", text, flags=re.DOTALL | re.MULTILINE)


def names_in(code):
    """Every word in capitals."""
    return set(re.findall(r"\b[A-Z][A-Z0-9_]+\b", code)) - OPENCL_NAMES


def required_in(code):
    """Macros whose absence is an error."""
    return set(re.findall(r"#ifndef (\w+)\n#error", code))


def guarded_in(code):
    """Macros with a default, and required ones."""
    return set(re.findall(r"#ifndef (\w+)\n#define \1\b", code)) | required_in(code)


def set_in(code):
    """Macros that a file defines itself, whatever is passed."""
    return set(re.findall(r"#define (\w+)", code)) - guarded_in(code)


def documented_in(macros):
    """Names that begin a line of a Macros part, several with one space between them."""
    heads = re.findall(r"^ {3,4}([A-Z][A-Z0-9_]+(?: [A-Z][A-Z0-9_]+)*)(?=\s|$)", macros, re.MULTILINE)
    return {name for head in heads for name in head.split()}


def values_in(macros):
    """Names in capitals that a Macros part offers as alternatives: A | B | C."""
    lists = re.findall(r"^ {3,4}[A-Z]\w+ {2,}(.* \| .*)$", macros, re.MULTILINE)
    alternatives = {words.split("  ")[0].strip() for row in lists for words in row.split(" | ")}
    return {a for a in alternatives if re.fullmatch(r"[A-Z][A-Z0-9_]+", a)}


def closure_of(files, name):
    """A file and all that it includes, as code."""
    text = files[name]
    return code_of(text) + "".join(closure_of(files, included) for included in re.findall(r'#include "(.*?)"', text))


# ---- the lint ----


def kernel_file_problems(files, name):
    """What is wrong with a kernel file."""
    stem = name.removesuffix(".cl")
    header, own, whole = header_of(files[name]), code_of(files[name]), closure_of(files, name)
    if re.findall(r"^\d\. (\w+)", header, re.MULTILINE) != PARTS:
        return [f"header: expected the parts {', '.join(PARTS)}"]
    problems = []
    if not header.startswith(f"/* {name} - "):
        problems.append(f"header: expected to begin with the name {name}")

    macros = part_of(header, "Macros")
    documented = documented_in(macros)
    configures = names_in(whole) - (set_in(whole) - guarded_in(whole)) - set_in(own)
    problems += [f"{m}: documented, but nothing uses it" for m in documented - configures]
    problems += [f"{m}: a value that is defined nowhere" for m in values_in(macros) - set_in(whole)]
    problems += [f"{m}: used, but not documented" for m in (names_in(own) & configures) - documented]
    problems += [f"{m}: required, but not documented" for m in required_in(whole) - set_in(own) - documented]

    kernels = re.findall(r"__kernel(.*?)void (\w+)\((.*?)\)\s*\{", own, re.DOTALL)
    if not kernels or len(kernels) != own.count("__kernel"):
        problems.append(f"kernels: expected {own.count('__kernel')} of the usual form, got {len(kernels)}")
    layouts = part_of(header, "Layouts")
    for attributes, kernel, arguments in kernels:
        if not kernel.startswith(stem):
            problems.append(f"{kernel}: expected a name that begins with {stem}")
        if "reqd_work_group_size(" not in attributes:
            problems.append(f"{kernel}: expected reqd_work_group_size")
        arrays = re.findall(r"\*\s*(?:restrict\s+)?(\w+)", arguments)
        if "Flat arrays" not in layouts:
            problems += [f"{kernel}: array {a} is not in Layouts" for a in arrays if not re.search(rf"\b{a}\b", layouts)]
    return problems


def header_file_problems(files, name):
    """What is wrong with a header file."""
    header = header_of(files[name])
    macros = header.partition("\nMacros")[2]
    problems = []
    if not header.startswith(f"/* {name} - "):
        problems.append(f"header: expected to begin with the name {name}")
    documented_somewhere = set().union(
        *(documented_in(header_of(text).partition("\nMacros")[2]) for other, text in files.items() if other.endswith(".h"))
    )
    own, whole = code_of(files[name]), "".join(code_of(text) for text in files.values())
    configures = names_in(own) - set_in(whole) | guarded_in(own)
    problems += [f"{m}: used, but no header documents it" for m in configures - documented_somewhere]
    problems += [f"{m}: guarded here, but not documented here" for m in guarded_in(own) - documented_in(macros)]
    problems += [f"{m}: documented, but nothing uses it" for m in documented_in(macros) - names_in(whole)]
    problems += [f"{m}: a value that is defined nowhere" for m in values_in(macros) - set_in(whole)]
    if "__kernel" in own:
        problems.append("kernels: expected none in a header")
    return problems


def problems_of(files, name):
    """What is wrong with a file of cl/."""
    return (kernel_file_problems if name.endswith(".cl") else header_file_problems)(files, name)


@pytest.mark.parametrize("name", FILES)
def test_header_and_code_say_the_same(name):
    assert problems_of(FILES, name) == []


@pytest.mark.parametrize(
    ("name", "old", "new", "problem"),
    [
        ("kv_quantize.cl", "2. Layouts", "2. Arrays", "header: expected the parts"),
        ("kv_quantize.cl", "/* kv_quantize.cl", "/* quantize.cl", "expected to begin with the name"),
        ("kv_quantize.cl", "   PER_TENSOR  0", "   PER_TENSORS  0", "PER_TENSORS: documented, but nothing uses it"),
        ("kv_quantize.cl", "   PER_TENSOR  0", "   per tensor  0", "PER_TENSOR: used, but not documented"),
        ("kv_quantize.cl", "   SCALE_TYPE  F32", "   scale type  F32", "SCALE_TYPE: required, but not documented"),
        ("kv_quantize.cl", "FP8_E5M2 | INT8", "FP8_E5M2FNUZ | INT8", "FP8_E5M2FNUZ: a value that is defined nowhere"),
        ("kv_quantize.cl", "void kv_quantize(", "void quantize(", "quantize: expected a name that begins with kv_quantize"),
        ("kv_quantize.cl", "__attribute__((reqd_work_group_size(WG, 1, 1)))\n", "", "expected reqd_work_group_size"),
        ("kv_quantize.cl", "   codes   [rows", "   bytes   [rows", "array codes is not in Layouts"),
        ("act_quant.cl", "   SILU  0", "   silu  0", "SILU: used, but not documented"),
        ("act_quant.cl", "   h       [rows", "   y       [rows", "act_quant_silu_mul: array h is not in Layouts"),
        ("gemv_w8a8.cl", "   TILE_N  rows", "   tile_n  rows", "TILE_N: required, but not documented"),
        ("gemv_w8a8_row.cl", "   SCALES  PER_ROW", "   SCALES  BY_ROW", "BY_ROW: a value that is defined nowhere"),
        ("gemv.h", "    DENORMALS  1", "    denormals  1", "DENORMALS: guarded here, but not documented here"),
        ("common.h", "    ALIGNED  1", "    aligned  1", "ALIGNED: guarded here, but not documented here"),
        ("common.h", "#if HALF &&", "#if HALVES &&", "HALVES: used, but no header documents it"),
        ("vendor.h", "    CONVERT_NV  1", "    CONVERT_AMD  1", "CONVERT_AMD: documented, but nothing uses it"),
    ],
)
def test_the_lint_finds(name, old, new, problem):
    assert old in FILES[name]
    broken = FILES | {name: FILES[name].replace(old, new)}
    assert any(problem in p for p in problems_of(broken, name))


# ---- what the lint cannot see ----


@pytest.mark.parametrize(
    ("name", "macro"),
    [(name, m) for name in KERNEL_FILES for m in sorted(required_in(closure_of(FILES, name)) - set_in(code_of(FILES[name])))],
)
def test_a_missing_required_macro_is_named_by_the_build(dev, name, macro):
    macros = {m: v for m, v in COMPLETE.items() if m != macro}
    with pytest.raises(BuildError, match=rf'{macro}: [^"]* is required'):
        build(dev.context, dev.queue.device, name, macros)


def test_no_build_option_gives_up_exact_arithmetic():
    forbidden = re.compile("-cl-(fast-relaxed-math|finite-math-only|unsafe-math-optimizations|mad-enable|denorms-are-zero)")
    searched = [p for folder in ("pyclquant", "cl", "tools", ".ci") for p in (ROOT / folder).rglob("*") if p.is_file()]
    searched = [p for p in searched if p.suffix in (".py", ".cl", ".h", ".sh", "")]
    assert len(searched) > 15
    assert [str(p) for p in searched if forbidden.search(p.read_text())] == []


def test_every_include_comes_once():
    """Concatenated sources have no include guards."""
    for name in KERNEL_FILES:
        text = source(name)
        assert '#include "' not in text
        for header in set(re.findall(r'#line 1 "(.*?)"', text)):
            assert text.count(f'#line 1 "{header}"\n') == 1


# ---- small runs, for Oclgrind too ----

ROUND = [
    Case(sample((3, 2, 64), "bfloat16", 1), "fp8_e4m3fn", "per_head", out_dtype="bfloat16"),
    Case(sample((3, 2, 16), "float32", 2), "fp8_e5m2", "per_token", scale_dtype="float16"),
    Case(sample((3, 2, 48), "float32", 3), "int8", "per_tensor", out_dtype="float16"),
    Case(sample((3, 2, 24), "float16", 4), "int4", "per_group", 16, "float16", "float16"),
]
ODD = [
    Case(sample((3, 2, 7), "bfloat16", 5), "fp8_e4m3fn", "per_group", 3),
    Case(sample((3, 2, 9), "float32", 6), "int4", "per_group", 4),
]


@pytest.mark.oclgrind
@pytest.mark.parametrize("case", ROUND, ids=lambda case: case.format)
def test_small_rows_of_round_sizes(dev, variant, case):
    assert check_case(dev, case, variant) is None


@pytest.mark.oclgrind
@pytest.mark.parametrize("case", ODD, ids=lambda case: case.format)
@pytest.mark.parametrize("name", ["row", "base"])
def test_small_rows_of_odd_sizes(dev, name, case):
    assert check_case(dev, case, name) is None


# ---- cl/README.md ----

README = (CL_DIR / "README.md").read_text()


def test_the_readme_names_every_file():
    named = set(re.findall(r"\[`([\w.]+)`\]\(\1\)", README))
    assert named == set(FILES)


def test_the_readme_example_gives_the_codes_of_the_reference(dev):
    """Its macros, arguments and sizes, through pyopencl alone."""
    options = re.search(r"^```\n(-D.*)\n```", README, re.MULTILINE)[1].split()
    tokens, heads, dim = 5, 3, 128
    x = sample((tokens, heads, dim), "bfloat16")
    mf = cl.mem_flags
    device_x = cl.Buffer(dev.context, mf.READ_ONLY | mf.COPY_HOST_PTR, hostbuf=x.view(np.uint16))
    codes = np.zeros(x.shape, ml_dtypes.float8_e4m3fn)
    scales = np.zeros((tokens, heads), np.float32)
    device_codes = cl.Buffer(dev.context, mf.WRITE_ONLY, codes.nbytes)
    device_scales = cl.Buffer(dev.context, mf.WRITE_ONLY, scales.nbytes)

    kernel = cl.Program(dev.context, source("kv_quantize.cl")).build(options=options).kv_quantize
    blocks = tokens * heads
    u32, u64 = np.uint32, np.uint64
    arrays = [device_x, u64(0), device_codes, u64(0), device_scales, u64(0)]
    counts = [u64(blocks), u64(dim), u32(dim), u32(1), u32(1)]
    kernel(dev.queue, (-(-blocks // 4) * 64,), (64,), *arrays, *counts, np.float32(1e-12))
    cl.enqueue_copy(dev.queue, codes.view(np.uint8), device_codes)
    cl.enqueue_copy(dev.queue, scales, device_scales)

    want_codes, want_scales, _ = reference.quantize(x, "fp8_e4m3fn", granularity="per_head")
    assert mismatch(scales, want_scales, "scales") is None
    assert mismatch(codes, want_codes, "codes") is None
