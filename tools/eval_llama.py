"""What our formats cost a real model: a Llama whose linear layers are W8A8 and whose K/V cache is quantized.

    python tools/eval_llama.py MODEL_DIR --text FILE                  # nats per byte, KL, top-1 agreement
    python tools/eval_llama.py MODEL_DIR --generate 100 --prompt "And Moses said unto "

MODEL_DIR: config.json and safetensors as Hugging Face has them, of a Llama whose tokens are bytes, with float or FP8 weights.
Norms, RoPE, attention, embeddings and lm_head are float32 in NumPy. Linear layers are float32 too, or W8A8 on the device
(`pyclquant.w8a8`). K (after RoPE) and V are written to the cache and read back from it at every step (`pyclquant.kv`).
What is called float is the same model without quantization; all else is compared with it.

The text is cut into windows without overlap, each with at least a byte behind it; the rest is left out. Each byte of a window
but the first is predicted, from those before it in the window. Exit status 0, 1, 2: fine, failed, bad usage.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyopencl as cl
import pyopencl.array as cla
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from pyclquant import cli, kv, plot, tables, w8a8
from pyclquant.checkpoint import Checkpoint, open_checkpoint
from pyclquant.device import ENVIRONMENT, Device
from pyclquant.errors import FileError, PyclquantError, ShapeError
from pyclquant.formats import FLOAT_DTYPES, FORMATS, Layout

Array = np.ndarray[Any, Any]
Step = Callable[[str], None]

F32 = np.dtype(np.float32)
FLOAT = "float"
"""Of weights and caches that are not quantized."""
FLOAT_BYTES = FLOAT_DTYPES["bfloat16"].itemsize
"""Bytes of an element of a float cache, as it is counted: engines store bfloat16."""
WEIGHTS = (FLOAT, *w8a8.SCALE_LAYOUTS)
CACHES = (FLOAT, *FORMATS)
GRANULARITIES = ("per_head", "per_token")
"""Of fp8 and int8; what is shared by more than a token cannot be appended to."""
GROUP_SIZE = 32
WINDOW = 1024
VOCABULARY = 256
QUERIES = 256
"""Positions whose attention is computed together: their scores fit a CPU's cache, and they need not look at later keys."""

PROJECTIONS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""Linear layers that share an input, which are one weight of several segments."""


# ---- what is compared ----


@dataclass(frozen=True)
class Storage:
    """How K or V is stored. format: float or one of FORMATS.  granularity, group_size: as of `kv.quantize`."""

    format: str
    granularity: str | None = None
    group_size: int | None = None

    @staticmethod
    def of(format: str, granularity: str, group_size: int) -> Storage:
        """With what the format needs of both."""
        if format == FLOAT:
            return Storage(FLOAT)
        return Storage(format, "per_group", group_size) if FORMATS[format].asymmetric else Storage(format, granularity)

    def __str__(self) -> str:
        scales = f"group {self.group_size}" if self.group_size else self.granularity
        return f"{self.format} {scales}" if scales else self.format

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """Blocks of a tensor [tokens, heads, head_dim]. Raises ShapeError for a group size that does not exist."""
        return Layout.of(shape, FORMATS[self.format], self.granularity, self.group_size)

    def token_bytes(self, heads: int, head_dim: int) -> int:
        """Bytes of one token in one layer: codes, scales and mins."""
        if self.format == FLOAT:
            return heads * head_dim * FLOAT_BYTES
        layout, fmt = self.layout((1, heads, head_dim)), FORMATS[self.format]
        scales = int(np.prod(layout.scales_shape)) * F32.itemsize
        return int(np.prod(layout.codes_shape)) * fmt.codes_dtype.itemsize + scales * (2 if fmt.asymmetric else 1)


@dataclass(frozen=True)
class Combination:
    """A point of the grid. weights: one of WEIGHTS."""

    weights: str
    k: Storage
    v: Storage

    @property
    def cache(self) -> str:
        """The cache in words."""
        return str(self.k) if self.k == self.v else f"K {self.k}, V {self.v}"

    def __str__(self) -> str:
        return f"weights {self.weights}, cache {self.cache}"


PLAIN = Combination(FLOAT, Storage(FLOAT), Storage(FLOAT))
"""The float path."""


def default_grid(weights: Sequence[str], group_size: int) -> list[Combination]:
    """Each weight layout with a float cache, each cache with float weights, and W8A8 with the caches that one would take."""
    int8, int4 = Storage("int8", "per_head"), Storage("int4", "per_group", group_size)
    caches = [Storage(f, g) for f, g in product(CACHES[1:], GRANULARITIES) if not FORMATS[f].asymmetric] + [int4]
    usual = [s for s in caches if s == int4 or (s.granularity == "per_head" and s.format != "fp8_e5m2")]
    alone = [Combination(w, Storage(FLOAT), Storage(FLOAT)) for w in weights]
    mixed = [Combination(FLOAT, int8, int4)] if FLOAT in weights else []
    return alone + mixed + [Combination(w, s, s) for w in weights for s in (caches if w == FLOAT else usual)]


# ---- the model ----


@dataclass(frozen=True)
class Shape:
    """Of a Llama, in its config's terms. eps: of the norms.  theta: of RoPE."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float
    positions: int

    @staticmethod
    def of(model: Checkpoint) -> Shape:
        """From config.json. Raises FileError for another architecture, an option that is not computed here, a missing key."""
        config = model.config

        def need(ok: bool, what: str, got: object) -> None:
            if not ok:
                raise FileError(f"{model.path}: config.json: expected {what}, got {got!r}")

        need(config.get("model_type") == "llama", "model_type 'llama'", config.get("model_type"))
        need(config.get("vocab_size") == VOCABULARY, f"vocab_size {VOCABULARY} (a token is a byte)", config.get("vocab_size"))
        need(config.get("hidden_act", "silu") == "silu", "hidden_act 'silu'", config.get("hidden_act"))
        for key in ("attention_bias", "mlp_bias"):
            need(not config.get(key), f"no {key}", config.get(key))
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        need(isinstance(rope, dict), "RoPE's parameters as an object", rope)
        kind = rope.get("rope_type", rope.get("type", "default"))
        need(kind == "default", "plain RoPE", kind)

        def count(key: str, default: object = None) -> int:
            value = config.get(key, default)
            need(type(value) is int and value > 0, f"{key} as a positive integer", value)
            return int(value)

        def positive(key: str, value: Any) -> float:
            need(type(value) in (int, float) and value > 0, f"{key} as a positive number", value)
            return float(value)

        hidden, heads = count("hidden_size"), count("num_attention_heads")
        kv_heads = count("num_key_value_heads", heads)
        head_dim = count("head_dim", hidden // heads)
        need(heads % kv_heads == 0, f"num_key_value_heads that divides {heads}", kv_heads)
        need(head_dim % 2 == 0, "an even head_dim", head_dim)
        return Shape(
            layers=count("num_hidden_layers"),
            hidden=hidden,
            intermediate=count("intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            eps=positive("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
            theta=positive("rope_theta", rope.get("rope_theta", config.get("rope_theta", 10000.0))),
            positions=count("max_position_embeddings", 2048),
        )

    def projection(self, name: str) -> tuple[int, int]:
        """N and K of a linear layer."""
        q, k = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (q, self.hidden),
            "k_proj": (k, self.hidden),
            "v_proj": (k, self.hidden),
            "o_proj": (self.hidden, q),
            "gate_proj": (self.intermediate, self.hidden),
            "up_proj": (self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
        }[name]


def names_of(layer: int, group: str) -> list[str]:
    """The linear layers of a group of PROJECTIONS, as the checkpoint calls them."""
    block = "self_attn" if group in ("qkv", "o") else "mlp"
    return [f"model.layers.{layer}.{block}.{name}" for name in PROJECTIONS[group]]


def all_names(shape: Shape) -> list[str]:
    """All linear layers that are quantized."""
    return [name for layer in range(shape.layers) for group in PROJECTIONS for name in names_of(layer, group)]


def weights_of(model: Checkpoint, shape: Shape) -> tuple[str, ...]:
    """Those of WEIGHTS that a checkpoint can have: all for float weights, float and its own layout for FP8."""
    schemes = {model.linear(name).scheme for name in all_names(shape)}
    own = {"block_128" if s == "block_128" else "per_row" for s in schemes - {FLOAT}}
    return tuple(w for w in WEIGHTS if w == FLOAT or not own or w in own)


def check_linears(model: Checkpoint, shape: Shape) -> None:
    """Raises FileError unless all linear layers are there, of their shapes."""
    for name in all_names(shape):
        linear, want = model.linear(name), shape.projection(name.rpartition(".")[2])
        if (linear.n, linear.k) != want:
            raise FileError(f"{model.path}: {name}: expected shape {list(want)} as of config.json, got {[linear.n, linear.k]}")


def float_tensor(model: Checkpoint, name: str, shape: tuple[int, ...]) -> Array:
    """A tensor as float32, FP8 codes times their scales. Raises FileError unless it is of this shape."""
    a = model.array(name)
    if a.shape != shape:
        raise FileError(f"{model.path}: {name}: expected shape {list(shape)} as of config.json, got {list(a.shape)}")
    linear = model.linears.get(name.removesuffix(".weight"))
    a = a.astype(F32)
    if linear is None or linear.scale is None:
        return a
    scales = model.scales(linear)
    if scales.ndim == 1:
        return a * scales[:, None]
    return a * scales.repeat(w8a8.CHUNK, 0)[: shape[0]].repeat(w8a8.CHUNK, 1)


class Layers(Protocol):
    """The linear layers of all blocks. nbytes: of the weights as they are stored."""

    nbytes: int

    def qkv(self, layer: int, x: Array) -> Array:
        """Q, K and V [T, N of all three] of x [T, hidden], side by side."""

    def o(self, layer: int, x: Array) -> Array:
        """What goes on of what attention found, [T, hidden]."""

    def mlp(self, layer: int, x: Array) -> Array:
        """Down(silu(gate(x)) * up(x)), [T, hidden]."""


class FloatLayers:
    """Layers in float32 on the host. nbytes: as in the checkpoint."""

    def __init__(self, model: Checkpoint, shape: Shape) -> None:
        def stacked(layer: int, group: str) -> Array:
            names = names_of(layer, group)
            return np.concatenate([float_tensor(model, f"{n}.weight", shape.projection(n.rpartition(".")[2])) for n in names])

        self._weights = [{group: stacked(layer, group) for group in PROJECTIONS} for layer in range(shape.layers)]
        self.nbytes = sum(model.array(f"{name}.weight").nbytes for name in all_names(shape))

    def qkv(self, layer: int, x: Array) -> Array:
        """See Layers."""
        return np.asarray(x @ self._weights[layer]["qkv"].T)

    def o(self, layer: int, x: Array) -> Array:
        """See Layers."""
        return np.asarray(x @ self._weights[layer]["o"].T)

    def mlp(self, layer: int, x: Array) -> Array:
        """See Layers."""
        gate, up = np.split(x @ self._weights[layer]["gate_up"].T, 2, axis=1)
        with np.errstate(over="ignore"):  # exp(-gate) may be Inf: then the quotient is 0, as it should be
            h = gate / (1 + np.exp(-gate)) * up
        return np.asarray(h @ self._weights[layer]["down"].T)


class W8A8Layers:
    """Layers in W8A8 on the device. scale_layout: per_row or block_128.

    Raises FileError or ShapeError when the checkpoint's weights cannot be used so.
    """

    def __init__(self, dev: Device, model: Checkpoint, shape: Shape, scale_layout: str) -> None:
        def weight(layer: int, group: str) -> w8a8.Weight:
            return w8a8.Weight(dev, [model.segment(dev, name, scale_layout) for name in names_of(layer, group)])

        self.dev = dev
        self._weights = [{group: weight(layer, group) for group in PROJECTIONS} for layer in range(shape.layers)]
        self._scratch = w8a8.Scratch.alloc(dev, max(w.k for w in self._weights[0].values()))
        self.nbytes = sum(a.nbytes for ws in self._weights for w in ws.values() for segment in w.segments for a in segment)

    def qkv(self, layer: int, x: Array) -> Array:
        """See Layers."""
        return self._in_parts(x, lambda part: self._proj(part, layer, "qkv"))

    def o(self, layer: int, x: Array) -> Array:
        """See Layers."""
        return self._in_parts(x, lambda part: self._proj(part, layer, "o"))

    def mlp(self, layer: int, x: Array) -> Array:
        """See Layers. What is between the two products stays on the device."""

        def both(part: Array) -> cla.Array:
            y = self._proj(part, layer, "gate_up")
            half = y.shape[1] // 2
            return self._proj(y[:, :half], layer, "down", up=y[:, half:])

        return self._in_parts(x, both)

    def _proj(self, x: Array | cla.Array, layer: int, group: str, up: cla.Array | None = None) -> cla.Array:
        return w8a8.proj(self.dev, x, self._weights[layer][group], "float32", up=up, scratch=self._scratch)

    def _in_parts(self, x: Array, run: Callable[[Array], cla.Array]) -> Array:
        """As many rows at a time as a projection takes, all enqueued before the first is read."""
        parts = [run(x[start : start + w8a8.MAX_ROWS]) for start in range(0, len(x), w8a8.MAX_ROWS)]
        return np.concatenate([part.get() for part in parts])


class Store:
    """Room for K or V of one layer, [capacity, heads, head_dim]."""

    def __init__(self, dev: Device, how: Storage, shape: tuple[int, int, int]) -> None:
        self.dev, self.how = dev, how
        if how.format == FLOAT:
            self._values = np.empty(shape, F32)
            return
        fmt, layout = FORMATS[how.format], how.layout(shape)
        self._heads = shape[1:]
        self._codes = cla.empty(dev.queue, layout.codes_shape, fmt.codes_dtype)
        self._scales = cla.empty(dev.queue, layout.scales_shape, F32)
        self._mins = cla.empty(dev.queue, layout.scales_shape, F32) if fmt.asymmetric else None

    def append(self, x: Array, start: int) -> Array:
        """Write x [T, heads, head_dim] behind the first `start` tokens, and read back all start + T."""
        stop = start + len(x)
        if self.how.format == FLOAT:
            self._values[start:stop] = x
            return self._values[:stop]
        how, part = self.how, self._tokens(start, stop)
        kv.quantize(self.dev, x, how.format, granularity=how.granularity, group_size=how.group_size, out=part)
        values: Array = kv.dequantize(self.dev, self._tokens(0, stop)).get()
        return values

    def _tokens(self, start: int, stop: int) -> kv.Quantized:
        """Those of the tokens start to stop, in place."""
        how, piece = self.how, slice(start, stop)
        mins = None if self._mins is None else self._mins[piece]
        shape = (stop - start, *self._heads)
        assert how.granularity is not None
        return kv.Quantized(how.format, how.granularity, how.group_size, shape, self._codes[piece], self._scales[piece], mins)


class Cache:
    """K and V of all layers, of up to `capacity` tokens. length: tokens that it holds."""

    def __init__(self, dev: Device, shape: Shape, k: Storage, v: Storage, capacity: int) -> None:
        room = (capacity, shape.kv_heads, shape.head_dim)
        self.layers = [(Store(dev, k, room), Store(dev, v, room)) for _ in range(shape.layers)]
        self.length = 0


class Llama:
    """What of a Llama is never quantized, and the way of tokens through all of it. Raises FileError for another model."""

    def __init__(self, model: Checkpoint) -> None:
        self.shape = shape = Shape.of(model)
        check_linears(model, shape)

        def tensor(name: str, *size: int) -> Array:
            return float_tensor(model, name, size)

        tied = bool(model.config.get("tie_word_embeddings"))
        self.embeddings = tensor("model.embed_tokens.weight", VOCABULARY, shape.hidden)
        self.lm_head = self.embeddings if tied else tensor("lm_head.weight", VOCABULARY, shape.hidden)
        self.last_norm = tensor("model.norm.weight", shape.hidden)
        self.norms = [
            tuple(tensor(f"model.layers.{n}.{w}.weight", shape.hidden) for w in ("input_layernorm", "post_attention_layernorm"))
            for n in range(shape.layers)
        ]

    def forward(self, tokens: Array, layers: Layers, cache: Cache) -> Array:
        """Logits [T, 256] of the bytes that follow tokens [T], which come behind those in the cache and are added to it."""
        shape, start = self.shape, cache.length
        stop = start + len(tokens)
        turn = rotation(np.arange(start, stop), shape)
        q_end, k_end = shape.heads * shape.head_dim, (shape.heads + shape.kv_heads) * shape.head_dim
        x = self.embeddings[tokens]
        for n, ((norm, post_norm), (k_store, v_store)) in enumerate(zip(self.norms, cache.layers, strict=True)):
            qkv = layers.qkv(n, rms_norm(x, norm, shape.eps))
            q, k, v = (a.reshape(len(tokens), -1, shape.head_dim) for a in np.split(qkv, [q_end, k_end], axis=1))
            keys = k_store.append(rotated(k, turn), start)
            values = v_store.append(np.ascontiguousarray(v), start)
            x = x + layers.o(n, attention(rotated(q, turn), keys, values))
            x = x + layers.mlp(n, rms_norm(x, post_norm, shape.eps))
        cache.length = stop
        return np.asarray(rms_norm(x, self.last_norm, shape.eps) @ self.lm_head.T)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Each row of x [T, hidden] over its root mean square, times weight."""
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + np.float32(eps)) * weight)


def rotation(positions: Array, shape: Shape) -> tuple[Array, Array]:
    """Cosine and sine [T, 1, head_dim / 2] of RoPE's angles."""
    frequency = (1.0 / shape.theta ** (np.arange(0, shape.head_dim, 2) / shape.head_dim)).astype(F32)
    angle = positions.astype(F32)[:, None, None] * frequency
    return np.cos(angle), np.sin(angle)


def rotated(x: Array, turn: tuple[Array, Array]) -> Array:
    """RoPE on x [T, heads, head_dim], the first half of a head against the second."""
    (cos, sin), (a, b) = turn, np.split(x, 2, axis=2)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=2)


def attention(q: Array, k: Array, v: Array) -> Array:
    """Causal attention [T, heads * head_dim].

    q: [T, heads, head_dim], of the last T tokens of k and v [S, kv_heads, head_dim].
    """
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    past = len(k) - tokens
    queries = np.ascontiguousarray(q.reshape(tokens, kv_heads, group, dim).transpose(1, 0, 2, 3)) * np.float32(dim**-0.5)
    keys, values = np.ascontiguousarray(k.transpose(1, 2, 0)), np.ascontiguousarray(v.transpose(1, 0, 2))
    later = np.triu(np.ones((QUERIES, QUERIES), bool), 1)[:, None]
    found = np.empty((tokens, kv_heads, group, dim), F32)
    for head in range(kv_heads):
        for start in range(0, tokens, QUERIES):
            count = min(QUERIES, tokens - start)
            seen = past + start + count
            mine = queries[head, start : start + count].reshape(-1, dim)
            scores = (mine @ keys[head, :, :seen]).reshape(count, group, seen)
            np.copyto(scores[:, :, seen - count :], -np.inf, where=later[:count, :, :count])
            scores -= scores.max(axis=2, keepdims=True)
            np.exp(scores, out=scores)
            mixed = (scores.reshape(-1, seen) @ values[head, :seen]).reshape(count, group, dim)
            found[start : start + count, head] = mixed / scores.sum(axis=2, keepdims=True)
    return found.reshape(tokens, heads * dim)


# ---- quality ----


@dataclass(frozen=True)
class Score:
    """Sums over predictions. nats: -log of what each byte was given.  kl: divergence from the float path.

    agree: how often the likeliest byte was the float path's.  count: predictions.
    """

    nats: float = 0.0
    kl: float = 0.0
    agree: int = 0
    count: int = 0

    def __add__(self, other: Score) -> Score:
        return Score(self.nats + other.nats, self.kl + other.kl, self.agree + other.agree, self.count + other.count)

    @staticmethod
    def of(window: Array, logits: Array, reference: Array) -> Score:
        """Of one window: logits [T, 256] of this and of the float path."""
        wanted, got, true = window[1:], log_softmax(logits[:-1]), log_softmax(reference[:-1])
        return Score(
            nats=-float(got[np.arange(len(wanted)), wanted].sum()),
            kl=float((np.exp(true) * (true - got)).sum()),
            agree=int((got.argmax(axis=1) == true.argmax(axis=1)).sum()),
            count=len(wanted),
        )


def scored(windows: Array, logits: Sequence[Array], reference: Sequence[Array]) -> Score:
    """Of all windows."""
    return sum((Score.of(*one) for one in zip(windows, logits, reference, strict=True)), Score())


def log_softmax(logits: Array) -> Array:
    """In float64, over the last axis."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True)))


@dataclass(frozen=True)
class Quality:
    """Of one combination. nats_per_byte; increase: over the float path's, as a share of it; kl: nats a prediction.

    top1: share of predictions whose likeliest byte is the float path's.
    weight_bytes: of the linear layers as they are stored.  cache_bytes: of a token, all layers.
    read_bytes: what a step of decoding with a whole window behind it reads of both.
    """

    combination: Combination
    nats_per_byte: float
    increase: float
    kl: float
    top1: float
    weight_bytes: int
    cache_bytes: int
    read_bytes: int
    seconds: float

    def json(self) -> dict[str, Any]:
        """For programs."""
        return {**asdict(self.combination), **{k: v for k, v in asdict(self).items() if k != "combination"}}


@dataclass(frozen=True)
class Generated:
    """A greedy continuation. equal: bytes from its beginning that are the float path's."""

    combination: Combination
    continuation: bytes
    equal: int

    def json(self) -> dict[str, Any]:
        """For programs."""
        text = self.continuation.decode("utf-8", "replace")
        return {**asdict(self.combination), "continuation": text, "equal_bytes": self.equal}


def equal_bytes(a: bytes, b: bytes) -> int:
    """How many bytes from the beginning are the same."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Evaluation:
    """A model on a device; its layers are made once for each kind of weights."""

    def __init__(self, dev: Device, checkpoint: Checkpoint, llama: Llama) -> None:
        self.dev, self.checkpoint, self.llama, self.shape = dev, checkpoint, llama, llama.shape
        self._layers: dict[str, Layers] = {}

    def layers(self, weights: str) -> Layers:
        """The linear layers with these weights."""
        if weights not in self._layers:
            if weights == FLOAT:
                self._layers[weights] = FloatLayers(self.checkpoint, self.shape)
            else:
                self._layers[weights] = W8A8Layers(self.dev, self.checkpoint, self.shape, weights)
        return self._layers[weights]

    def cache(self, combination: Combination, capacity: int) -> Cache:
        """An empty cache."""
        return Cache(self.dev, self.shape, combination.k, combination.v, capacity)

    def qualities(self, windows: Array, grid: Sequence[Combination], step: Step) -> Iterator[Quality]:
        """Measure each combination on windows [W, T] of bytes. step: called when a window of one begins."""
        reference, seconds = self.run(windows, PLAIN, step)
        base = scored(windows, reference, reference)
        for combination in grid:
            score = base
            if combination != PLAIN:
                logits, seconds = self.run(windows, combination, step)
                score = scored(windows, logits, reference)
            yield self.quality(combination, score, base, windows.shape[1], seconds)

    def run(self, windows: Array, combination: Combination, step: Step) -> tuple[list[Array], float]:
        """Logits of all windows, and the seconds that they took."""
        cache, layers = self.cache(combination, windows.shape[1]), self.layers(combination.weights)
        started = time.perf_counter()
        logits = []
        for window in windows:
            step(str(combination))
            cache.length = 0
            logits.append(self.llama.forward(window, layers, cache))
        return logits, time.perf_counter() - started

    def quality(self, combination: Combination, score: Score, base: Score, window: int, seconds: float) -> Quality:
        """Of the sums over all windows."""
        heads, dim = self.shape.kv_heads, self.shape.head_dim
        cached = self.shape.layers * sum(s.token_bytes(heads, dim) for s in (combination.k, combination.v))
        stored = self.layers(combination.weights).nbytes
        return Quality(
            combination,
            nats_per_byte=score.nats / score.count,
            increase=score.nats / base.nats - 1,
            kl=score.kl / score.count,
            top1=score.agree / score.count,
            weight_bytes=stored,
            cache_bytes=cached,
            read_bytes=stored + window * cached,
            seconds=seconds,
        )

    def generated(self, prompt: Array, count: int, grid: Sequence[Combination], step: Step) -> Iterator[Generated]:
        """The greedy continuation of each combination, beside that of the float path. step: called before each byte."""
        plain = self.continuation(prompt, count, PLAIN, step)
        for combination in grid:
            mine = plain if combination == PLAIN else self.continuation(prompt, count, combination, step)
            yield Generated(combination, mine, equal_bytes(plain, mine))

    def continuation(self, prompt: Array, count: int, combination: Combination, step: Step) -> bytes:
        """The `count` bytes that greedy decoding puts behind the prompt, one at a time."""
        cache = self.cache(combination, len(prompt) + count)
        layers = self.layers(combination.weights)
        found = bytearray()
        tokens = prompt
        for _ in range(count):
            step(str(combination))
            token = int(self.llama.forward(tokens, layers, cache)[-1].argmax())
            found.append(token)
            tokens = np.array([token])
        return bytes(found)


# ---- command line ----


def quality_table(rows: Sequence[Quality]) -> Table:
    """A row for each combination."""
    figures = ("nats/byte", "change", "KL", "top-1", "weights", "cache, B/token", "s")
    t = tables.table("weights", "K/V cache", *figures, right=figures, whole=("weights", "K/V cache"))
    for q in rows:
        t.add_row(
            q.combination.weights,
            q.combination.cache,
            f"{q.nats_per_byte:.6f}",
            f"{q.increase:+.3%}",
            f"{q.kl:.2e}",
            f"{q.top1:.2%}",
            tables.size(q.weight_bytes),
            str(q.cache_bytes),
            tables.number(q.seconds),
        )
    return t


def generated_table(rows: Sequence[Generated]) -> Table:
    """A row for each combination."""
    t = tables.table("weights", "K/V cache", "equal", "continuation", right=("equal",), whole=("weights", "K/V cache"))
    for g in rows:
        text = g.continuation.decode("utf-8", "replace").replace("\n", "⏎")
        t.add_row(g.combination.weights, g.combination.cache, str(g.equal), Text(text))
    return t


MARKERS = dict(zip(WEIGHTS, "os^", strict=True))


def plot_quality(rows: Sequence[Quality], title: str, path: Path) -> None:
    """Loss of quality against the bytes of a token in the cache, and against all that a step reads. Raises FileError."""
    fig, (cached, read) = plot.figure(title, [1, 1])
    for q in rows:
        look: dict[str, Any] = {"s": 45, "alpha": 0.8, "linewidth": 0, "marker": MARKERS[q.combination.weights]}
        colour = plot.COLOURS.get(q.combination.k.format, plot.GREY)
        cached.scatter(q.cache_bytes, 100 * q.increase, color=colour, **look)
        if q.combination.k.format != q.combination.v.format:
            cached.annotate(f"V {q.combination.v.format}", (q.cache_bytes, 100 * q.increase), (6, 4), textcoords="offset points")
        if q.kl > 0:  # the float path itself has no place on a logarithmic axis
            read.scatter(q.read_bytes * 1e-6, q.kl, color=colour, **look)
    for name in dict.fromkeys(q.combination.k.format for q in rows):
        read.scatter([], [], color=plot.COLOURS.get(name, plot.GREY), label=f"K/V {name}")
    for name in dict.fromkeys(q.combination.weights for q in rows):
        read.scatter([], [], color=plot.GREY, marker=MARKERS[name], label=f"weights {name}")
    cached.axhline(0, color=plot.GREY, linewidth=1)
    cached.set(xlabel="bytes of a token in the K/V cache, all layers", ylabel="more nats per byte than the float path, %")
    cached.set(xlim=(0, None))
    read.set(xlabel="MB of weights and cache that a step reads, window full", ylabel="KL from the float path, nats", yscale="log")
    read.set(xlim=(0, None))
    read.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=3)
    plot.save(fig, path)


@contextmanager
def progress(total: int) -> Iterator[Step]:
    """Tell on stderr what is done and how long the rest takes: a bar on a terminal, else a line whenever the name changes."""
    done, last, started = -1, "", time.perf_counter()

    def line(name: str) -> None:
        nonlocal done, last
        done += 1
        if name != last:
            left = (time.perf_counter() - started) / done * (total - done) if done else None
            estimate = f", about {left:.0f} s left" if left is not None else ""
            print(f"eval_llama: {name} ({done} of {total} steps done{estimate})", file=sys.stderr)
        last = name

    if not sys.stderr.isatty():
        yield line
        return
    columns = (BarColumn(24), TextColumn("{task.description}", markup=False), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)

        def step(name: str) -> None:
            nonlocal done
            done += 1
            bar.update(task, completed=done, description=name)

        yield step


def some_of(allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """An option's values, joined by commas, each once."""

    def parse(text: str) -> tuple[str, ...]:
        values = cli.joined([text])
        wrong = [v for v in values if v not in allowed]
        if wrong or not values:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(allowed)}, got {text!r}")
        return values

    return parse


def at_least(least: int, multiple: int = 1) -> Callable[[str], int]:
    """An option's number."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least or int(text) % multiple:
            what = "an even number" if multiple == 2 else "a number"
            raise argparse.ArgumentTypeError(f"expected {what} of {least} or more, got {text!r}")
        return int(text)

    return parse


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; exits with status 2 on bad usage."""
    parser = argparse.ArgumentParser(
        prog="eval_llama",
        description=(__doc__ or "").partition("\n")[0],
        epilog="With any of --weights, --k-format, --v-format and --granularity: every combination of those given.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL_DIR", type=Path, help="config.json and safetensors of a Llama whose tokens are bytes")
    add("--text", metavar="FILE", type=Path, help="measure quality on this")
    add("--window", metavar="BYTES", type=at_least(2), default=WINDOW, help=f"default {WINDOW}")
    add("--windows", metavar="N", type=at_least(1), help="only the first N windows of the text")
    add("--generate", metavar="N", type=at_least(1), help="decode N bytes greedily behind --prompt, one at a time")
    add("--prompt", metavar="TEXT", help="what to begin with")
    add("--weights", type=some_of(WEIGHTS), help=f"of {', '.join(WEIGHTS)}, joined by commas; default float")
    add("--k-format", type=some_of(CACHES), help=f"of {', '.join(CACHES)}, joined by commas; default float")
    add("--v-format", type=some_of(CACHES), help="likewise; default: as K")
    add("--granularity", type=some_of(GRANULARITIES), help=f"of fp8 and int8: {', '.join(GRANULARITIES)}; default per_head")
    add("--group-size", metavar="N", type=at_least(2, 2), default=GROUP_SIZE, help=f"of int4; default {GROUP_SIZE}")
    add("--json", action="store_true", help="print JSON alone, for programs")
    add("--plot", metavar="OUT.png", type=Path, help="draw quality against bytes (needs matplotlib)")
    add(
        "--device",
        metavar="WHICH",
        default=os.environ.get(ENVIRONMENT) or None,
        help="as `pyclquant probe` numbers them, or a name",
    )
    options = parser.parse_args(arguments)
    if options.text is None and options.generate is None:
        parser.error("expected --text or --generate")
    if options.generate is not None and not options.prompt:
        parser.error("--generate: expected a --prompt of at least a byte")
    if options.plot is not None and options.text is None:
        parser.error("--plot: expected --text, whose quality it draws")
    return options


def chosen_grid(options: argparse.Namespace, available: Sequence[str]) -> list[Combination]:
    """What the options ask for. Raises PyclquantError for weights that the checkpoint does not have."""
    if not any((options.weights, options.k_format, options.v_format, options.granularity)):
        return default_grid(available, options.group_size)
    weights = options.weights or (FLOAT,)
    for w in weights:
        if w not in available:
            raise PyclquantError(f"--weights: expected {' or '.join(available)}, as the checkpoint is in FP8, got {w}")
    granularities = options.granularity or GRANULARITIES[:1]
    ks = [Storage.of(f, g, options.group_size) for f, g in product(options.k_format or (FLOAT,), granularities)]
    vs = [Storage.of(f, g, options.group_size) for f, g in product(options.v_format or (), granularities)]
    caches = product(ks, vs) if vs else zip(ks, ks, strict=True)
    return list(dict.fromkeys(Combination(w, k, v) for w, (k, v) in product(weights, caches)))


def windows_of(text: bytes, size: int, most: int | None) -> Array:
    """The windows [W, size]. Raises ShapeError when the text is too short for one, or for `most`."""
    count = (len(text) - 1) // size
    least = 1 if most is None else most
    if count < least:
        raise ShapeError(f"text: expected more than {least * size} bytes ({least} windows of {size}), got {len(text)}")
    count = least if most is not None else count
    return np.frombuffer(text[: count * size], np.uint8).reshape(count, size)


def evaluate(options: argparse.Namespace) -> None:
    """Do what the options say, and print it. Raises PyclquantError."""
    if options.plot is not None:
        plot.check_plot(options.plot)
    checkpoint = open_checkpoint(options.model)
    llama = Llama(checkpoint)
    prompt = np.frombuffer((options.prompt or "").encode(), np.uint8)
    longest = max(options.window if options.text else 0, len(prompt) + options.generate if options.generate else 0)
    if longest > llama.shape.positions:
        raise ShapeError(f"tokens: expected at most {llama.shape.positions} (max_position_embeddings), got {longest}")
    grid = chosen_grid(options, weights_of(checkpoint, llama.shape))
    windows = windows_of(read(options.text), options.window, options.windows) if options.text else None
    evaluation = Evaluation(cli.pick(options.device, options.json), checkpoint, llama)
    runs = len({PLAIN, *grid})
    qualities: list[Quality] = []
    generated: list[Generated] = []
    if windows is not None:
        with progress(runs * len(windows)) as step:
            qualities += evaluation.qualities(windows, grid, step)
    if options.generate is not None:
        with progress(runs * options.generate) as step:
            generated += evaluation.generated(prompt, options.generate, grid, step)
    device = evaluation.dev.name
    if options.plot is not None:
        plot_quality(qualities, f"{options.model.name} on {options.text.name}, {device}", options.plot)
    if options.json:
        report: dict[str, Any] = {"device": device, "model": str(options.model)}
        if windows is not None:
            report |= {"text": str(options.text), "window": options.window, "windows": len(windows)}
            report |= {"qualities": [q.json() for q in qualities]}
        if generated:
            report |= {"prompt": options.prompt, "generated": [g.json() for g in generated]}
        cli.print_json(report)
        return
    out = cli.console()
    out.print(f"{options.model} on {device}", style="bold cyan", markup=False)
    if windows is not None:
        out.print(f"{options.text}: {len(windows)} windows of {options.window} bytes", markup=False)
        out.print(quality_table(qualities))
    if generated:
        out.print(f"behind {options.prompt!r}:", markup=False)
        out.print(generated_table(generated))
    if options.plot is not None:
        out.print(f"wrote {options.plot}", markup=False)


def read(path: Path) -> bytes:
    """A whole file. Raises FileError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(f"{path}: expected a text to read, got: {error.strerror or error}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; an error that a user can cause is one line on stderr."""
    options = parsed(arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cl.CompilerWarning)  # logs of builds that went well
        try:
            evaluate(options)
        except PyclquantError as error:
            reason = str(error)
        except cl.Error as error:
            reason = f"device: expected the driver to do this work, got: {error}"
        except MemoryError as error:
            reason = f"host: expected enough memory for this work, got: {error}"
        else:
            return 0
    print(f"eval_llama: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
