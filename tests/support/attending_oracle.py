"""The oracle of `oracle.py` for dense Granite, gpt-oss and Gemma 4, in NumPy float64."""

import numpy as np
from oracle import Run, _sigmoid, layer_of


class DenseGraniteRun(Run):
    """Llama's layers, with factors at the activations."""

    def feed(self, token):
        oracle, by = self.oracle, self.oracle.config["residual_multiplier"]
        x = oracle.embedding[token] * oracle.config["embedding_multiplier"]
        for layer, memory in enumerate(self.memory):
            prefix = f"model.layers.{layer}."
            normed = self._norm(x, prefix + "input_layernorm")
            x = x + by * self._attention(normed, prefix + "self_attn.", memory)
            normed = self._norm(x, prefix + "post_attention_layernorm")
            x = x + by * self._mlp(normed, prefix + "mlp.")
        self.position += 1
        return oracle.head @ self._norm(x, "model.norm") / oracle.config["logits_scaling"]

    def _score_scale(self, dim):
        return self.oracle.config["attention_multiplier"]


class GptOssRun(Run):
    """Experts with biases in every layer, whose matrices have the inputs first."""

    def _mlp(self, x, prefix):
        scores = self._project(x, prefix + "router")
        chosen = np.argsort(-scores, kind="stable")[: self.oracle.config["num_experts_per_tok"]]
        share = np.exp(scores[chosen] - scores[chosen].max())
        parts = (self._one(x, prefix + "experts.", expert) for expert in chosen)
        return sum(w * y for w, y in zip(share / share.sum(), parts, strict=True))

    def _one(self, x, prefix, expert):
        def product(x, name):
            matrix, bias = (self.oracle.weights[prefix + name + end] for end in ("", "_bias"))
            return x @ matrix[expert] + bias[expert]

        both = product(x, "gate_up_proj")
        gate, up = np.minimum(both[::2], 7.0), np.clip(both[1::2], -7.0, 7.0)
        return product((up + 1) * gate * _sigmoid(1.702 * gate), "down_proj")


class Gemma4Run(Run):
    """Four norms a layer, two sizes of attention, and experts beside the dense layer."""

    def feed(self, token):
        oracle = self.oracle
        x = oracle.embedding[token] * np.sqrt(len(oracle.embedding[token]))
        for layer, memory in enumerate(self.memory):
            prefix = f"model.layers.{layer}."
            normed = self._norm(x, prefix + "input_layernorm")
            mixed = self._attention(normed, prefix + "self_attn.", memory)
            x = x + self._norm(mixed, prefix + "post_attention_layernorm")
            x = x + self._norm(self._both(x, prefix), prefix + "post_feedforward_layernorm")
            x = x * oracle.weights[prefix + "layer_scalar"]
        self.position += 1
        cap = oracle.config["final_logit_softcapping"]
        return cap * np.tanh(oracle.head @ self._norm(x, "model.norm") / cap)

    def _both(self, x, prefix):
        dense = self._mlp(self._norm(x, prefix + "pre_feedforward_layernorm"), prefix + "mlp.")
        if not self.oracle.config["enable_moe_block"]:
            return dense
        sparse = self._sparse(x, prefix)
        dense = self._norm(dense, prefix + "post_feedforward_layernorm_1")
        return dense + self._norm(sparse, prefix + "post_feedforward_layernorm_2")

    def _mlp(self, x, prefix):
        gate, up, down = (self._w(f"{prefix}{name}_proj") for name in ("gate", "up", "down"))
        return down @ (_gelu(gate @ x) * (up @ x))

    def _sparse(self, x, prefix):
        weights, router = self.oracle.weights, prefix + "router."
        seen = self._rms(x) * weights[router + "scale"] / np.sqrt(len(x))
        scores = self._w(router + "proj") @ seen
        chosen = np.argsort(-scores, kind="stable")[: self.oracle.config["top_k_experts"]]
        share = np.exp(scores[chosen] - scores[chosen].max())
        share = share / share.sum() * weights[router + "per_expert_scale"][chosen]
        x, y = self._norm(x, prefix + "pre_feedforward_layernorm_2"), 0
        for weight, expert in zip(share, chosen, strict=True):
            gate, up = np.split(weights[prefix + "experts.gate_up_proj"][expert] @ x, 2)
            down = weights[prefix + "experts.down_proj"][expert]
            y = y + weight * (down @ (_gelu(gate) * up))
        return y

    def _attention(self, x, prefix, memory):
        config = self.oracle.config
        kind = config["layer_types"][layer_of(prefix)]
        query, key = (self._w(prefix + name) @ x for name in ("q_proj", "k_proj"))
        is_full = kind == "full_attention"
        value = key if is_full else self._w(prefix + "v_proj") @ x
        dim = len(self._w(prefix + "k_norm"))
        query, key, value = (each.reshape(-1, dim) for each in (query, key, value))
        rope = config["rope_parameters"][kind]
        query = self._turned(self._norm(query, prefix + "q_norm"), rope)
        key = self._turned(self._norm(key, prefix + "k_norm"), rope)
        memory.setdefault("kv", []).append((key, self._rms(value)))
        if not is_full:
            del memory["kv"][: -config["sliding_window"]]
        keys, values = (np.stack(part) for part in zip(*memory["kv"], strict=True))
        keys, values = (np.repeat(each, len(query) // len(key), 1) for each in (keys, values))
        scores = np.einsum("hd,thd->ht", query, keys)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("ht,thd->hd", weights / weights.sum(-1, keepdims=True), values)
        return self._w(prefix + "o_proj") @ mixed.ravel()

    def _turned(self, x, rope):
        """Rotate the pairs; those after the turning share stay."""
        half = x.shape[-1] // 2
        angle = self.position * rope["rope_theta"] ** (-np.arange(half) / half)
        angle[int(half * rope.get("partial_rotary_factor", 1.0)) :] = 0
        a, b = x[:, :half], x[:, half:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


RUNS = {"granite": DenseGraniteRun, "gpt_oss": GptOssRun, "gemma4_text": Gemma4Run}
