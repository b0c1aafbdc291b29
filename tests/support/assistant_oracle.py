"""An assistant of Gemma 4 in NumPy float64, which drafts after a text that its target has read."""

import json
from pathlib import Path

import numpy as np
from attending_oracle import Gemma4Run
from oracle import Oracle, layer_of
from safetensors import safe_open


class AssistantOracle:
    """An assistant's checkpoint, and the target that it drafts for."""

    def __init__(self, folder: Path, target: Oracle):
        self.target = target
        with safe_open(folder / "model.safetensors", "np") as file:
            names = list(file.keys())
            self.weights = {name: file.get_tensor(name).astype(np.float64) for name in names}
        self.config = json.loads((folder / "config.json").read_text())["text_config"]
        self.eps, self.is_hybrid = self.config["rms_norm_eps"], False
        self.memory = [{} for _ in self.config["layer_types"]]

    def check(self, tokens: list[int], drafts: list[int]) -> None:
        """Each draft is the best one, up to ties, after the text and the drafts before it."""
        run = AssistantRun(self, tokens)
        for draft in drafts:
            scores = run.scores()
            assert scores[draft] >= scores.max() - 1e-3, (tokens, drafts)
            run.token = draft


class AssistantRun(Gemma4Run):
    """The drafts after one text, whose last token the target has not read yet."""

    def __init__(self, assistant: AssistantOracle, tokens: list[int]):
        self.oracle, self.position, self.token = assistant, len(tokens) - 1, tokens[-1]
        read = assistant.target.start()
        for token in tokens[:-1]:
            read.feed(token)
        self.hidden = read.hidden
        kinds = assistant.target.config["layer_types"]
        own = len(kinds) - assistant.target.config.get("num_kv_shared_layers", 0)
        self.kv = {kind: read.memory[i]["kv"] for i, kind in enumerate(kinds[:own])}

    def scores(self) -> np.ndarray:
        """Run a pass; `hidden` becomes its output."""
        table = self.oracle.target.embedding
        embedded = table[self.token] * np.sqrt(table.shape[1])
        x = self._w("pre_projection") @ np.concatenate([embedded, self.hidden])
        for layer in range(len(self.oracle.memory)):
            prefix = f"model.layers.{layer}."
            mixed = self._attention(
                self._norm(x, prefix + "input_layernorm"), prefix + "self_attn."
            )
            x = x + self._norm(mixed, prefix + "post_attention_layernorm")
            normed = self._norm(x, prefix + "pre_feedforward_layernorm")
            fed = self._mlp(normed, prefix + "mlp.")
            x = x + self._norm(fed, prefix + "post_feedforward_layernorm")
            x = x * self.oracle.weights[prefix + "layer_scalar"]
        normed = self._norm(x, "model.norm")
        self.hidden = self._w("post_projection") @ normed
        return self._w("model.embed_tokens") @ normed

    def _attention(self, x, prefix):
        config = self.oracle.config
        kind = config["layer_types"][layer_of(prefix)]
        query = (self._w(prefix + "q_proj") @ x).reshape(-1, len(self._w(prefix + "q_norm")))
        query = self._turned(self._norm(query, prefix + "q_norm"), config["rope_parameters"][kind])
        kv = self.kv[kind]
        if kind == "sliding_attention":  # the newest token has one place of the window
            kv = kv[-(config["sliding_window"] - 1) :]
        return self._w(prefix + "o_proj") @ self._mixed(query, kv)
