"""The evaluation on a small random Llama: against loops in float64, step by step, broken on purpose, and its command line."""

import importlib.util
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from pyclquant import checkpoint, files, kv, plot, reference, w8a8
from pyclquant.formats import FORMATS
from pyclquant.testing import mismatch, relative_rms

TOOL = Path(__file__).resolve().parent.parent / "tools" / "eval_llama.py"
spec = importlib.util.spec_from_file_location("eval_llama", TOOL)
eval_llama = importlib.util.module_from_spec(spec)
sys.modules["eval_llama"] = eval_llama  # where dataclasses look
spec.loader.exec_module(eval_llama)

from eval_llama import PLAIN, Combination, Evaluation, Llama, Score, Storage, Store  # noqa: E402

CONFIG = {
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
}
LINEARS = {
    "self_attn.q_proj": (256, 128),
    "self_attn.k_proj": (128, 128),
    "self_attn.v_proj": (128, 128),
    "self_attn.o_proj": (128, 256),
    "mlp.gate_proj": (256, 128),
    "mlp.up_proj": (256, 128),
    "mlp.down_proj": (128, 256),
}
TEXT = bytes(range(32, 127)) * 2 + b"In the beginning was the word. " * 4
FLOAT = Storage("float")
INT8 = Storage("int8", "per_head")
INT4 = Storage("int4", "per_group", 32)
CACHES = [
    *[Storage(f, g) for f in ("fp8_e4m3fn", "fp8_e5m2", "int8") for g in ("per_head", "per_token")],
    INT4,
    Storage("int4", "per_group", 24),  # does not divide head_dim
]
caches = pytest.mark.parametrize("how", CACHES, ids=str)


def random_tensors():
    """Of bfloat16, by name; K and Q large enough for attention that prefers some bytes to others."""
    rng = np.random.default_rng(7)

    def normal(*shape, scale):
        return (rng.normal(size=shape) * scale).astype(ml_dtypes.bfloat16)

    tensors = {"model.embed_tokens.weight": normal(256, 128, scale=1), "lm_head.weight": normal(256, 128, scale=0.1)}
    tensors["model.norm.weight"] = normal(128, scale=0.1) + ml_dtypes.bfloat16(1)
    for layer in range(CONFIG["num_hidden_layers"]):
        for name, (n, k) in LINEARS.items():
            scale = 2 if name[-6:] in ("q_proj", "k_proj") else 1
            tensors[f"model.layers.{layer}.{name}.weight"] = normal(n, k, scale=scale / math.sqrt(k))
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = normal(128, scale=0.1) + ml_dtypes.bfloat16(1)
    return tensors


TENSORS = random_tensors()


def write_model(folder, tensors=TENSORS, **config):
    """A checkpoint directory; keys of the config that are None are left out."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in {**CONFIG, **config}.items() if v is not None}))
    files.save_tensors(folder / "model.safetensors", tensors)
    return folder


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("eval") / "model")


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("eval") / "text.txt"
    path.write_bytes(TEXT)
    return path


@pytest.fixture(scope="module")
def evaluation(dev, model_dir):
    return opened(dev, model_dir)


def opened(dev, folder):
    found = checkpoint.open_checkpoint(folder)
    return Evaluation(dev, found, Llama(found))


def tokens(text):
    return np.frombuffer(text, np.uint8)


def windows(size, count):
    return tokens(TEXT[: size * count]).reshape(count, size)


def slow_logits(tensors, text):
    """A Llama token by token and head by head, in float64: logits [T, 256]."""
    t = {name: np.asarray(a).astype(np.float64) for name, a in tensors.items()}
    heads, kv_heads, dim, theta = 4, 2, 64, 10000.0

    def norm(x, w):
        return x / math.sqrt((x * x).mean() + 1e-5) * w

    def turned(x, position):
        y = np.empty(dim)
        for i in range(dim // 2):
            angle = position * theta ** (-2 * i / dim)
            y[i] = x[i] * math.cos(angle) - x[i + dim // 2] * math.sin(angle)
            y[i + dim // 2] = x[i + dim // 2] * math.cos(angle) + x[i] * math.sin(angle)
        return y

    past = [[] for _ in range(CONFIG["num_hidden_layers"])]
    logits = []
    for position, byte in enumerate(text):
        x = t["model.embed_tokens.weight"][byte]
        for layer, cached in enumerate(past):
            w = {name: t[f"model.layers.{layer}.{name}.weight"] for name in LINEARS}
            a = norm(x, t[f"model.layers.{layer}.input_layernorm.weight"])
            q, k, v = (w[f"self_attn.{p}_proj"] @ a for p in "qkv")
            ks = [turned(k[h * dim : (h + 1) * dim], position) for h in range(kv_heads)]
            cached.append((ks, [v[h * dim : (h + 1) * dim] for h in range(kv_heads)]))
            found = []
            for h in range(heads):
                mine, group = turned(q[h * dim : (h + 1) * dim], position), h // (heads // kv_heads)
                weights = np.array([math.exp(mine @ ks[group] / math.sqrt(dim)) for ks, _ in cached])
                found.append(sum(p * vs[group] for p, (_, vs) in zip(weights / weights.sum(), cached, strict=True)))
            x = x + w["self_attn.o_proj"] @ np.concatenate(found)
            a = norm(x, t[f"model.layers.{layer}.post_attention_layernorm.weight"])
            gate, up = w["mlp.gate_proj"] @ a, w["mlp.up_proj"] @ a
            x = x + w["mlp.down_proj"] @ (gate / (1 + np.exp(-gate)) * up)
        logits.append(t["lm_head.weight"] @ norm(x, t["model.norm.weight"]))
    return np.array(logits)


def logits_in_pieces(evaluation, combination, text, sizes):
    """Logits of all tokens, which come in pieces of these sizes."""
    cache, layers = evaluation.cache(combination, len(text)), evaluation.layers(combination.weights)
    ends = np.cumsum(sizes)
    assert ends[-1] == len(text)
    pieces = [tokens(text[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    return np.concatenate([evaluation.llama.forward(piece, layers, cache) for piece in pieces])


def quality(evaluation, combination, count=2):
    found = list(evaluation.qualities(windows(64, count), [combination], lambda _: None))
    assert len(found) == 1
    return found[0]


# ---- the model ----


def test_float_path_is_a_llama(evaluation):
    want = slow_logits(TENSORS, TEXT[:40])
    got = logits_in_pieces(evaluation, PLAIN, TEXT[:40], [40])
    assert got.dtype == np.float32
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()


def test_blocks_of_queries(evaluation, monkeypatch):
    """Windows of several blocks, the last of which is short; the second has another before it."""
    want = logits_in_pieces(evaluation, PLAIN, TEXT[:100], [100])
    monkeypatch.setattr(eval_llama, "QUERIES", 32)
    for sizes in ([100], [30, 70]):
        assert relative_rms(logits_in_pieces(evaluation, PLAIN, TEXT[:100], sizes), want) < 1e-5


def test_tied_embeddings(dev, tmp_path):
    tensors = {name: a for name, a in TENSORS.items() if name != "lm_head.weight"}
    tied = opened(dev, write_model(tmp_path / "model", tensors, tie_word_embeddings=True))
    want = slow_logits({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, TEXT[:8])
    assert relative_rms(logits_in_pieces(tied, PLAIN, TEXT[:8], [8]), want) < 1e-5


@pytest.mark.parametrize("weights", w8a8.SCALE_LAYOUTS)
def test_w8a8_layers(evaluation, weights):
    """Each kind of layer is near the float one, but not the same; more rows than a projection takes at a time."""
    rng = np.random.default_rng(3)
    exact, ours = evaluation.layers("float"), evaluation.layers(weights)
    for name, columns in (("qkv", 128), ("o", 256), ("mlp", 128)):
        x = rng.normal(size=(300, columns)).astype(np.float32)
        want, got = getattr(exact, name)(1, x), getattr(ours, name)(1, x)
        assert got.shape == want.shape
        assert 0.005 < relative_rms(got, want) < 0.08
    assert ours.nbytes < 0.53 * exact.nbytes


def test_fp8_checkpoint(dev, tmp_path):
    """FP8 weights are decoded for the float path; W8A8 takes them as they are, and no other layout."""
    tensors, decoded = {}, {}
    for name, a in TENSORS.items():
        if name.removesuffix(".weight").split(".", 3)[-1] in LINEARS:
            codes, scales = reference.quantize_weight(a, "block_128")
            tensors[name], tensors[f"{name}_scale_inv"] = codes, scales
            blocks = np.kron(scales, np.ones((128, 128)))
            decoded[name] = codes.astype(np.float64) * blocks
        else:
            tensors[name] = decoded[name] = a
    fp8 = opened(dev, write_model(tmp_path / "model", tensors))
    assert relative_rms(logits_in_pieces(fp8, PLAIN, TEXT[:8], [8]), slow_logits(decoded, TEXT[:8])) < 1e-5
    assert eval_llama.weights_of(fp8.checkpoint, fp8.shape) == ("float", "block_128")
    assert 0 < quality(fp8, Combination("block_128", FLOAT, FLOAT)).kl < MOST_KL["w8a8"]


# ---- the cache ----


@caches
def test_store_gives_back_what_the_reference_does(dev, how):
    """In one piece or in many, and over what was there before."""
    x = np.random.default_rng(1).normal(size=(20, 2, 64)).astype(np.float32)
    blocks = {"granularity": how.granularity, "group_size": how.group_size}
    want = reference.dequantize(*reference.quantize(x, how.format, **blocks), how.format, x.shape, **blocks)
    store = Store(dev, how, (24, 2, 64))
    assert mismatch(store.append(x, 0), want) is None
    for start, stop in ((0, 7), (7, 8), (8, 9), (9, 20)):
        got = store.append(x[start:stop], start)
        assert mismatch(got, want[:stop]) is None


@caches
def test_bytes_of_a_token(dev, how):
    x = np.ones((1, 2, 64), np.float32)
    q = kv.quantize(dev, x, how.format, granularity=how.granularity, group_size=how.group_size)
    assert how.token_bytes(2, 64) == q.nbytes


@pytest.mark.parametrize(
    "combination",
    [
        PLAIN,
        *[Combination("float", how, how) for how in CACHES],
        Combination("float", INT8, INT4),
        Combination("per_row", INT8, INT8),
        Combination("block_128", INT4, FLOAT),
    ],
    ids=str,
)
def test_step_by_step_is_the_window(evaluation, combination):
    """A different order of sums may take a value to the next code: that is far less than what quantization does."""
    text = TEXT[:48]
    window = logits_in_pieces(evaluation, combination, text, [48])
    steps = logits_in_pieces(evaluation, combination, text, [20, *[1] * 28])
    if combination == PLAIN:
        assert relative_rms(steps, window) < 1e-5
        return
    plain = logits_in_pieces(evaluation, PLAIN, text, [48])
    assert relative_rms(steps, window) < 0.1 * relative_rms(window, plain)


# ---- quality ----


def test_score():
    rng = np.random.default_rng(2)
    window = rng.integers(0, 256, 9).astype(np.uint8)
    got, true = (rng.normal(size=(9, 256)).astype(np.float32) * 3 for _ in range(2))
    nats = kl = 0.0
    agree = 0
    for t in range(8):
        p, q = (np.exp(a[t].astype(np.float64)) / np.exp(a[t].astype(np.float64)).sum() for a in (true, got))
        nats -= math.log(q[window[t + 1]])
        kl += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        agree += int(p.argmax() == q.argmax())
    score = Score.of(window, got, true)
    assert (score.nats, score.kl, score.agree, score.count) == (pytest.approx(nats), pytest.approx(kl), agree, 8)
    twice = score + score
    assert (twice.nats, twice.count) == (2 * score.nats, 16)


def test_quality_of_the_float_path(evaluation):
    want = []
    for window in windows(32, 2):
        logits = slow_logits(TENSORS, window.tobytes())
        want += [np.log(np.exp(logits[t]).sum()) - logits[t, window[t + 1]] for t in range(31)]
    found = next(evaluation.qualities(windows(32, 2), [PLAIN], lambda _: None))
    assert found.nats_per_byte == pytest.approx(np.mean(want), rel=1e-5)
    assert (found.increase, found.kl, found.top1) == (0, 0, 1)
    assert found.cache_bytes == 2 * 2 * 2 * 64 * 2  # layers, K and V, heads, head_dim, bytes
    assert found.weight_bytes == 2 * 2 * sum(n * k for n, k in LINEARS.values())
    assert found.read_bytes == found.weight_bytes + 32 * found.cache_bytes


MOST_KL = {"fp8_e4m3fn": 0.0075, "fp8_e5m2": 0.025, "int8": 0.0005, "int4": 0.05, "w8a8": 0.03}
"""About three times what was seen."""


@caches
def test_quantized_cache_costs_a_little(evaluation, how):
    found = quality(evaluation, Combination("float", how, how))
    assert 0 < found.kl < MOST_KL[how.format]
    assert 0 < abs(found.increase) < 0.02
    assert found.increase == pytest.approx(found.nats_per_byte / quality(evaluation, PLAIN).nats_per_byte - 1)
    assert found.top1 > 0.7


@pytest.mark.parametrize("weights", w8a8.SCALE_LAYOUTS)
def test_w8a8_costs_a_little(evaluation, weights):
    found = quality(evaluation, Combination(weights, FLOAT, FLOAT))
    assert 0 < found.kl < MOST_KL["w8a8"]
    assert abs(found.increase) < 0.02
    assert found.top1 > 0.7


@pytest.mark.parametrize("side", ["k", "v"])
@caches
def test_k_and_v_are_felt_alone(evaluation, how, side):
    alone = {"k": FLOAT, "v": FLOAT, side: how}
    assert 0 < quality(evaluation, Combination("float", **alone), count=1).kl < MOST_KL[how.format]


@pytest.mark.parametrize("side", ["k", "v"])
@caches
def test_broken_cache_is_seen(evaluation, monkeypatch, how, side):
    """Scales of the neighbouring token: what is written must be what is read back."""
    alone = Combination("float", **{"k": FLOAT, "v": FLOAT, side: how})
    good = quality(evaluation, alone, count=1)
    dequantize = kv.dequantize

    def shuffled(dev, q):
        host = q.get()
        return dequantize(dev, replace(host, scales=np.roll(host.scales, 1, axis=0)))

    monkeypatch.setattr(kv, "dequantize", shuffled)
    assert quality(evaluation, alone, count=1).kl > 5 * good.kl


@pytest.mark.parametrize("weights", w8a8.SCALE_LAYOUTS)
def test_broken_weights_are_seen(dev, model_dir, evaluation, monkeypatch, weights):
    """Scales of the neighbouring row, or block: of blocks there are few, and all of them alike."""
    good = quality(evaluation, Combination(weights, FLOAT, FLOAT), count=1)
    segment = checkpoint.Checkpoint.segment

    def shuffled(self, dev, name, scale_layout):
        found = segment(self, dev, name, scale_layout)
        return w8a8.Segment(found.codes, np.roll(found.scales.get(), 1))

    monkeypatch.setattr(checkpoint.Checkpoint, "segment", shuffled)
    assert (
        quality(opened(dev, model_dir), Combination(weights, FLOAT, FLOAT), count=1).kl
        > (10 if weights == "per_row" else 1.5) * good.kl
    )


def test_default_grid():
    grid = eval_llama.default_grid(eval_llama.WEIGHTS, 32)
    assert len(set(grid)) == len(grid)
    assert {c.weights for c in grid if c.cache == "float"} == set(eval_llama.WEIGHTS)
    assert {c.k.format for c in grid if c.weights == "float"} == {"float", *FORMATS}
    for weights in w8a8.SCALE_LAYOUTS:
        assert {c.k.format for c in grid if c.weights == weights} == {"float", "fp8_e4m3fn", "int8", "int4"}


# ---- command line ----


@pytest.fixture
def run(capfd, monkeypatch):
    """Run the tool in this process: exit status, stdout, the tool's own lines of stderr."""
    monkeypatch.setenv("COLUMNS", "200")

    def command(*arguments):
        capfd.readouterr()
        try:
            status = eval_llama.main([str(a) for a in arguments])
        except SystemExit as ended:
            status = ended.code
        out, err = capfd.readouterr()
        return status, out, [line for line in err.splitlines() if "eval_llama" in line]

    return command


def test_json_of_chosen_combinations(run, model_dir, text_file, evaluation):
    options = ("--weights", "float,per_row", "--k-format", "int8", "--v-format", "int8,int4", "--granularity", "per_token")
    status, out, lines = run(model_dir, "--text", text_file, "--window", 48, "--windows", 3, "--json", *options)
    assert status == 0
    report = json.loads(out)
    assert (report["window"], report["windows"]) == (48, 3)
    token = {"format": "int8", "granularity": "per_token", "group_size": None}
    int4 = {"format": "int4", "granularity": "per_group", "group_size": 32}
    rows = report["qualities"]
    assert [(q["weights"], q["k"], q["v"]) for q in rows] == [(w, token, v) for w in ("float", "per_row") for v in (token, int4)]
    mine = Combination("float", Storage("int8", "per_token"), INT4)
    want = next(evaluation.qualities(windows(48, 3), [mine], lambda _: None))
    assert {k: v for k, v in rows[1].items() if k != "seconds"} == {k: v for k, v in want.json().items() if k != "seconds"}
    assert lines[0] == "eval_llama: weights float, cache float (0 of 15 steps done)"
    assert lines[-1].startswith(
        "eval_llama: weights per_row, cache K int8 per_token, V int4 group 32 (12 of 15 steps done, about "
    )
    assert len(lines) == 5


def test_table_of_all_windows(run, model_dir, text_file):
    status, out, _ = run(model_dir, "--text", text_file, "--window", 64, "--k-format", "float,int4", "--group-size", 16)
    assert status == 0
    assert f"{text_file}: 4 windows of 64 bytes" in out
    cells = [line.split() for line in out.splitlines() if line.strip().startswith("float")]
    assert [row[1:-8] for row in cells] == [["float"], ["int4", "group", "16"]]
    assert cells[0][3:6] == ["+0.000%", "0.00e+00", "100.00%"]


def test_windows_end_before_the_text_does():
    assert eval_llama.windows_of(TEXT[:129], 64, None).tobytes() == TEXT[:128]
    assert eval_llama.windows_of(TEXT[:128], 64, None).tobytes() == TEXT[:64]
    assert eval_llama.windows_of(TEXT, 64, 2).tobytes() == TEXT[:128]


def test_generate(run, model_dir):
    """The float path's bytes are those of the loops; the first combination is what the rest is compared with."""
    text = b"In the"
    for _ in range(6):
        text += bytes([int(slow_logits(TENSORS, text)[-1].argmax())])
    options = ("--weights", "float,block_128", "--k-format", "float,int4")
    status, out, _ = run(model_dir, "--generate", 6, "--prompt", "In the", "--json", *options)
    assert status == 0
    rows = json.loads(out)["generated"]
    assert [(r["weights"], r["k"]["format"]) for r in rows] == [(w, f) for w in ("float", "block_128") for f in ("float", "int4")]
    assert rows[0]["continuation"] == text[6:].decode("utf-8", "replace")
    assert rows[0]["equal_bytes"] == 6
    status, out, _ = run(model_dir, "--generate", 6, "--prompt", "In the", *options)
    assert status == 0
    assert "behind 'In the':" in out


def test_quantized_continuations_are_decoded_with_the_cache(evaluation):
    """One byte at a time gives what the whole text at once gives: the likeliest byte behind each."""
    how = Combination("float", INT4, INT4)
    found = evaluation.continuation(tokens(b"In the"), 8, how, lambda _: None)
    text = b"In the" + found
    logits = logits_in_pieces(evaluation, how, text, [6, *[1] * 8])
    assert bytes(logits[5:-1].argmax(axis=1).astype(np.uint8)) == found


def test_equal_bytes():
    assert eval_llama.equal_bytes(b"abcd", b"abxd") == 2
    assert eval_llama.equal_bytes(b"abcd", b"abcd") == 4
    assert eval_llama.equal_bytes(b"x", b"y") == 0


def test_plot(run, model_dir, text_file, tmp_path):
    pytest.importorskip("matplotlib")
    options = ("--text", text_file, "--window", 32, "--windows", 1, "--weights", "float,per_row", "--k-format", "float,int8")
    options += ("--v-format", "int4,int8")
    status, out, _ = run(model_dir, *options, "--plot", tmp_path / "q.png")
    assert status == 0
    assert "wrote " in out
    assert (tmp_path / "q.png").read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib(run, model_dir, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    status, out, lines = run(model_dir, "--text", text_file, "--plot", tmp_path / "q.png")
    assert (status, out) == (1, "")
    assert lines == ["eval_llama: --plot: expected matplotlib, which is not installed; pip install 'pyclquant[plot]'"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mistral"}, "config.json: expected model_type 'llama', got 'mistral'"),
        ({"model_type": None}, "config.json: expected model_type 'llama', got None"),
        ({"vocab_size": 32000}, "config.json: expected vocab_size 256 (a token is a byte), got 32000"),
        ({"hidden_act": "gelu"}, "config.json: expected hidden_act 'silu', got 'gelu'"),
        ({"attention_bias": True}, "config.json: expected no attention_bias, got True"),
        ({"mlp_bias": True}, "config.json: expected no mlp_bias, got True"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "config.json: expected plain RoPE, got 'llama3'"),
        ({"rope_scaling": "yes"}, "config.json: expected RoPE's parameters as an object, got 'yes'"),
        ({"rope_theta": "1e4"}, "config.json: expected rope_theta as a positive number, got '1e4'"),
        ({"hidden_size": None}, "config.json: expected hidden_size as a positive integer, got None"),
        ({"num_key_value_heads": 3}, "config.json: expected num_key_value_heads that divides 4, got 3"),
        ({"head_dim": 63}, "config.json: expected an even head_dim, got 63"),
        ({"intermediate_size": 384}, "mlp.gate_proj: expected shape [384, 128] as of config.json, got [256, 128]"),
        ({"num_hidden_layers": 3}, "expected a linear layer, got 'model.layers.2.self_attn.q_proj'"),
    ],
)
def test_another_model(run, tmp_path, text_file, config, message):
    folder = write_model(tmp_path / "model", **config)
    status, out, lines = run(folder, "--text", text_file)
    assert (status, out, len(lines)) == (1, "", 1)
    assert message in lines[0]


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        ("lm_head.weight", "expected a tensor of the checkpoint, got 'lm_head.weight'"),
        ("model.norm.weight", "expected a tensor of the checkpoint, got 'model.norm.weight'"),
        ("model.layers.1.mlp.up_proj.weight", "expected a linear layer, got 'model.layers.1.mlp.up_proj'"),
    ],
)
def test_missing_tensor(run, tmp_path, text_file, drop, message):
    folder = write_model(tmp_path / "model", {name: a for name, a in TENSORS.items() if name != drop})
    status, _, lines = run(folder, "--text", text_file)
    assert (status, len(lines)) == (1, 1)
    assert message in lines[0]


def test_norm_of_another_shape(run, tmp_path, text_file):
    folder = write_model(tmp_path / "model", {**TENSORS, "model.norm.weight": np.ones(64, np.float32)})
    status, _, lines = run(folder, "--text", text_file)
    assert (status, len(lines)) == (1, 1)
    assert "model.norm.weight: expected shape [128] as of config.json, got [64]" in lines[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--window", 64, "--windows", 9), "text: expected more than 576 bytes (9 windows of 64), got 314"),
        (("--window", 120, "--windows", 3), "text: expected more than 360 bytes (3 windows of 120), got 314"),
        (("--window", 129), "tokens: expected at most 128 (max_position_embeddings), got 129"),
        (
            ("--window", 32, "--generate", 100, "--prompt", "x" * 29),
            "tokens: expected at most 128 (max_position_embeddings), got 129",
        ),
        (("--window", 32, "--plot", "q.bmp"), None),
        (("--window", 32, "--device", "no such device"), "no such device"),
    ],
)
def test_failures(run, model_dir, text_file, options, message):
    if message is None:
        pytest.importorskip("matplotlib")
        message = "q.bmp: expected a name that ends in"
    assert len(TEXT) == 314
    status, out, lines = run(model_dir, "--text", text_file, *options)
    assert (status, out, len(lines)) == (1, "", 1)
    assert message in lines[0]


def test_missing_files(run, model_dir, tmp_path, text_file):
    for arguments in ((model_dir, "--text", tmp_path / "none.txt"), (tmp_path / "none", "--text", text_file)):
        status, out, lines = run(*arguments, "--window", 32)
        assert (status, out, len(lines)) == (1, "", 1)
        assert "none" in lines[0]


def test_layout_that_an_fp8_checkpoint_does_not_have(run, tmp_path, text_file):
    tensors = dict(TENSORS)
    for name in list(TENSORS):
        if name.removesuffix(".weight").split(".", 3)[-1] in LINEARS:
            tensors[name], tensors[f"{name}_scale"] = reference.quantize_weight(TENSORS[name], "per_row")
    folder = write_model(tmp_path / "model", tensors)
    status, _, lines = run(folder, "--text", text_file, "--window", 32, "--weights", "block_128")
    assert status == 1
    assert lines == ["eval_llama: --weights: expected float or per_row, as the checkpoint is in FP8, got block_128"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "expected --text or --generate"),
        (("--generate", 4), "--generate: expected a --prompt of at least a byte"),
        (("--generate", 4, "--prompt", "a", "--plot", "q.png"), "--plot: expected --text, whose quality it draws"),
        (("--text", "t", "--k-format", "fp8"), "expected some of float, fp8_e4m3fn, fp8_e5m2, int8, int4, got 'fp8'"),
        (("--text", "t", "--weights", ","), "expected some of float, per_row, block_128, got ','"),
        (("--text", "t", "--granularity", "per_tensor"), "expected some of per_head, per_token, got 'per_tensor'"),
        (("--text", "t", "--group-size", 31), "expected an even number of 2 or more, got '31'"),
        (("--text", "t", "--windows", 0), "expected a number of 1 or more, got '0'"),
        (("--text", "t", "--window", "-5"), "expected a number of 2 or more, got '-5'"),
    ],
)
def test_bad_usage(run, model_dir, options, message):
    status, out, lines = run(model_dir, *options)
    assert (status, out) == (2, "")
    assert message in lines[-1]
