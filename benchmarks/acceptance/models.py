"""The models that are accepted, with random weights: a line each, and the engines they run in."""

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure.model_shapes import SHAPES
from benchmarks.measure.words import write_words
from benchmarks.published import MODELS as PUBLISHED
from benchmarks.published import PublishedModel
from benchmarks.published.gemma import assistant_of

MTP = {"method": "mtp", "num_speculative_tokens": 3}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
_ASSISTANT = "assistant"  # also its folder in that of the model
ASSISTANT = {"method": _ASSISTANT, "num_speculative_tokens": 3}
LAYERS = 4  # of a model that is cut: they cover each kind of layer
EXACT_ROWS, EXACT_CHUNK = 8, 64


@dataclasses.dataclass(frozen=True)
class Model:
    """A published model, at full width.

    `layers` None keeps all. `has_all` models run with each feature and each option; the others run
    greedily, with published defaults and with all features in one batch.
    """

    drafts: dict[str, Any]
    layers: int | None = LAYERS
    has_all: bool = False
    returns_routes: bool = False  # the experts of each token


MODELS = {
    "qwen3.5-0.8b": Model(MTP, layers=None, has_all=True),
    "qwen3.5-9b": Model(MTP, has_all=True),
    "qwen3.5-35b-a3b": Model(MTP),
    "qwen3-next-80b-a3b": Model(MTP),
    "nemotron-3-nano-30b-a3b": Model(NGRAM),
    "granite-4-h-small": Model(NGRAM),
    "falcon-h1-1.5b": Model(NGRAM),
    "lfm2-8b-a1b": Model(NGRAM, returns_routes=True),
    "llama-3.1-8b": Model(NGRAM),
    "mamba2-2.7b": Model(NGRAM),
    "kimi-linear-48b-a3b": Model(NGRAM),
    "gpt-oss-20b": Model(NGRAM),
    "qwen3.5-27b": Model(MTP),
}
OTHERS = {  # run only if they are named
    "qwen3-8b": Model(NGRAM),
    "qwen3-30b-a3b": Model(NGRAM),
    "lfm2-1.2b": Model(NGRAM),
    "granite-3.3-8b": Model(NGRAM),
    "qwen2.5-14b": Model(NGRAM),
    "mistral-7b-v0.3": Model(NGRAM),
    "gemma-4-31b": Model(NGRAM),
    "gemma-4-26b-a4b": Model(NGRAM),
    "gemma-4-e2b": Model(ASSISTANT),
    "glm-4.7-flash": Model(MTP),
    "glm-4.5-air": Model(MTP),
    "ling-3.0-flash": Model(MTP),
    "ling-3.0-tiny": Model(MTP),
    # Some 30 GB a layer of experts in float32: alone on a GPU.
    "deepseek-v3": Model(MTP),
    "deepseek-v3.2": Model(MTP),
    "tiny": Model(MTP),  # for tests
    "tiny-all": Model(MTP, has_all=True),
    "tiny-of-four": Model(MTP),
}
TINY = {name: SHAPES[name.removesuffix("-all")] for name in ("tiny", "tiny-all", "tiny-of-four")}
ALL_MODELS = MODELS | OTHERS


class Sizes(NamedTuple):
    """Rows at a time, and tokens of a request: of its prompt, new ones, and prefilled per step."""

    rows: int = 64
    prompt: int = 512
    tokens: int = 64
    chunk: int = 512

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return self.prompt + 8 * self.tokens


def config_of(name: str, *, is_small: bool = False, exact: bool = False) -> dict[str, Any]:
    """Return config.json, whole or cut to a few layers; `exact` cuts all, for float32."""
    if name in TINY:
        return {**TINY[name].config(), "eos_token_id": 25}  # " z", which no form allows
    published, layers = PUBLISHED[name], ALL_MODELS[name].layers
    if is_small:
        return published.small(LAYERS)
    if layers is None and not exact:
        return published.config
    return published.thin(layers or LAYERS)


@contextlib.contextmanager
def folder_of(name: str, config: dict[str, Any]) -> Iterator[Path]:
    """Yield a folder with the configuration and a tokenizer."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        if name in TINY:
            (folder / "config.json").write_text(json.dumps(config))
        else:
            PUBLISHED[name].write(folder, config)
        if ALL_MODELS[name].drafts is ASSISTANT:
            PublishedModel({}, {}).write(folder / _ASSISTANT, assistant_of(config))
        write_words(folder, config.get("text_config", config)["vocab_size"])
        yield folder


def drafts_of(name: str, folder: Path) -> dict[str, Any]:
    """Return the model's draft method; an assistant is read from the model's `folder`."""
    drafts = ALL_MODELS[name].drafts
    return {**drafts, "model": str(folder / _ASSISTANT)} if drafts is ASSISTANT else drafts


def options_of(
    name: str, folder: Path, sizes: Sizes, cache: Path | None, **others: Any
) -> dict[str, Any]:
    """Return the options of the engine of features; `others` replace them."""
    return {
        "load_format": "dummy",
        "speculative_config": drafts_of(name, folder),
        "enable_return_routed_experts": ALL_MODELS[name].returns_routes,
        "max_num_seqs": sizes.rows,
        "max_model_len": sizes.longest,
        "decode_buckets": [sizes.rows],
        "prefill_buckets": [sizes.chunk],
        "steps_per_dispatch": 1,
        "compilation_cache": cache,
        "show_progress": False,
        **others,
    }


def exact_options(cache: Path | None, **others: Any) -> dict[str, Any]:
    """Return the options of the float32 engines whose tokens are compared."""
    return {
        "load_format": "dummy",
        "dtype": "float32",
        "max_num_seqs": EXACT_ROWS,
        "max_model_len": 256,
        "decode_buckets": [EXACT_ROWS],
        "prefill_buckets": [EXACT_CHUNK],
        "steps_per_dispatch": 1,
        "enable_prefix_caching": False,
        "background_compilation": False,
        "compilation_cache": cache,
        "show_progress": False,
        **others,
    }
