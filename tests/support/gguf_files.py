"""GGUF files of the fixtures, written by the package `gguf` as llama.cpp's converter would."""

import json
import re

import gguf
import numpy as np
from gguf import GGMLQuantizationType, TokenType
from gguf_hybrids import CONVERTERS, by_pairs
from harness import FIXTURES
from safetensors.numpy import load_file
from tokenizer_folders import BYTES

ATTENDING = ["llama", "qwen3", "llama_draft", "qwen3_moe"]
"""Fixtures with attention alone."""
_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
}
_SMALL = re.compile(r"ssm_(a|d|conv1d|norm)|_norm|shortconv\.conv|gate_inp")
_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)_proj\.weight")


def write_gguf(fixture, path, kind="F32", *, change=None, tokens=True, entries=None):
    """The model of a fixture, or of a folder, as the file at `path`.

    Its matrices are of the type `kind`, but for those that llama.cpp keeps in float32, and those
    whose rows are no whole blocks, which it keeps in float16. `change` edits the tensors, by GGUF's
    names, before they are written. `entries` are metadata, or None where the file shall have none
    of that name.
    """
    folder = FIXTURES / fixture
    config = json.loads((folder / "config.json").read_text())
    arch, sizes, tensors = _converted(folder, config)
    name = gguf.MODEL_ARCH_NAMES[arch]
    metadata = {f"{name}.{key}": value for key, value in sizes.items()}
    metadata |= (_tokens() if tokens else {}) | (entries or {})
    writer = gguf.GGUFWriter(path, name)
    for key, value in metadata.items():
        add_entry(writer, key, value)
    if change is not None:
        change(tensors)
    for key, values in tensors.items():
        is_small = values.ndim == 1 or _SMALL.search(key)
        quantised = GGMLQuantizationType["F32" if is_small else kind]
        if values.shape[-1] % gguf.GGML_QUANT_SIZES[quantised][0]:
            quantised = GGMLQuantizationType.F16
        content = gguf.quants.quantize(np.ascontiguousarray(values), quantised)
        writer.add_tensor(key, content, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_entry(writer, key, value):
    """A metadata entry of the type that suits the value; None: nothing."""
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    add |= {str: writer.add_string, list: writer.add_array}
    if value is not None:
        add[type(value)](key, value)


def _converted(folder, config):
    """The architecture, the metadata under its name, and the tensors by GGUF's names."""
    stored = load_file(folder / "model.safetensors")
    held = {name: values.astype(np.float32) for name, values in stored.items()}
    if config["model_type"] in CONVERTERS:
        return CONVERTERS[config["model_type"]](config, held)
    arch = _ARCHITECTURES[config["model_type"]]
    return arch, _sizes(config), _attending(arch, config, held)


def _attending(arch, config, held):
    """The tensors of a model with attention alone, in GGUF's order of rows."""
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    tensors, stacks = {}, {}
    for name, values in held.items():
        if ".experts." in name:
            layer, expert, matrix = _EXPERT.fullmatch(name).groups()
            stacks.setdefault((layer, matrix), {})[int(expert)] = values
            continue
        if config["model_type"] == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            values = by_pairs(values, config[heads])
        tensors[names.get_name(name, (".weight",))] = values
    for (layer, matrix), experts in stacks.items():
        stack = np.stack([experts[number] for number in range(len(experts))])
        tensors[f"blk.{layer}.ffn_{matrix}_exps.weight"] = stack
    if config.get("rope_parameters", {}).get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(config)
    return tensors


def llama3_factors(config):
    """What the frequency of each pair of channels is divided by, one by one."""
    rope, size = config["rope_parameters"], config["head_dim"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for i in range(size // 2):
        turns = rope["original_max_position_embeddings"] * rope["rope_theta"] ** (-2 * i / size)
        turns /= 2 * np.pi
        share = min(max((turns - low) / (high - low), 0), 1)
        factors.append(1 / (share + (1 - share) / rope["factor"]))
    return np.array(factors, np.float32)


def _sizes(config):
    found = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
        "rope.dimension_count": config["head_dim"],
        "vocab_size": config["vocab_size"],
    }
    if "num_local_experts" in config:
        found["expert_count"] = config["num_local_experts"]
        found["expert_used_count"] = config["num_experts_per_tok"]
        found["expert_feed_forward_length"] = config["moe_intermediate_size"]
    return found


def byte_tokens():
    """The byte tokenizer's vocabulary, whose last token is "he" in place of padding; their types.

    A tokenizer of GPT-2's kind has merges, and the byte tokenizer none.
    """
    published = json.loads((BYTES / "tokenizer.json").read_text())
    special = {token["content"]: token["id"] for token in published["added_tokens"]}
    ids = published["model"]["vocab"] | special
    tokens = [*sorted(ids, key=ids.__getitem__)[:-1], "he"]
    kinds = [TokenType.NORMAL] * 256 + [TokenType.CONTROL] * 7 + [TokenType.NORMAL]
    return tokens, kinds


def _tokens():
    tokens, kinds = byte_tokens()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.chat_template": (BYTES / "chat_template.jinja").read_text(),
    }
