"""Small models with published vocabularies, heads and experts, and engines with random weights."""

import json
import shutil

from tokenizer_folders import BYTES

from benchmarks.published import MODELS
from jaxspec import LLM

# Layers by which every kind of a model's layers is there, where 2 do not suffice; and the three
# that an EAGLE-3 head reads.
LAYERS = {
    "llama-3.1-8b": 3,
    "nemotron-3-nano-30b-a3b": 3,
    "nemotron-3.5-lightning-30b-a3b": 3,
    "lfm2-8b-a1b": 3,
    "kimi-linear-48b-a3b": 3,
    "gemma-4-e2b": 4,
    "ling-3.0-flash": 3,
    "ling-3.0-tiny": 3,
}
# Everything else is a default. With the default sizes five programs are compiled for each kind of
# sampling, which takes half a minute a kind on two cores; with these there are two.
SIZES = {
    "max_num_seqs": 2,
    "decode_buckets": [2],
    "prefill_buckets": [64],
    "show_progress": False,
}


def write_small(name, folder, *, has_tokenizer=False):
    """The files of a small model that has no weights."""
    published = MODELS[name]
    published.write(folder, published.small(LAYERS.get(name, 2)))
    if has_tokenizer:
        write_tokenizer(folder, vocabulary(name))
    return folder


def make_llm(folder, **options):
    """An engine with random weights for it."""
    return LLM(folder, load_format="dummy", **{**SIZES, **options})


def vocabulary(name):
    """The number of ids."""
    config = MODELS[name].config
    return config.get("text_config", config)["vocab_size"]


def write_tokenizer(folder, vocab):
    """The byte tokenizer, with a word for each id of the model that it has not.

    Its 256 bytes and 8 marks come first; the words come out and never go in.
    """
    shutil.copytree(BYTES, folder, dirs_exist_ok=True)
    content = json.loads((BYTES / "tokenizer.json").read_text())
    words = content["model"]["vocab"]
    known = len(words) + len(content["added_tokens"])
    words |= {f"Ġ{number:x}": number for number in range(known, vocab)}
    (folder / "tokenizer.json").write_text(json.dumps(content))
