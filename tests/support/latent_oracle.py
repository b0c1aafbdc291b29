"""The oracle of `oracle.py` for DeepSeek and GLM: keys and values of each head are formed."""

import numpy as np
from oracle import Run, _sigmoid, magnitude, turns

_EPS = 1e-6  # of the latents' norms and of the index's


class GroupedExpertsRun(Run):
    """Attention as in Llama or Qwen3, and experts in groups."""

    def _experts(self, x, prefix):
        config, groups = self.oracle.config, self.oracle.config["n_group"]
        score = _sigmoid(self._w(prefix + "gate") @ x)
        compared = score + self.oracle.weights[prefix + "gate.e_score_correction_bias"]
        grouped = compared.reshape(groups, -1)
        best = np.argsort(-np.sort(grouped, 1)[:, -2:].sum(1), kind="stable")
        is_in = np.isin(np.arange(groups), best[: config["topk_group"]])
        compared = np.where(np.repeat(is_in, grouped.shape[1]), compared, -np.inf)
        chosen = np.argsort(-compared, kind="stable")[: config["num_experts_per_tok"]]
        share = score[chosen] / (score[chosen].sum() + 1e-20) * config["routed_scaling_factor"]
        y = sum(
            part * self._mlp(x, f"{prefix}experts.{expert}.")
            for part, expert in zip(share, chosen, strict=True)
        )
        return y + self._mlp(x, prefix + "shared_experts.")


class DeepSeekRun(GroupedExpertsRun):
    """Latent attention, and an index if the layer has its tensors."""

    def _attention(self, x, prefix, memory):
        config, rope = self.oracle.config, self.oracle.config["rope_parameters"]
        heads, plain = config["num_attention_heads"], config["qk_nope_head_dim"]
        rank, shared = config["kv_lora_rank"], config["qk_rope_head_dim"]
        asked = self._latent(self._w(prefix + "q_a_proj") @ x, prefix + "q_a_layernorm")
        query = (self._w(prefix + "q_b_proj") @ asked).reshape(heads, plain + shared)
        latent, common = np.split(self._w(prefix + "kv_a_proj_with_mqa") @ x, [rank])
        latent = self._latent(latent, prefix + "kv_a_layernorm")
        expanded = (self._w(prefix + "kv_b_proj") @ latent).reshape(heads, -1)
        query = np.concatenate([query[:, :plain], self._in_pairs(query[:, plain:])], -1)
        common = np.repeat(self._in_pairs(common[None]), heads, 0)
        key, value = np.concatenate([expanded[:, :plain], common], -1), expanded[:, plain:]
        memory.setdefault("kv", []).append((key, value))
        keys, values = (np.stack(part) for part in zip(*memory["kv"], strict=True))
        growth = 0.1 * rope.get("mscale_all_dim", 0) * np.log(rope.get("factor", 1)) + 1
        scores = np.einsum("hd,thd->ht", query, keys) * (plain + shared) ** -0.5 * growth**2
        if prefix + "indexer.wk.weight" in self.oracle.weights:
            scores = np.where(
                self._selected(x, asked, prefix + "indexer.", memory), scores, -np.inf
            )
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("ht,thd->hd", weights / weights.sum(-1, keepdims=True), values)
        return self._w(prefix + "o_proj") @ mixed.ravel()

    def _latent(self, x, name):
        return x / np.sqrt((x * x).mean() + _EPS) * self._w(name)

    def _in_pairs(self, x):
        """The complex numbers of adjacent channels, turned; real parts first."""
        rope = self.oracle.config["rope_parameters"]
        turned = np.exp(1j * self.position * turns(rope, x.shape[1])) * magnitude(rope)
        turned = turned * (x[:, 0::2] + 1j * x[:, 1::2])
        return np.concatenate([turned.real, turned.imag], -1)

    def _selected(self, x, asked, prefix, memory):
        config = self.oracle.config
        heads, dim = config["index_n_heads"], config["index_head_dim"]
        key = self._w(prefix + "wk") @ x
        key = (key - key.mean()) / np.sqrt(key.var() + _EPS)
        key = key * self._w(prefix + "k_norm") + self.oracle.weights[prefix + "k_norm.bias"]
        memory.setdefault("index", []).append(self._in_halves(key[None])[0])
        query = self._in_halves((self._w(prefix + "wq_b") @ asked).reshape(heads, dim))
        each = np.maximum(query @ np.stack(memory["index"]).T * dim**-0.5, 0)
        score = (self._w(prefix + "weights_proj") @ x * heads**-0.5) @ each
        best = np.argsort(-score, kind="stable")[: config["index_topk"]]
        return np.isin(np.arange(len(score)), best)[None]

    def _in_halves(self, x):
        dim, half = (
            self.oracle.config["qk_rope_head_dim"],
            self.oracle.config["qk_rope_head_dim"] // 2,
        )
        rope = self.oracle.config["rope_parameters"]
        turned = np.exp(1j * self.position * turns(rope, dim)) * magnitude(rope)
        turned = turned * (x[:, :half] + 1j * x[:, half:dim])
        return np.concatenate([turned.real, turned.imag, x[:, dim:]], -1)


RUNS = {
    "deepseek_v3": DeepSeekRun,
    "deepseek_v32": DeepSeekRun,
    "glm4_moe": GroupedExpertsRun,
    "glm4_moe_lite": DeepSeekRun,
}
