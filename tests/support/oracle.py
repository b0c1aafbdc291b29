"""The slow, obvious engine: one request, one token at a time, NumPy float64, no drafts.

Reads the checkpoints by their published tensor names. It shares nothing with jaxspec but the noise,
which is part of the contract: a function of (seed, position).
"""

import dataclasses
import functools
import json
from pathlib import Path

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy, for safetensors
import numpy as np
from prefixes import by_min_p, by_prefix
from safetensors import safe_open

from jaxspec.sampling import Use, gumbel_noise

_LAYERS = "model.layers."
_BETAS = ("fast", 32), ("slow", 1)
_MSCALES = "mscale", "mscale_all_dim"
TIE = 1e-3  # two scores nearer than this may fall either way: rounding differs with the batch


def _silu(x):
    return x / (1 + np.exp(-x))


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _unit(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def magnitude(rope):
    """What cosines and sines are multiplied by."""
    if rope.get("rope_type") != "yarn":
        return 1.0
    growth = [0.1 * rope.get(name, 0) * np.log(rope["factor"]) + 1 for name in _MSCALES]
    both = all(rope.get(name) for name in _MSCALES)
    return growth[0] / growth[1] if both else 0.1 * np.log(rope["factor"]) + 1


def turns(rope, dim):
    """Radians that each pair of `dim` channels turns a token, by the wavelength of each."""
    plain = rope["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return plain
    length, factor = rope["original_max_position_embeddings"], rope["factor"]
    if kind == "yarn":
        ends = [length / (2 * np.pi * rope.get(f"beta_{end}", at)) for end, at in _BETAS]
        low, high = (dim * np.log(end) / (2 * np.log(rope["rope_theta"])) for end in ends)
        if rope.get("truncate", True):
            low, high = np.floor(low), np.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        share = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
        return plain / factor * share + plain * (1 - share)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    wavelength = 2 * np.pi / plain
    share = (length / wavelength - low) / (high - low)
    between = (1 - share) * plain / factor + share * plain
    slow, fast = wavelength > length / low, wavelength < length / high
    return np.where(slow, plain / factor, np.where(fast, plain, between))


def layer_of(prefix):
    """The number of the layer of a tensor's name."""
    return int(prefix.split(".")[2])


class Oracle:
    """A checkpoint, and the greedy or sampled continuation of any prompt."""

    def __init__(self, folder: Path):
        self.weights = {}
        with safe_open(folder / "model.safetensors", "np") as file:
            for name in file.keys():  # noqa: SIM118  not a dict
                short = name.replace("model.language_model.", "model.")
                short = short.replace("backbone.", "model.")
                self.weights[short] = file.get_tensor(name).astype(np.float64)
        config = json.loads((folder / "config.json").read_text())
        self.config = config.get("text_config", config)
        self.is_hybrid = self.config["model_type"].startswith(("qwen3_5", "qwen3_next"))
        names = "rms_norm_eps", "layer_norm_epsilon", "norm_eps"
        self.eps = next(self.config[name] for name in names if name in self.config)
        names = (
            "model.embed_tokens.weight",
            "model.embeddings.weight",
            "model.word_embeddings.weight",
        )
        self.embedding = next(self.weights[name] for name in names if name in self.weights)
        self.head = self.weights.get("lm_head.weight", self.embedding)

    def start(self) -> "Run":
        import attending_oracle
        import hybrid_oracle
        import latent_oracle
        import mamba_oracle

        runs = hybrid_oracle.RUNS | latent_oracle.RUNS | mamba_oracle.RUNS
        runs = runs | attending_oracle.RUNS
        return runs.get(self.config["model_type"], Run)(self)


class Run:
    """One sequence: feed a token, get the scores of the next."""

    def __init__(self, oracle: Oracle):
        self.oracle, self.position = oracle, 0
        layers = {int(name.split(".")[2]) for name in oracle.weights if name.startswith(_LAYERS)}
        self.memory = [{} for _ in layers]
        self.streams = []  # before each layer and behind the last, of the token that was fed last

    def feed(self, token: int) -> np.ndarray:
        oracle, config = self.oracle, self.oracle.config
        kinds = config.get("layer_types") if oracle.is_hybrid else None
        x, self.streams = oracle.embedding[token], []
        for layer in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            self.streams.append(x)
            linear = kinds is not None and kinds[layer] == "linear_attention"
            mix, name = (self._attention, "self_attn.")
            if linear:
                mix, name = self._gated_delta_net, "linear_attn."
            x = x + mix(
                self._norm(x, prefix + "input_layernorm"), prefix + name, self.memory[layer]
            )
            x = x + self._mlp(self._norm(x, prefix + "post_attention_layernorm"), prefix + "mlp.")
        self.streams.append(x)
        self.position += 1
        return oracle.head @ self._norm(x, "model.norm")

    def _w(self, name):
        return self.oracle.weights[name + ".weight"]

    def _rms(self, x):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.oracle.eps)

    def _norm(self, x, name):
        return self._rms(x) * (self._w(name) + self.oracle.is_hybrid)

    def _head_norm(self, x, name):
        return self._norm(x, name) if f"{name}.weight" in self.oracle.weights else x  # Llama's

    def _mlp(self, x, prefix):
        if prefix + "gate.weight" in self.oracle.weights:
            return self._experts(x, prefix)
        gate = _silu(self._w(prefix + "gate_proj") @ x)
        return self._w(prefix + "down_proj") @ (gate * (self._w(prefix + "up_proj") @ x))

    def _experts(self, x, prefix):
        config, scores = self.oracle.config, self._w(prefix + "gate") @ x
        score = np.exp(scores - scores.max())
        score /= score.sum()
        chosen = np.argsort(-score, kind="stable")[: config["num_experts_per_tok"]]
        if config.get("norm_topk_prob", True):
            score /= score[chosen].sum()
        y = sum(score[expert] * self._expert(x, f"{prefix}experts.", expert) for expert in chosen)
        if prefix + "shared_expert_gate.weight" in self.oracle.weights:
            gate = _sigmoid(self._w(prefix + "shared_expert_gate") @ x)
            y = y + gate * self._mlp(x, prefix + "shared_expert.")
        return y

    def _expert(self, x, prefix, expert):
        if f"{prefix}{expert}.down_proj.weight" in self.oracle.weights:
            return self._mlp(x, f"{prefix}{expert}.")
        both, down = (
            self.oracle.weights[prefix + n][expert] for n in ("gate_up_proj", "down_proj")
        )
        gate, up = np.split(both @ x, 2)
        return down @ (_silu(gate) * up)

    def _attention(self, x, prefix, memory):
        config = self.oracle.config
        heads = config["num_attention_heads"]
        dim = config.get("head_dim") or config["hidden_size"] // heads
        query = self._project(x, prefix + "q_proj").reshape(heads, -1)
        query, gate = query[:, :dim], query[:, dim:]
        key = self._project(x, prefix + "k_proj").reshape(-1, dim)
        value = self._project(x, prefix + "v_proj").reshape(-1, dim)
        query = self._rotate(self._head_norm(query, prefix + "q_norm"))
        key = self._rotate(self._head_norm(key, prefix + "k_norm"))
        memory.setdefault("kv", []).append((key, value))
        kinds = config.get("layer_types")
        if kinds and kinds[layer_of(prefix)] == "sliding_attention":
            del memory["kv"][: -config["sliding_window"]]
        keys, values = (np.stack(part) for part in zip(*memory["kv"], strict=True))
        group = heads // key.shape[0]
        keys, values = np.repeat(keys, group, 1), np.repeat(values, group, 1)
        scores = np.einsum("hd,thd->ht", query, keys) * self._score_scale(dim)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        total = weights.sum(-1, keepdims=True)
        if (sinks := self.oracle.weights.get(prefix + "sinks")) is not None:
            total = total + np.exp(sinks[:, None] - scores.max(-1, keepdims=True))
        mixed = np.einsum("ht,thd->hd", weights / total, values)
        if self.oracle.is_hybrid:
            mixed = mixed * _sigmoid(gate)
        return self._project(mixed.ravel(), prefix + "o_proj")

    def _project(self, x, name):
        return self._w(name) @ x + self.oracle.weights.get(name + ".bias", 0.0)

    def _score_scale(self, dim):
        return dim**-0.5

    def _rotate(self, x):
        rope = self.oracle.config.get("rope_parameters")
        if rope is None or "position_embedding_type" in self.oracle.config:  # Granite has none
            return x
        dim = int(x.shape[-1] * rope.get("partial_rotary_factor", 1.0))
        angle = self.position * turns(rope, dim)
        cos, sin, half = np.cos(angle), np.sin(angle), dim // 2
        cos, sin = magnitude(rope) * cos, magnitude(rope) * sin
        a, b, rest = x[:, :half], x[:, half:dim], x[:, dim:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def _projections(self, x, prefix, key_heads, dk):
        if prefix + "in_proj_qkvz.weight" not in self.oracle.weights:
            return (self._w(f"{prefix}in_proj_{name}") @ x for name in ("qkv", "z", "b", "a"))
        heads = (self._w(prefix + "in_proj_qkvz") @ x).reshape(key_heads, -1)
        q, k, values = heads[:, :dk], heads[:, dk : 2 * dk], heads[:, 2 * dk :]
        v, z = np.split(values, 2, axis=1)
        b, a = np.split((self._w(prefix + "in_proj_ba") @ x).reshape(key_heads, -1), 2, axis=1)
        mix = np.concatenate([part.ravel() for part in (q, k, v)])
        return mix, z.ravel(), b.ravel(), a.ravel()

    def _gated_delta_net(self, x, prefix, memory):
        config = self.oracle.config
        names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        key_heads, value_heads, dk, dv = (config["linear_" + name] for name in names)
        mix, z, b, a = self._projections(x, prefix, key_heads, dk)
        taps = self._w(prefix + "conv1d")[:, 0]
        window = memory.setdefault("window", [np.zeros_like(mix)] * taps.shape[1])
        window.append(mix)
        del window[0]
        mix = _silu(sum(taps[:, i] * past for i, past in enumerate(window)))
        query, key, value = np.split(mix, [key_heads * dk, 2 * key_heads * dk])
        group = value_heads // key_heads
        query = np.repeat(_unit(query.reshape(key_heads, dk)) * dk**-0.5, group, 0)
        key = np.repeat(_unit(key.reshape(key_heads, dk)), group, 0)
        value = value.reshape(value_heads, dv)
        weights = self.oracle.weights
        step = a + weights[prefix + "dt_bias"]
        decay = np.exp(-np.exp(weights[prefix + "A_log"]) * np.logaddexp(0, step))
        beta = _sigmoid(b)
        state = memory.get("state", np.zeros((value_heads, dv, dk))) * decay[:, None, None]
        change = beta[:, None] * (value - np.einsum("hvk,hk->hv", state, key))
        memory["state"] = state = state + change[:, :, None] * key[:, None, :]
        out = np.einsum("hvk,hk->hv", state, query)
        gate = _silu(z.reshape(value_heads, dv))
        return (
            self._w(prefix + "out_proj")
            @ (self._rms(out) * self._w(prefix + "norm") * gate).ravel()
        )


@dataclasses.dataclass
class Expected:
    """What a request must give: tokens, and at each the scores that decided."""

    tokens: list[int]
    scores: list[np.ndarray]

    def check(self, got: list[int], what: str = "") -> bool:
        """Assert equality up to a tie; True: a tie ended the comparison early."""
        for index, (want, token) in enumerate(zip(self.tokens, got, strict=False)):
            if want != token:
                gap = self.scores[index][want] - self.scores[index][token]
                assert gap < TIE, f"{what}: token {index} is {token}, not {want}, by {gap:.2g}"
                return True
        assert len(got) == len(self.tokens), f"{what}: {len(got)} tokens, not {len(self.tokens)}"
        return False


def _keep(scores, top_k, top_p):
    order = np.argsort(-scores, kind="stable")
    kept = order[: top_k if top_k > 0 else None]
    if top_p < 1:
        mass = np.exp(scores[kept] - scores[kept[0]])
        before = np.cumsum(mass / mass.sum()) - mass / mass.sum()
        kept = kept[before < top_p]
    masked = np.full_like(scores, -np.inf)
    masked[kept] = scores[kept]
    return masked


@functools.lru_cache(maxsize=4096)
def _noise(seed, position, vocab):
    at = np.array([seed], np.uint32).astype(np.int32), np.array([position], np.int32)
    return np.asarray(gumbel_noise(*map(np.asarray, at), Use.TARGET, vocab))[0].astype(np.float64)


def expect(
    oracle: Oracle, prompt, params, seed: int = 0, stop_ids=(), limit=None, bad_words=()
) -> Expected:
    """The continuation of `prompt` under `params`, by the definition."""
    run, tokens, scores = oracle.start(), [], []
    for token in prompt:
        logits = run.feed(token)
    while True:
        score = by_prefix(logits, params, prompt, tokens, stop_ids, bad_words)
        if params.temperature:
            score = by_min_p(score / params.temperature, params.min_p)
            score = _keep(score, params.top_k, params.top_p)
            score = score + _noise(seed, len(prompt) + len(tokens), len(score))
        tokens.append(int(score.argmax()))
        scores.append(score)
        if tokens[-1] in stop_ids or len(tokens) == (limit or params.max_tokens):
            return Expected(tokens, scores)
        logits = run.feed(tokens[-1])
