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
    """Four norms a layer, two sizes of attention, and experts beside the dense layer.

    Or layers that share keys and values, with embeddings of their own.
    """

    def feed(self, token):
        oracle = self.oracle
        x = oracle.embedding[token] * np.sqrt(len(oracle.embedding[token]))
        own = self._per_layer(token, x)
        for layer, memory in enumerate(self.memory):
            prefix = f"model.layers.{layer}."
            normed = self._norm(x, prefix + "input_layernorm")
            mixed = self._attention(normed, prefix + "self_attn.", memory)
            x = x + self._norm(mixed, prefix + "post_attention_layernorm")
            x = x + self._norm(self._both(x, prefix), prefix + "post_feedforward_layernorm")
            if own is not None:
                gate = _gelu(self._w(prefix + "per_layer_input_gate") @ x)
                added = self._w(prefix + "per_layer_projection") @ (gate * own[layer])
                x = x + self._norm(added, prefix + "post_per_layer_input_norm")
            x = x * oracle.weights[prefix + "layer_scalar"]
        self.position += 1
        cap, self.hidden = oracle.config["final_logit_softcapping"], self._norm(x, "model.norm")
        return cap * np.tanh(oracle.head @ self.hidden / cap)

    def _per_layer(self, token, x):
        width = self.oracle.config.get("hidden_size_per_layer_input")
        if not width:
            return None
        of_id = self._w("model.embed_tokens_per_layer")[token].reshape(-1, width) * np.sqrt(width)
        of_stream = self._w("model.per_layer_model_projection") @ x / np.sqrt(len(x))
        of_stream = of_stream.reshape(-1, width)
        return (self._norm(of_stream, "model.per_layer_projection_norm") + of_id) / np.sqrt(2)

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
        config, layer = self.oracle.config, layer_of(prefix)
        kinds = config["layer_types"]
        kind, rope = kinds[layer], config["rope_parameters"][kinds[layer]]
        own = len(kinds) - config.get("num_kv_shared_layers", 0)
        dim = len(self._w(prefix + "q_norm"))
        query = (self._w(prefix + "q_proj") @ x).reshape(-1, dim)
        query = self._turned(self._norm(query, prefix + "q_norm"), rope)
        if layer < own:
            self._remember(x, prefix, memory, kind)
        else:  # those of the last layer of its kind that has its own
            memory = self.memory[max(i for i in range(own) if kinds[i] == kind)]
        return self._w(prefix + "o_proj") @ self._mixed(query, memory["kv"])

    def _mixed(self, query, kv):
        keys, values = (np.stack(part) for part in zip(*kv, strict=True))
        heads = keys.shape[1]
        keys, values = (np.repeat(each, len(query) // heads, 1) for each in (keys, values))
        scores = np.einsum("hd,thd->ht", query, keys)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return np.einsum("ht,thd->hd", weights / weights.sum(-1, keepdims=True), values).ravel()

    def _remember(self, x, prefix, memory, kind):
        config, dim = self.oracle.config, len(self._w(prefix + "k_norm"))
        is_full = kind == "full_attention"
        key = (self._w(prefix + "k_proj") @ x).reshape(-1, dim)
        value = key
        if not (is_full and config["attention_k_eq_v"]):
            value = (self._w(prefix + "v_proj") @ x).reshape(-1, dim)
        key = self._norm(key, prefix + "k_norm")
        key = self._turned(key, config["rope_parameters"][kind])
        memory.setdefault("kv", []).append((key, self._rms(value)))
        if not is_full:
            del memory["kv"][: -config["sliding_window"]]

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
