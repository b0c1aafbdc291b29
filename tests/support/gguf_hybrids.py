"""What llama.cpp's converter makes of hybrid models, stated in NumPy.

A converter takes a config.json and the tensors, in float32 by their published names. It gives the
metadata under the architecture's name, and the tensors by GGUF's names.
"""

import re

import gguf
import numpy as np

_SUFFIXES = (".weight", ".bias")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
_DRAFTING = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}
_DRAFTING |= {"norm": "shared_head_norm"}


def _named(arch, config, held, change):
    """The tensors by GGUF's names, each as `change(name, values)` makes it; experts in stacks."""
    names = gguf.get_tensor_name_map(arch, 99)
    tensors, stacks = {}, {}
    for name, values in held.items():
        if found := _EXPERT.fullmatch(name):
            stack, number, matrix = found.groups()
            stacks.setdefault((stack, matrix), {})[int(number)] = values
            continue
        for old, new in (("dt_bias", "dt_proj.bias"), ("correction_bias", "correction.bias")):
            name = name.replace(old, new)
        name = re.sub(r"expert_bias$", "expert_bias.bias", name)
        for part, own in change(name, values):
            tensors[names.get_name(part, _SUFFIXES) or part] = own
    for (stack, matrix), experts in stacks.items():
        values = np.stack([experts[number] for number in range(len(experts))])
        layer = re.search(r"layers\.(\d+)", stack)[1]
        piece = {"w1": "gate", "w2": "down", "w3": "up"}.get(matrix, matrix.removesuffix("_proj"))
        tensors[f"blk.{layer}.ffn_{piece}_exps.weight"] = values
    return tensors


def by_pairs(values, heads):
    """Channels i and i + half a head side by side, as llama.cpp rotates them, row by row."""
    size = len(values) // heads
    order = [
        head * size + i + half * size // 2
        for head in range(heads)
        for i in range(size // 2)
        for half in (0, 1)
    ]
    return values[order]


def _attention(config):
    heads = config["num_attention_heads"]
    found = {
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
    }
    if head_dim := config.get("head_dim"):
        found |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if "rope_parameters" in config or "rope_theta" in config:
        rope = config.get("rope_parameters", config)
        found["rope.freq_base"] = float(rope["rope_theta"])
    return found


def _sizes(config, eps):
    return {
        "block_count": len(config.get("layers_block_type", "")) or config["num_hidden_layers"],
        "context_length": config.get("max_position_embeddings", 2**20),
        "embedding_length": config["hidden_size"],
        "attention.layer_norm_rms_epsilon": config[eps],
    }


def _experts(config, count):
    return {
        "expert_count": config[count],
        "expert_used_count": config["num_experts_per_tok"],
    }


def _ssm(heads, head_dim, groups, state, taps):
    return {
        "ssm.conv_kernel": taps,
        "ssm.group_count": groups,
        "ssm.inner_size": heads * head_dim,
        "ssm.state_size": state,
        "ssm.time_step_rank": heads,
    }


def _mamba2_values(name, values, groups):
    """-exp(A_log) and D as columns, the convolution without its axis of 1, the norm by group."""
    if name.endswith("conv1d.weight"):
        return values[:, 0]
    if name.endswith(".A_log"):
        return -np.exp(values)[:, None]
    if name.endswith(".D"):
        return values[:, None]
    if re.search(r"(mixer|mamba)\.norm\.weight$", name):
        return values.reshape(groups, -1)
    return values


def mamba2(config, held):
    sizes = _sizes(config, "layer_norm_epsilon") | {
        "feed_forward_length": 0,
        "attention.head_count": 0,
        **_ssm(
            config["num_heads"],
            config["head_dim"],
            config["n_groups"],
            config["state_size"],
            config["conv_kernel"],
        ),
    }

    def change(name, values):
        yield name, _mamba2_values(name, values, config["n_groups"])

    arch = gguf.MODEL_ARCH.MAMBA2
    return arch, sizes, _named(arch, config, held, change)


def _granite_ssm(config):
    names = ("n_heads", "d_head", "n_groups", "d_state", "d_conv")
    return _ssm(*(config[f"mamba_{name}"] for name in names))


def falcon_h1(config, held):
    sizes = _sizes(config, "rms_norm_eps") | _attention(config) | _granite_ssm(config)
    sizes["feed_forward_length"] = config["intermediate_size"]
    factors = {
        "down_proj": config["mlp_multipliers"][1],
        "gate_proj": config["mlp_multipliers"][0],
        "k_proj": config["key_multiplier"] * config["attention_in_multiplier"],
        "q_proj": config["attention_in_multiplier"],
        "v_proj": config["attention_in_multiplier"],
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "in_proj": config["ssm_in_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    inner = config["mamba_d_ssm"]
    state = config["mamba_n_groups"] * config["mamba_d_state"]
    parts = [inner, inner, state, state, config["mamba_n_heads"]]
    columns = np.repeat(config["ssm_multipliers"], parts).astype(np.float32)[:, None]

    def change(name, values):
        values = _mamba2_values(name, values, config["mamba_n_groups"])
        values = values * np.float32(factors.get(name.split(".")[-2], 1.0))
        yield name, values * columns if "in_proj" in name else values

    arch = gguf.MODEL_ARCH.FALCON_H1
    return arch, sizes, _named(arch, config, held, change)


def granite(config, held):
    """With Mamba2 in some layers; or of an older name, if all layers attend."""
    attends = [kind in ("attention", "full_attention") for kind in config["layer_types"]]
    num_experts, width = config["num_local_experts"], config["intermediate_size"]
    sizes = _sizes(config, "rms_norm_eps") | _attention(config)
    sizes |= _experts(config, "num_local_experts")
    sizes |= {
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
        "expert_shared_feed_forward_length": config["shared_intermediate_size"],
        "feed_forward_length": width,
        "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
        "rope.scaling.finetuned": all(attends),
    }
    kinds = gguf.MODEL_ARCH
    arch = kinds.GRANITE_MOE if num_experts else kinds.GRANITE
    if not all(attends):
        arch, count = kinds.GRANITE_HYBRID, config["num_key_value_heads"]
        sizes["attention.head_count_kv"] = [count * each for each in attends]
        sizes |= {"context_length": 2**20, **_granite_ssm(config)}

    def change(name, values):
        layer, _, part = name.rpartition("layers.")[2].partition(".")
        shared = "_shexp" if num_experts else ""
        if part == "block_sparse_moe.input_linear.weight":
            yield f"blk.{layer}.ffn_gate_exps.weight", values[:, :width]
            yield f"blk.{layer}.ffn_up_exps.weight", values[:, width:]
        elif part == "shared_mlp.input_linear.weight":
            gate, up = np.split(values, 2)
            yield f"blk.{layer}.ffn_gate{shared}.weight", gate
            yield f"blk.{layer}.ffn_up{shared}.weight", up
        elif part == "shared_mlp.output_linear.weight":
            yield f"blk.{layer}.ffn_down{shared}.weight", values
        elif part.endswith(("q_proj.weight", "k_proj.weight")):
            which = "num_attention_heads" if "q_proj" in part else "num_key_value_heads"
            yield name, by_pairs(values, config[which])
        else:
            yield name, _mamba2_values(name, values, config["mamba_n_groups"])

    return arch, sizes, _named(arch, config, held, change)


def nemotron_h(config, held):
    """Layers with experts, or dense ones; llama.cpp has no name for both in one model."""
    kinds = config["layers_block_type"]
    has_experts = "moe" in kinds
    width = config["moe_intermediate_size" if has_experts else "intermediate_size"]
    heads = config["num_key_value_heads"]
    sizes = (
        _sizes(config, "layer_norm_epsilon")
        | _attention(config)
        | {
            "attention.head_count_kv": [heads * (kind == "full_attention") for kind in kinds],
            "feed_forward_length": [width * (kind in ("moe", "mlp")) for kind in kinds],
            "rope.scaling.finetuned": False,
            **_ssm(
                config["mamba_num_heads"],
                config["mamba_head_dim"],
                config["n_groups"],
                config["ssm_state_size"],
                config["conv_kernel"],
            ),
        }
    )
    if has_experts:
        sizes |= _experts(config, "n_routed_experts") | {
            "expert_feed_forward_length": width,
            "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
            "expert_shared_count": config["n_shared_experts"],
            "expert_weights_norm": config["norm_topk_prob"],
            "expert_weights_scale": config["routed_scaling_factor"],
            "expert_group_count": config["n_group"],
            "expert_group_used_count": config["topk_group"],
        }
        if config["moe_latent_size"]:
            sizes["moe_latent_size"] = config["moe_latent_size"]

    def change(name, values):
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            which = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            values = by_pairs(values, config[which])
        yield name, _mamba2_values(name, values, config["n_groups"])

    arch = gguf.MODEL_ARCH.NEMOTRON_H_MOE if has_experts else gguf.MODEL_ARCH.NEMOTRON_H
    return arch, sizes, _named(arch, config, held, change)


def lfm2(config, held):
    """Also with experts: the metadata says which layers have none."""
    attends = [kind == "full_attention" for kind in config["layer_types"]]
    sizes = (
        _sizes(config, "norm_eps")
        | _attention(config)
        | {
            "attention.head_count_kv": [config["num_key_value_heads"] * each for each in attends],
            "feed_forward_length": config["intermediate_size"],
            "shortconv.l_cache": config["conv_L_cache"],
            "vocab_size": config["vocab_size"],
        }
    )
    arch = gguf.MODEL_ARCH.LFM2
    if "num_experts" in config:
        arch = gguf.MODEL_ARCH.LFM2MOE
        sizes |= _experts(config, "num_experts") | {
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
            "leading_dense_block_count": config["num_dense_layers"],
        }

    def change(name, values):
        yield name, values[:, 0] if "conv.conv" in name else values

    return arch, sizes, _named(arch, config, held, change)


def _gated_sizes(config):
    rope, heads = config["rope_parameters"], config["linear_num_value_heads"]
    sizes = _sizes(config, "rms_norm_eps") | _attention(config)
    sizes |= _ssm(
        heads,
        config["linear_value_head_dim"],
        config["linear_num_key_heads"],
        config["linear_key_head_dim"],
        config["linear_conv_kernel_dim"],
    )
    sizes["full_attention_interval"] = config.get("full_attention_interval", 4)
    sizes["rope.dimension_count"] = int(config["head_dim"] * rope["partial_rotary_factor"])
    if "intermediate_size" in config:
        sizes["feed_forward_length"] = config["intermediate_size"]
    if "num_experts" in config:
        sizes |= _experts(config, "num_experts") | {
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
        }
    return sizes


def _gated_values(name, values):
    """-exp(A_log), the convolution without its axis of 1, norms centred at one."""
    if name.endswith(".A_log"):
        return -np.exp(values)
    if "conv1d" in name:
        return values[:, 0]
    is_centred = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
    return values + np.float32(1) if is_centred else values


def qwen3_next(config, held):
    """Queries, keys and values of all key heads in one tensor, z in another; no draft head."""
    key_heads, served = config["linear_num_key_heads"], config["linear_num_value_heads"]
    served = served // key_heads * config["linear_value_head_dim"]
    key_dim = config["linear_key_head_dim"]

    def change(name, values):
        if name.endswith("in_proj_qkvz.weight"):
            layer = name.split(".")[2]
            by_head = values.reshape(key_heads, 2 * key_dim + 2 * served, -1)
            cuts = np.cumsum([key_dim, key_dim, served])
            *qkv, z = (part.reshape(-1, values.shape[1]) for part in np.split(by_head, cuts, 1))
            yield f"blk.{layer}.attn_qkv.weight", np.concatenate(qkv)
            yield f"blk.{layer}.attn_gate.weight", z
        else:
            yield name, _gated_values(name, values)

    arch = gguf.MODEL_ARCH.QWEN3NEXT
    held = {name: values for name, values in held.items() if not name.startswith("mtp.")}
    return arch, _gated_sizes(config), _named(arch, config, held, change)


def qwen3_5(config, held):
    """Value heads in turns, and the draft head as one more block."""
    key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    keys = 2 * key_heads * config["linear_key_head_dim"]
    trunk = config["num_hidden_layers"]
    sizes = _gated_sizes(config) | {"rope.dimension_sections": [11, 11, 10, 0]}
    if drafting := any(name.startswith("mtp.") for name in held):
        sizes |= {"block_count": trunk + drafting, "nextn_predict_layers": 1}

    def in_turns(values):
        size = len(values) // heads
        order = [
            (key * (heads // key_heads) + turn) * size + channel
            for turn in range(heads // key_heads)
            for key in range(key_heads)
            for channel in range(size)
        ]
        return values[order]

    def change(name, values):
        if found := re.fullmatch(r"mtp\.(\w+)\.weight", name):
            centred = values if found[1] == "fc" else values + np.float32(1)
            yield f"blk.{trunk}.nextn.{_DRAFTING[found[1]]}.weight", centred
            return
        name = name.replace("mtp.layers.0.", f"model.layers.{trunk}.")
        if re.search(r"linear_attn\.(in_proj_[zab]|A_log|dt_proj)", name):
            values = in_turns(values)
        elif "in_proj_qkv." in name or "conv1d" in name:
            values = np.concatenate([values[:keys], in_turns(values[keys:])])
        elif "linear_attn.out_proj" in name:
            values = in_turns(values.T).T
        yield name, _gated_values(name, values)

    is_sparse = "num_experts" in config
    arch = gguf.MODEL_ARCH.QWEN35MOE if is_sparse else gguf.MODEL_ARCH.QWEN35
    held = {name.replace("mtp.layers.0.mlp.experts", f"model.layers.{trunk}.mlp.experts"): values
            for name, values in held.items()}  # fmt: skip
    return arch, sizes, _named(arch, config, held, change)


CONVERTERS = {
    "falcon_h1": falcon_h1,
    "granitemoehybrid": granite,
    "lfm2": lfm2,
    "lfm2_moe": lfm2,
    "mamba2": mamba2,
    "nemotron_h": nemotron_h,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe_text": qwen3_5,
    "qwen3_next": qwen3_next,
}
"""By `model_type`."""
