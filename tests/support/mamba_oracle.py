"""The oracle of `oracle.py` for the families with Mamba2: one token at a time, NumPy float64."""

import numpy as np
from oracle import Run, _sigmoid, _silu


class MambaRun(Run):
    """A sequence of a model whose recurrent layers are Mamba2's."""

    def _mamba2(self, x, prefix, memory, sizes, norm_groups):
        """`sizes`: heads, channels of a head, groups, channels of a state."""
        weights, (heads, dim, groups, state_dim) = self.oracle.weights, sizes
        inner, shared = heads * dim, groups * state_dim
        z, mix, dt = np.split(self._in_proj(x, prefix, sizes), [inner, 2 * (inner + shared)])
        taps = self._w(prefix + "conv1d")[:, 0]
        window = memory.setdefault("window", [np.zeros_like(mix)] * taps.shape[1])
        window.append(mix)
        del window[0]
        mix = sum(taps[:, i] * past for i, past in enumerate(window))
        mix = _silu(mix + weights[prefix + "conv1d.bias"])
        inputs, b, c = np.split(mix, [inner, inner + shared])
        inputs = inputs.reshape(heads, dim)
        b, c = (np.repeat(y.reshape(groups, -1), heads // groups, 0) for y in (b, c))
        dt = np.logaddexp(0, dt + weights[prefix + "dt_bias"])
        decay = np.exp(-np.exp(weights[prefix + "A_log"]) * dt)
        state = memory.get("state", np.zeros((heads, dim, state_dim))) * decay[:, None, None]
        state = state + (dt[:, None] * inputs)[:, :, None] * b[:, None, :]
        memory["state"] = state
        out = np.einsum("hpn,hn->hp", state, c) + weights[prefix + "D"][:, None] * inputs
        return self._w(prefix + "out_proj") @ self._gated(out.ravel(), z, prefix, norm_groups)

    def _in_proj(self, x, prefix, sizes):
        """Side by side z, x, B, C and dt."""
        return self._w(prefix + "in_proj") @ x

    def _gated(self, out, z, prefix, norm_groups):
        normed = self._rms((out * _silu(z)).reshape(norm_groups, -1)).ravel()
        return normed * self._w(prefix + "norm")


class PureMamba2Run(MambaRun):
    """Mamba2 and nothing else."""

    def feed(self, token):
        oracle, config = self.oracle, self.oracle.config
        names = "num_heads", "head_dim", "n_groups", "state_size"
        sizes = [config[name] for name in names]
        x = oracle.embedding[token]
        for layer, memory in enumerate(self.memory):
            prefix = f"model.layers.{layer}."
            normed = self._norm(x, prefix + "norm")
            x = x + self._mamba2(normed, prefix + "mixer.", memory, sizes, config["n_groups"])
        self.position += 1
        return oracle.head @ self._norm(x, "model.norm_f")


class NemotronRun(MambaRun):
    """One mixer or one feed-forward layer in each layer; a tensor that it has tells which."""

    def feed(self, token):
        oracle, config = self.oracle, self.oracle.config
        names = "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size"
        sizes = [config[name] for name in names]
        x = oracle.embedding[token]
        for layer, memory in enumerate(self.memory):
            prefix = f"model.layers.{layer}.mixer."
            normed = self._norm(x, f"model.layers.{layer}.norm")
            if prefix + "A_log" in oracle.weights:
                x = x + self._mamba2(normed, prefix, memory, sizes, config["n_groups"])
            elif prefix + "q_proj.weight" in oracle.weights:
                x = x + self._attention(normed, prefix, memory)
            elif prefix + "gate.weight" in oracle.weights:
                x = x + self._nemotron_experts(normed, prefix)
            else:
                x = x + self._squared_relu(normed, prefix)
        self.position += 1
        return oracle.head @ self._norm(x, "model.norm_f")

    def _squared_relu(self, x, prefix):
        return self._w(prefix + "down_proj") @ np.maximum(self._w(prefix + "up_proj") @ x, 0) ** 2

    def _nemotron_experts(self, x, prefix):
        config, weights = self.oracle.config, self.oracle.weights
        score = _sigmoid(self._w(prefix + "gate") @ x)
        compared = score + weights[prefix + "gate.e_score_correction_bias"]
        groups = compared.reshape(config["n_group"], -1)
        best = np.argsort(-np.sort(groups, 1)[:, -2:].sum(1), kind="stable")
        groups[best[config["topk_group"] :]] = -np.inf
        chosen = np.argsort(-groups.ravel(), kind="stable")[: config["num_experts_per_tok"]]
        share = score[chosen] * config["routed_scaling_factor"]
        if config["norm_topk_prob"]:
            share = share / (score[chosen].sum() + 1e-20)
        latent = prefix + "fc1_latent_proj.weight" in weights
        inner = self._w(prefix + "fc1_latent_proj") @ x if latent else x
        y = sum(
            part * self._squared_relu(inner, f"{prefix}experts.{expert}.")
            for part, expert in zip(share, chosen, strict=True)
        )
        y = self._w(prefix + "fc2_latent_proj") @ y if latent else y
        return y + self._squared_relu(x, prefix + "shared_experts.")


class GraniteRun(MambaRun):
    """A mixer, then a layer that every token has and perhaps experts; factors everywhere."""

    def feed(self, token):
        oracle, config = self.oracle, self.oracle.config
        names = "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state"
        sizes, by = [config[name] for name in names], config["residual_multiplier"]
        x = oracle.embedding[token] * config["embedding_multiplier"]
        for layer, memory in enumerate(self.memory):
            prefix = f"model.layers.{layer}."
            normed = self._norm(x, prefix + "input_layernorm")
            if prefix + "mamba.A_log" in oracle.weights:
                x = x + by * self._mamba2(normed, prefix + "mamba.", memory, sizes, 1)
            else:
                x = x + by * self._attention(normed, prefix + "self_attn.", memory)
            normed = self._norm(x, prefix + "post_attention_layernorm")
            y = self._fused(normed, prefix + "shared_mlp.", ...)
            if config["num_local_experts"]:
                y = y + self._granite_experts(normed, prefix + "block_sparse_moe.")
            x = x + by * y
        self.position += 1
        return oracle.head @ self._norm(x, "model.norm") / config["logits_scaling"]

    def _granite_experts(self, x, prefix):
        scores = self._w(prefix + "router.layer") @ x
        chosen = np.argsort(-scores, kind="stable")[: self.oracle.config["num_experts_per_tok"]]
        share = np.exp(scores[chosen] - scores[chosen].max())
        parts = (self._fused(x, prefix, expert) for expert in chosen)
        return sum(w * y for w, y in zip(share / share.sum(), parts, strict=True))

    def _fused(self, x, prefix, expert):
        gate, up = np.split(self._w(prefix + "input_linear")[expert] @ x, 2)
        return self._w(prefix + "output_linear")[expert] @ (_silu(gate) * up)

    def _score_scale(self, dim):
        return self.oracle.config["attention_multiplier"]


RUNS = {"granitemoehybrid": GraniteRun, "mamba2": PureMamba2Run, "nemotron_h": NemotronRun}
