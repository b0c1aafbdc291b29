"""Every method of drafting at a published vocabulary gives what is given without drafts."""

import dataclasses

import jax.numpy as jnp
import pytest
from pairwise import soak
from real_models import LAYERS, make_llm, write_small

from benchmarks.published import MODELS, PublishedModel
from benchmarks.published.gemma import assistant_of
from jaxspec import SamplingParams
from jaxspec.options import METHODS
from jaxspec.proposers import Drafts, Proposer

PROMPT = {"prompt_token_ids": [*range(1000, 1020), *range(1000, 1020)]}
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
TARGETS = {
    "mtp": "nemotron-3.5-lightning-30b-a3b",
    "eagle3": "llama-3.1-8b",
    "assistant": "gemma-4-e2b",
}
OTHERS = "lfm2-1.2b"  # the target of the other methods


@dataclasses.dataclass(frozen=True)
class RepeatProposer(Proposer):
    num_drafts: int = 2

    def propose(self, model, inputs, pools, tables):
        shape = inputs.slots.shape[0], inputs.num_drafts
        tokens = jnp.broadcast_to(inputs.last_token[:, None], shape)
        return Drafts(tokens, jnp.where(inputs.should_draft, inputs.num_drafts, 0), None), pools


def eagle3_head(folder):
    """One layer of the target's sizes, with a vocabulary of its own."""
    small = MODELS["llama-3.1-8b"].small(1)
    own = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32_000}
    del small["rope_scaling"]
    return PublishedModel({}, {}).write(folder, small | own)


def assistant(folder):
    small = MODELS[TARGETS["assistant"]].small(LAYERS[TARGETS["assistant"]])
    return PublishedModel({}, {}).write(folder, assistant_of(small))


# What each method is told, given a folder of its own.
SPECULATION = {
    "mtp": lambda folder: {},
    "ngram": lambda folder: {},
    "suffix": lambda folder: {},
    "draft_model": lambda folder: {"model": write_small(OTHERS, folder)},
    "eagle3": lambda folder: {"model": eagle3_head(folder), "aux_layer_ids": [0, 1, 2]},
    "assistant": lambda folder: {"model": assistant(folder)},
    "extract_hidden_states": lambda folder: {"layers": [0, 2], "folder": folder},
    "custom": lambda folder: {"proposer": RepeatProposer()},
}
NEVER_DRAFTS = {"extract_hidden_states"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The tokens that a model gives without drafts, by its name."""
    found = {}

    def get(name, folder):
        if name not in found:
            with make_llm(folder, **options(None)) as llm:
                found[name] = llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids
        return found[name]

    return get


def options(speculation):
    sizes = {"max_num_seqs": 1, "decode_buckets": [1], "max_model_len": 128}
    return sizes | {"speculative_config": speculation, "skip_tokenizer_init": True}


def test_every_method_is_here():
    assert SPECULATION.keys() == METHODS.keys()


@pytest.mark.soak
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "method",
    ["mtp", "ngram", *map(soak, sorted(METHODS.keys() - {"mtp", "ngram"}))],
)
def test_drafts_change_no_token(method, plain, tmp_path):
    name = TARGETS.get(method, OTHERS)
    folder = write_small(name, tmp_path / "target")
    told = SPECULATION[method](tmp_path / "drafter")
    with make_llm(folder, **options({"method": method, **told})) as llm:
        output, again = (llm.generate(PROMPT, PARAMS)[0].outputs[0] for _ in range(2))
    assert output.token_ids == again.token_ids == plain(name, folder)
    assert bool(again.metrics.num_draft_tokens) is (method not in NEVER_DRAFTS)
    if method in NEVER_DRAFTS:
        assert len(list((tmp_path / "drafter").glob("*.safetensors"))) == 2
