"""The oracle of `oracle.py` for dense Granite and gpt-oss: token by token, NumPy float64."""

import numpy as np
from oracle import Run, _sigmoid


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


RUNS = {"granite": DenseGraniteRun, "gpt_oss": GptOssRun}
