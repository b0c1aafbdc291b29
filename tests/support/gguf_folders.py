"""Folders of fixtures that llama.cpp's converter takes: some with fewer layers than the fixture."""

import json
import re

import jax.numpy as jnp
import numpy as np
from gguf_files import write_gguf
from harness import FIXTURES
from safetensors.numpy import load_file, save_file

from jaxspec.models import load_model

FLOAT32 = jnp.dtype("float32")

_EXPERTS = {
    "architectures": ["Lfm2MoeForCausalLM"],
    "model_type": "lfm2_moe",
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_dense_layers": 2,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": True,  # llama.cpp knows no output head of these
    "use_expert_bias": True,
}
_NO_HEAD = {"num_nextn_predict_layers": 0}
_DENSE = {"num_local_experts": 0, "num_experts_per_tok": 0, "intermediate_size": 48}
# The fixture, its layers that stay, and what else config.json says. Dense and sparse layers in one
# model have no name in llama.cpp.
_PARTS = {
    "qwen3_next": ("qwen3_next", (0, 2, 3), {"full_attention_interval": 3, "mlp_only_layers": []}),
    "nemotron_h": ("nemotron_h", (0, 2, 3, 4), _NO_HEAD),
    "nemotron_h_moe": ("nemotron_h", (0, 1, 2, 4, 5), _NO_HEAD),
    "nemotron_h_latent": ("nemotron_h_latent", (0, 1, 2, 4, 5), _NO_HEAD),
    "granite_dense": ("granitemoehybrid", (0, 2, 3), _DENSE),
    "granite": ("granitemoehybrid", (2,), _DENSE | {"position_embedding_type": "rope"}),
    "granitemoe": ("granitemoehybrid", (2,), {"position_embedding_type": "rope"}),
}
HYBRIDS = [
    "mamba2",
    "falcon_h1",
    "lfm2",
    "lfm2_moe",
    "qwen3_5",
    "qwen3_5_tied",
    "qwen3_5_moe",
    "granitemoehybrid",
    *_PARTS,
]
"""Names that `published` takes."""


def published(name, folder):
    """The folder of a model that can be converted; a part of a fixture is written to `folder`."""
    if name == "lfm2_moe":
        return _with_experts(folder)
    return _part(*_PARTS[name], folder) if name in _PARTS else FIXTURES / name


def _part(fixture, layers, changes, folder):
    config = json.loads((FIXTURES / fixture / "config.json").read_text()) | changes
    for listed in ("layer_types", "layers_block_type"):
        if listed in config:
            config[listed] = [config[listed][layer] for layer in layers]
    config["num_hidden_layers"] = len(layers)
    held = {}
    for name, values in load_file(FIXTURES / fixture / "model.safetensors").items():
        if found := re.fullmatch(r"((?:model|backbone)\.layers\.)(\d+)(\..+)", name):
            if int(found[2]) not in layers:
                continue
            name = f"{found[1]}{layers.index(int(found[2]))}{found[3]}"
        if name.startswith("mtp."):
            continue
        if "block_sparse_moe" not in name or config["num_local_experts"]:
            held[name] = values
    return _write(folder, config, held)


def _with_experts(folder):
    """LFM2 with experts, drawn at random, in its last two layers."""
    config = json.loads((FIXTURES / "lfm2" / "config.json").read_text()) | _EXPERTS
    held, rng = load_file(FIXTURES / "lfm2" / "model.safetensors"), np.random.default_rng(0)
    del held["lm_head.weight"]
    for layer in (2, 3):
        prefix = f"model.layers.{layer}.feed_forward."
        held = {name: values for name, values in held.items() if not name.startswith(prefix)}
        shapes = {"gate.weight": (8, 64), "expert_bias": (8,)}
        for expert in range(8):
            shapes |= {f"experts.{expert}.{name}.weight": (32, 64) for name in ("w1", "w3")}
            shapes[f"experts.{expert}.w2.weight"] = (64, 32)
        for name, shape in shapes.items():
            held[prefix + name] = (rng.normal(size=shape) / 8).astype(np.float32)
    return _write(folder, config, held)


def _write(folder, config, held):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(held, folder / "model.safetensors")
    return folder


def assert_same_model(name, folder, single_request):
    """The GGUF file of a published model gives its scores, and so the same greedy ids.

    Where the fixture has some of another implementation's, they are these.
    """
    kept = published(name, folder / "published")
    models = [load_model(path, FLOAT32) for path in (write_gguf(kept, folder / "x.gguf"), kept)]
    rng, reference = np.random.default_rng(0), kept / "reference.safetensors"
    prompt, greedy = rng.integers(0, 256, 40), rng.integers(0, 256, 24)
    if reference.exists():
        held = load_file(reference)
        prompt, greedy = held["prompt_ids"], held["greedy_ids"]
    found, expected = (single_request(model).decode(prompt, greedy, 3) for model in models)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    np.testing.assert_array_equal(found.argmax(axis=-1), expected.argmax(axis=-1))
    if reference.exists():
        np.testing.assert_array_equal(found.argmax(axis=-1), greedy)
