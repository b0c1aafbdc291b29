"""An EAGLE-3 head in NumPy float64, one token at a time: the transcription of the paper's figure.

It reads the checkpoint by its published names, in any of the variants that trainers publish.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from oracle import Oracle, Run
from safetensors import safe_open


class Eagle3Oracle:
    """A head's checkpoint, and the target that it drafts for."""

    def __init__(self, folder: Path, target: Oracle, layers: tuple[int, ...] | None = None):
        self.target = target
        with safe_open(folder / "model.safetensors", "np") as file:
            self.weights = {
                name.replace("layers.0.", "midlayer."): file.get_tensor(name)
                for name in file.keys()  # noqa: SIM118  not a dict
            }
        floats = {name: value.astype(np.float64) for name, value in self.weights.items()}
        config = json.loads((folder / "config.json").read_text())
        config |= config.get("transformer_layer_config", {})
        config["rope_parameters"] = {"rope_theta": config["rope_theta"]}
        self.config = config
        self.layers = layers or config["eagle_aux_hidden_state_layer_ids"]
        self.embedding = floats.get("embed_tokens.weight", target.embedding)
        size = len(self.weights["lm_head.weight"])
        self.ids = np.arange(size) + self.weights.get("d2t", np.zeros(size, int))
        self.run_of = SimpleNamespace(
            weights=floats, config=config, is_hybrid=False, eps=config["rms_norm_eps"]
        )

    def start(self) -> "HeadRun":
        return HeadRun(self)

    def features(self, streams: list[np.ndarray]) -> np.ndarray:
        """What the head takes of the target's residual stream before each layer."""
        run, aux = self.start(), [streams[layer] for layer in self.layers]
        if "fc_norm.0.weight" in self.weights:
            aux = [run._norm(part, f"fc_norm.{index}") for index, part in enumerate(aux)]
        joined = np.concatenate(aux)
        if "input_norm.weight" in self.weights:
            joined = run._norm(joined, "input_norm")
        return run._w("fc") @ joined

    def after(self, tokens: list[int]) -> "HeadRun":
        """The head at the end of a text, about to draft what follows the last token."""
        target, head = self.target.start(), self.start()
        for token, following in zip(tokens[:-1], tokens[1:], strict=True):
            target.feed(token)
            head.feed(following, self.features(target.streams))
        return head

    def check(self, tokens: list[int], drafts: list[int]) -> None:
        """Each draft is the head's best, up to ties, after the text and the drafts before it."""
        head = self.after(tokens)
        for draft in drafts:
            scores = head.scores[self.ids == draft]
            assert scores.size and scores[0] >= head.scores.max() - 1e-3, (tokens, drafts)
            head.feed(draft, head.state)


class HeadRun(Run):
    """One sequence of the head: feed a token and a state, get the scores of the next one."""

    def __init__(self, head: Eagle3Oracle):
        self.head, self.oracle, self.position = head, head.run_of, 0
        self.memory = {}
        self.state = self.scores = np.zeros(0)

    def feed(self, token: int, hidden: np.ndarray) -> None:
        """`token`: the one after this position; `hidden`: features, or the state before."""
        config, layer = self.head.config, "midlayer."
        normed = self._norm(hidden, layer + "hidden_norm")
        embedded = self._norm(self.head.embedding[token], layer + "input_layernorm")
        default = "transformer_layer_config" in config
        x = normed if config.get("norm_before_residual", default) else hidden
        x = x + self._attention(
            np.concatenate([embedded, normed]), layer + "self_attn.", self.memory
        )
        x = x + self._mlp(self._norm(x, layer + "post_attention_layernorm"), layer + "mlp.")
        self.position += 1
        last = self._norm(x, "norm")
        self.state = last if config.get("norm_output") else x
        self.scores = self._w("lm_head") @ last
