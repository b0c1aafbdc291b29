"""The oracle of `oracle.py` for Falcon-H1, LFM2, Kimi-Linear and Ling-3.0, in NumPy float64.

Falcon-H1's multipliers stand where its paper has them, at the activations.
"""

import numpy as np
from latent_oracle import DeepSeekRun
from mamba_oracle import MambaRun
from oracle import Run, _sigmoid, _silu, _unit, layer_of


class FalconH1Run(MambaRun):
    """Attention and Mamba2 side by side in each layer."""

    def feed(self, token):
        oracle, config = self.oracle, self.oracle.config
        names = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state")
        sizes, (gate, down) = [config[name] for name in names], config["mlp_multipliers"]
        x, self.streams = oracle.embedding[token] * config["embedding_multiplier"], []
        for layer, memory in enumerate(self.memory):
            prefix = f"model.layers.{layer}."
            self.streams.append(x)
            h = self._norm(x, prefix + "input_layernorm")
            mixed = self._mamba2(
                h * config["ssm_in_multiplier"], prefix + "mamba.", memory, sizes, sizes[2]
            )
            attended = self._attention(
                h * config["attention_in_multiplier"], prefix + "self_attn.", memory
            )
            x = x + config["ssm_out_multiplier"] * mixed
            x = x + config["attention_out_multiplier"] * attended
            h, mlp = self._norm(x, prefix + "pre_ff_layernorm"), prefix + "feed_forward."
            inner = _silu(gate * (self._w(mlp + "gate_proj") @ h)) * (self._w(mlp + "up_proj") @ h)
            x = x + down * (self._w(mlp + "down_proj") @ inner)
        self.streams.append(x)
        self.position += 1
        hidden = self._norm(x, "model.final_layernorm")
        return config["lm_head_multiplier"] * (oracle.head @ hidden)

    def _head_norm(self, x, name):
        """Keys are multiplied before they are rotated; nothing is normed."""
        return x * self.oracle.config["key_multiplier"] if name.endswith("k_norm") else x

    def _in_proj(self, x, prefix, sizes):
        heads, dim, groups, state_dim = sizes
        each = heads * dim, heads * dim, groups * state_dim, groups * state_dim, heads
        return super()._in_proj(x, prefix, sizes) * np.repeat(
            self.oracle.config["ssm_multipliers"], each
        )

    def _gated(self, out, z, prefix, norm_groups):
        config = self.oracle.config
        if not config["mamba_rms_norm"]:
            return out * _silu(z)
        if not config["mamba_norm_before_gate"]:
            return super()._gated(out, z, prefix, norm_groups)
        normed = self._rms(out.reshape(norm_groups, -1)).ravel()
        return normed * self._w(prefix + "norm") * _silu(z)


class LFM2Run(Run):
    """Short convolutions, attention in some layers, experts where a layer has their tensors."""

    def feed(self, token):
        oracle = self.oracle
        config = oracle.config
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
        x, self.streams = oracle.embedding[token], []
        for layer, memory in enumerate(self.memory):
            prefix = f"model.layers.{layer}."
            self.streams.append(x)
            h = self._norm(x, prefix + "operator_norm")
            if prefix + "conv.in_proj.weight" in oracle.weights:
                x = x + self._short_conv(h, prefix + "conv.", memory)
            else:
                x = x + self._attention(h, prefix + "self_attn.", memory)
            h, feed_forward = self._norm(x, prefix + "ffn_norm"), prefix + "feed_forward."
            is_sparse = feed_forward + "gate.weight" in oracle.weights
            x = x + (self._sparse if is_sparse else self._dense)(h, feed_forward)
        self.streams.append(x)
        self.position += 1
        return oracle.head @ self._norm(x, "model.embedding_norm")

    def _w(self, name):
        return super()._w(name.replace("self_attn.o_proj", "self_attn.out_proj"))

    def _head_norm(self, x, name):
        return self._norm(x, name.replace("_norm", "_layernorm"))

    def _short_conv(self, x, prefix, memory):
        b, c, v = np.split(self._w(prefix + "in_proj") @ x, 3)
        taps = self._w(prefix + "conv")[:, 0]
        window = memory.setdefault("window", [np.zeros_like(v)] * taps.shape[1])
        window.append(b * v)
        del window[0]
        mixed = sum(taps[:, i] * past for i, past in enumerate(window))
        return self._w(prefix + "out_proj") @ (c * mixed)

    def _dense(self, x, prefix):
        inner = _silu(self._w(prefix + "w1") @ x) * (self._w(prefix + "w3") @ x)
        return self._w(prefix + "w2") @ inner

    def _sparse(self, x, prefix):
        config = self.oracle.config
        score = _sigmoid(self._w(prefix + "gate") @ x)
        compared = score + self.oracle.weights.get(prefix + "expert_bias", 0.0)
        chosen = np.argsort(-compared, kind="stable")[: config["num_experts_per_tok"]]
        share = score[chosen] * config["routed_scaling_factor"]
        if config["norm_topk_prob"]:
            share = share / (score[chosen].sum() + 1e-6)
        return sum(
            part * self._dense(x, f"{prefix}experts.{expert}.")
            for part, expert in zip(share, chosen, strict=True)
        )


LATENT_SIZES = "num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank"


def _attended(query, key, value, memory):
    """Attention of a token's heads `[heads, channels]` to all tokens in `memory` and to itself."""
    memory.setdefault("kv", []).append((key, value))
    keys, values = (np.stack(part) for part in zip(*memory["kv"], strict=True))
    scores = np.einsum("hd,thd->ht", query, keys) * query.shape[1] ** -0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("ht,thd->hd", weights / weights.sum(-1, keepdims=True), values)


class KimiLinearRun(Run):
    """A delta rule with a decay by channel, and latents that are expanded to keys and values."""

    def feed(self, token):
        oracle = self.oracle
        x, self.streams = oracle.embedding[token], []
        for layer, memory in enumerate(self.memory):
            prefix = f"model.layers.{layer}."
            self.streams.append(x)
            h, mixer = self._norm(x, prefix + "input_layernorm"), prefix + "self_attn."
            is_delta = mixer + "A_log" in oracle.weights
            x = x + (self._delta if is_delta else self._latent)(h, mixer, memory)
            h = self._norm(x, prefix + "post_attention_layernorm")
            is_sparse = prefix + "block_sparse_moe.gate.weight" in oracle.weights
            x = x + (
                self._sparse(h, prefix + "block_sparse_moe.")
                if is_sparse
                else self._mlp(h, prefix + "mlp.")
            )
        self.streams.append(x)
        self.position += 1
        return oracle.head @ self._norm(x, "model.norm")

    def _convolved(self, x, prefix, name, memory):
        taps = self._w(f"{prefix}{name}_conv1d")[:, 0]
        new = self._w(f"{prefix}{name}_proj") @ x
        window = memory.setdefault(name, [np.zeros_like(new)] * taps.shape[1])
        window.append(new)
        del window[0]
        return _silu(sum(taps[:, i] * past for i, past in enumerate(window)))

    def _delta(self, x, prefix, memory):
        weights = self.oracle.weights
        heads = weights[prefix + "A_log"].size
        q, k, v = (self._convolved(x, prefix, name, memory).reshape(heads, -1) for name in "qkv")
        query, key = _unit(q) * q.shape[1] ** -0.5, _unit(k)
        step = self._twice(x, prefix + "f") + weights[prefix + "dt_bias"]
        rate = np.exp(weights[prefix + "A_log"].reshape(heads, 1))
        decay = np.exp(self._log_decay(rate, step.reshape(heads, -1)))
        beta = _sigmoid(self._w(prefix + "b_proj") @ x)
        state = memory.get("state", np.zeros((heads, v.shape[1], k.shape[1])))
        state = state * decay[:, None, :]
        change = beta[:, None] * (v - np.einsum("hvk,hk->hv", state, key))
        memory["state"] = state = state + change[:, :, None] * key[:, None, :]
        out = np.einsum("hvk,hk->hv", state, query)
        gate = self._twice(x, prefix + "g")
        normed = self._rms(out) * self._w(prefix + "o_norm") * _sigmoid(gate).reshape(heads, -1)
        return self._w(prefix + "o_proj") @ normed.ravel()

    def _twice(self, x, name):
        return self._w(name + "_b_proj") @ (self._w(name + "_a_proj") @ x)

    def _log_decay(self, rate, step):
        return -rate * np.logaddexp(0, step)

    def _latent(self, x, prefix, memory):
        heads, plain, shared, rank = (self.oracle.config[name] for name in LATENT_SIZES)
        query = (self._w(prefix + "q_proj") @ x).reshape(heads, plain + shared)
        latent, key = np.split(self._w(prefix + "kv_a_proj_with_mqa") @ x, [rank])
        latent = latent / np.sqrt((latent**2).mean() + 1e-6) * self._w(prefix + "kv_a_layernorm")
        up = (self._w(prefix + "kv_b_proj") @ latent).reshape(heads, -1)
        key = np.concatenate([up[:, :plain], np.tile(key, (heads, 1))], axis=1)
        mixed = _attended(query, key, up[:, plain:], memory)
        return self._w(prefix + "o_proj") @ mixed.ravel()

    def _sparse(self, x, prefix):
        config = self.oracle.config
        score = _sigmoid(self._w(prefix + "gate") @ x)
        compared = score + self.oracle.weights[prefix + "gate.e_score_correction_bias"]
        chosen = np.argsort(-compared, kind="stable")[: config["num_experts_per_token"]]
        share = score[chosen] * config["routed_scaling_factor"]
        share = share / (score[chosen].sum() + 1e-20)
        routed = sum(
            part * self._swiglu(x, f"{prefix}experts.{expert}.", "w1", "w3", "w2")
            for part, expert in zip(share, chosen, strict=True)
        )
        return routed + self._mlp(x, prefix + "shared_experts.")

    def _swiglu(self, x, prefix, gate, up, down):
        inner = _silu(self._w(prefix + gate) @ x) * (self._w(prefix + up) @ x)
        return self._w(prefix + down) @ inner


class LingRun(DeepSeekRun):
    """A delta rule with a bounded decay by channel, gated latents, and limits of experts."""

    _delta, _convolved = KimiLinearRun._delta, KimiLinearRun._convolved

    def __init__(self, oracle):
        super().__init__(oracle)
        config, weights = oracle.config, oracle.weights
        config |= {"n_group": config["num_expert_group"]}
        config |= {"num_experts_per_tok": config["num_experts_per_token"]}
        names = {name: name.replace(".attention.dense", ".attention.o_proj") for name in weights}
        ours = {
            name: other.replace("expert_bias", "e_score_correction_bias")
            for name, other in names.items()
        }
        oracle.weights = {other: weights[name] for name, other in ours.items()}

    def feed(self, token):
        oracle = self.oracle
        x, self.streams = oracle.embedding[token], []
        for layer in range(oracle.config["num_hidden_layers"]):
            prefix, memory = f"model.layers.{layer}.", self.memory[layer]
            self.streams.append(x)
            h, mixer = self._norm(x, prefix + "input_layernorm"), prefix + "attention."
            is_delta = mixer + "A_log" in oracle.weights
            x = x + (self._delta if is_delta else self._gated_latent)(h, mixer, memory)
            x = x + self._mlp(self._norm(x, prefix + "post_attention_layernorm"), prefix + "mlp.")
        self.streams.append(x)
        self.position += 1
        return oracle.head @ self._norm(x, "model.norm")

    def _twice(self, x, name):
        return self._w(name + "_proj") @ x  # once

    def _log_decay(self, rate, step):
        return self.oracle.config["kda_lower_bound"] * _sigmoid(rate * step)

    def _gated_latent(self, x, prefix, memory):
        heads, plain, shared, rank = (self.oracle.config[name] for name in LATENT_SIZES)
        query = (self._w(prefix + "q_proj") @ x).reshape(heads, plain + shared)
        query = np.concatenate([query[:, :plain], self._in_pairs(query[:, plain:])], -1)
        latent, key = np.split(self._w(prefix + "kv_a_proj_with_mqa") @ x, [rank])
        up = self._w(prefix + "kv_b_proj") @ self._latent(latent, prefix + "kv_a_layernorm")
        up = up.reshape(heads, -1)
        key = np.repeat(self._in_pairs(key[None]), heads, 0)
        key = np.concatenate([up[:, :plain], key], -1)
        mixed = _attended(query, key, up[:, plain:], memory)
        gate = _sigmoid(self._w(prefix + "g_proj") @ x)
        return self._w(prefix + "o_proj") @ (mixed * gate[:, None]).ravel()

    def _mlp(self, x, prefix):
        if prefix + "gate.weight" in self.oracle.weights:
            return self._experts(x, prefix)
        kind = "share_expert" if "shared" in prefix else "expert"
        limits = self.oracle.config.get(f"{kind}_swiglu_limit_list")
        limit = (limits and limits[layer_of(prefix)]) or np.inf
        gate = np.minimum(_silu(self._w(prefix + "gate_proj") @ x), limit)
        up = np.clip(self._w(prefix + "up_proj") @ x, -limit, limit)
        return self._w(prefix + "down_proj") @ (gate * up)


RUNS = {
    "falcon_h1": FalconH1Run,
    "lfm2": LFM2Run,
    "lfm2_moe": LFM2Run,
    "kimi_linear": KimiLinearRun,
    "bailing_hybrid": LingRun,
}
