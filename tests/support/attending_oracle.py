"""The oracle of `oracle.py` for dense Granite: one token at a time, NumPy float64."""

from oracle import Run


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


RUNS = {"granite": DenseGraniteRun}
