"""Writes the bundle, a Hugging Face directory: checkpoint, tokenizer, licence and model card.

    python -m tools.embedded_model.export CORPUS_DIR OUT_DIR BUNDLE_DIR

Every figure of the card is read from what `corpus`, `train` and `evaluate` wrote. Run it with the
interpreter that ran `corpus`, whose licence text is copied.
"""

import argparse
import gzip
import json
import pathlib
import platform
import shutil
import sysconfig

import numpy as np
from tokenizers import Tokenizer

from tools.embedded_model import storage
from tools.embedded_model.corpus import END_OF_TEXT
from tools.embedded_model.evaluate import CONTEXT, NEW_TOKENS, PROMPT_TOKENS
from tools.embedded_model.layers import ModelConfig

TEMPLATES = pathlib.Path(__file__).parent / "templates"
MAX_BUNDLE_BYTES = 8_000_000
MAX_BITS_PER_BYTE = 1.4
MIN_TOKENS_PER_VERIFY = 2.0


def published_config(config: ModelConfig, end: int) -> dict:
    """config.json as transformers reads it."""
    layer_types = [
        "full_attention" if config.is_full_attention(layer) else "linear_attention"
        for layer in range(config.num_layers)
    ]
    pairs = config.rotary_dim // 2
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": end,
        "full_attention_interval": config.full_attention_interval,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "layer_types": layer_types,
        "linear_conv_kernel_dim": config.conv_width,
        "linear_key_head_dim": config.gdn_key_dim,
        "linear_num_key_heads": config.gdn_key_heads,
        "linear_num_value_heads": config.gdn_value_heads,
        "linear_value_head_dim": config.gdn_value_dim,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": CONTEXT,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "output_gate_type": "swish",
        "pad_token_id": None,
        "partial_rotary_factor": config.rotary_dim / config.head_dim,
        "rms_norm_eps": config.eps,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3],
            "partial_rotary_factor": config.rotary_dim / config.head_dim,
            "rope_theta": config.rope_theta,
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }


def tokenizer_config() -> dict:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
    }


def check_gates(evaluation: dict) -> None:
    greedy = evaluation["acceptance"]["temperature_0.0"]["tokens_per_verify"]
    if evaluation["held_out_bits_per_byte"] > MAX_BITS_PER_BYTE or greedy < MIN_TOKENS_PER_VERIFY:
        raise SystemExit(f"the model is not good enough to bundle: {evaluation}; train longer")


def model_card(corpus: dict, training: dict, evaluation: dict) -> str:
    """README.md of the bundle: the template with the measured figures filled in."""
    settings, final = training["settings"], training["joint"][-1]
    rows = "\n".join(
        f"| {temperature.removeprefix('temperature_')} | {result['tokens_per_verify']:.2f} | "
        + " | ".join(f"{share:.2f}" for share in result["acceptance_by_depth"])
        + f" | {result['verifies']} |"
        for temperature, result in evaluation["acceptance"].items()
    )
    figures = {
        "documents": corpus["documents"],
        "held_out_documents": corpus["held_out_documents"],
        "train_megabytes": f"{corpus['train_bytes'] / 1e6:.1f}",
        "train_megatokens": f"{corpus['train_tokens'] / 1e6:.2f}",
        "bytes_per_token": f"{corpus['train_bytes'] / corpus['train_tokens']:.2f}",
        "held_out_kilobytes": corpus["held_out_bytes"] // 1000,
        "python": platform.python_version(),
        "parameters": f"{training['parameters']:,}",
        "head_parameters": f"{training['head_parameters']:,}",
        "steps": settings["steps"],
        "distil_steps": settings["distil_steps"],
        "tokens_per_step": f"{settings['batch'] * settings['length']:,}",
        "epochs": round(
            settings["steps"] * settings["batch"] * settings["length"] / corpus["train_tokens"]
        ),
        "joint_seconds": round(training["joint_seconds"]),
        "distil_seconds": round(training["distil_seconds"]),
        "device": training["device"],
        "date": training["date"],
        "jax": training["jax"],
        "final_losses": " / ".join(f"{loss:.2f}" for loss in final["losses"]),
        "final_divergences": " / ".join(
            f"{loss:.2f}" for loss in training["distil"][-1]["divergences"]
        ),
        "bits_per_byte": f"{evaluation['held_out_bits_per_byte']:.3f}",
        "nats_per_token": f"{evaluation['held_out_nats_per_token']:.3f}",
        "evaluation_date": evaluation["date"],
        "evaluation_device": evaluation["device"],
        "acceptance_rows": rows,
    }
    return (TEMPLATES / "model_card.md").read_text().format(**figures)


def held_out_prompts(greedy: pathlib.Path) -> str:
    """The prompts of the measurement and the trunk's greedy continuations, as token ids."""
    rows = np.load(greedy)["rows"]
    prompts, continuations = (
        rows[:, :PROMPT_TOKENS],
        rows[:, PROMPT_TOKENS : PROMPT_TOKENS + NEW_TOKENS],
    )
    return (
        json.dumps(
            {"prompts": prompts.tolist(), "greedy": continuations.tolist()}, separators=(",", ":")
        )
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("corpus_dir", "out_dir", "bundle_dir"):
        parser.add_argument(name, type=pathlib.Path)
    arguments = parser.parse_args()
    corpus_dir, out_dir, bundle = arguments.corpus_dir, arguments.out_dir, arguments.bundle_dir
    bundle.mkdir(parents=True, exist_ok=True)
    corpus, training, evaluation = (
        json.loads(file.read_text())
        for file in (
            corpus_dir / "corpus.json",
            out_dir / "training.json",
            out_dir / "evaluation.json",
        )
    )
    check_gates(evaluation)

    end = Tokenizer.from_file(str(corpus_dir / "tokenizer.json")).token_to_id(END_OF_TEXT)
    documents = {
        "config.json": published_config(ModelConfig(), end),
        "generation_config.json": {"eos_token_id": end, "pad_token_id": end, "temperature": 0.0},
        "tokenizer_config.json": tokenizer_config(),
    }
    for name, content in documents.items():
        (bundle / name).write_text(json.dumps(content, indent=2) + "\n")
    shutil.copyfile(corpus_dir / "tokenizer.json", bundle / "tokenizer.json")
    shutil.copyfile(TEMPLATES / "chat_template.jinja", bundle / "chat_template.jinja")
    shutil.copyfile(
        pathlib.Path(sysconfig.get_path("stdlib")) / "LICENSE.txt", bundle / "LICENSE.PSF"
    )
    (bundle / "MANIFEST.txt.gz").write_bytes(
        gzip.compress((corpus_dir / "MANIFEST.txt").read_bytes(), 9, mtime=0)
    )
    (bundle / "held_out_prompts.json").write_text(held_out_prompts(out_dir / "greedy.npz"))
    storage.save_published(
        storage.load_params(out_dir / "model.safetensors"), bundle / "model.safetensors"
    )
    (bundle / "README.md").write_text(model_card(corpus, training, evaluation))

    for file in bundle.iterdir():
        file.chmod(0o644)
    size = sum(file.stat().st_size for file in bundle.iterdir())
    print(f"{size:,} bytes in {bundle}")
    if size > MAX_BUNDLE_BYTES:
        raise SystemExit(f"the bundle must not exceed {MAX_BUNDLE_BYTES:,} bytes")


if __name__ == "__main__":
    main()
