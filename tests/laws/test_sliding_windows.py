"""Laws of attention over sliding windows: qwen2, gpt-oss with sinks and experts, and Gemma 4.

Gemma 4 has two sizes of attention, in pages and in windows, and layers that share either.
"""

import json
import shutil

import numpy as np
import pytest
from harness import FIXTURES, GREEDY, SAMPLED, Harness, continuations, oracle, prompts
from kept_prefixes import ask, keeping
from pairwise import soak
from safetensors import safe_open

import jaxspec
from jaxspec import LLM, SamplingParams
from jaxspec.pallas.attention.ring_tables import ring_length

WINDOW = 8  # of all fixtures
FAMILIES = ["gpt_oss", "qwen2", "gemma4", "gemma4_moe", "gemma4_shared"]
EACH = pytest.mark.parametrize("fixture", FAMILIES)
PROMPTS = prompts(5, seed=7)
MIXED = (0.8, 0.5, 0.5)


@pytest.mark.soak
@EACH
@pytest.mark.parametrize("drafts", [0, 3])
def test_greedy_ids_equal_the_reference(fixture, drafts):
    """Over 94 positions, nearly twelve windows, in chunks that no window divides."""
    with safe_open(FIXTURES / fixture / "reference.safetensors", "np") as file:
        prompt, greedy = (file.get_tensor(name).tolist() for name in ("prompt_ids", "greedy_ids"))
    params = SamplingParams(temperature=0.0, max_tokens=len(greedy))
    engine = Harness(fixture, drafts=drafts, method="ngram", chunk=33, max_in_flight=2)
    engine.add(prompt, params)
    engine.run()
    assert engine.requests[0].output == greedy


@pytest.mark.few(1)
@EACH
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_speculation_never_changes_output(fixture, params):
    """Drafts of which some are wrong, requests that come while others run, and preemptions."""
    asked = [(prompt, params, seed) for seed, prompt in enumerate(PROMPTS)]
    for depth, chunk, pages in ((0, 7, 400), (2, 64, 16), (3, 1, 400))[: 2 + (params is GREEDY)]:
        engine = Harness(
            fixture,
            drafts=3,
            accuracy=MIXED,
            continuations=continuations(fixture, asked),
            vary=True,
            feature_sets=(params.features,),
            max_in_flight=depth,
            chunk=chunk,
            num_pages=pages,
        )
        rng = np.random.default_rng(depth)
        for prompt, _, seed in asked:
            engine.add(prompt, params, seed)
            for _ in range(rng.integers(0, 4)):
                engine.step()
        assert engine.run().check() <= 1
        assert (engine.scheduler.num_preemptions > 0) == (pages == 16)


@pytest.mark.few(1)
@pytest.mark.parametrize("fixture", ["gpt_oss", *map(soak, ["qwen2", "gemma4", "gemma4_shared"])])
def test_a_hit_before_at_and_behind_the_border_of_a_window_changes_no_token(fixture):
    """A cached prefix of every length from 1 to two windows and more, then one that goes on."""
    prompt = tuple(np.random.default_rng(5).integers(0, 256, 2 * WINDOW + 4).tolist())
    one = SamplingParams(temperature=0.0, max_tokens=1)
    engine = keeping((prompt,), fixture, num_pages=120, num_checkpoints=40)
    for length in range(1, len(prompt)):
        engine.scheduler.prefixes.clear()
        ask(engine, prompt[:length], one)
        assert ask(engine, prompt).num_cached_tokens == length
    first = ask(engine, prompt)
    assert ask(engine, (*first.tokens, 3, 1)).num_cached_tokens == len(first.tokens) - 1
    assert engine.check() <= 1


@pytest.mark.soak
def test_a_window_of_the_whole_context_is_full_attention(tmp_path):
    """And one that is shorter is not."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    options = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 64}
    options |= {"max_num_seqs": 2, "decode_buckets": [2], "prefill_buckets": [32]}
    outputs = {}
    for name, changes in {
        "full": {"use_sliding_window": False, "layer_types": None},
        "wide": {"sliding_window": 64},
        "narrow": {},
    }.items():
        folder = shutil.copytree(FIXTURES / "qwen2", tmp_path / name)
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))
        with LLM(folder, speculative_config=None, **options) as llm:
            asked = [{"prompt_token_ids": list(range(3, 3 + size))} for size in (5, 33)]
            found = llm.generate(asked, params)
            outputs[name] = [each.outputs[0].token_ids for each in found]
    assert outputs["full"] == outputs["wide"] != outputs["narrow"]


def test_the_memory_of_a_window_does_not_grow_with_the_context():
    """Keys and values behind the window are overwritten; those of other layers are in pages."""
    engine = Harness("gpt_oss", drafts=3, method="ngram")
    pools = engine.runner.state.pools
    assert pools["window_kv"].shape[2] == ring_length(WINDOW, 4) == 32 < 96
    assert pools["window_kv"].shape[0] == pools["kv"].shape[0] == 2


@pytest.mark.soak
@pytest.mark.parametrize("fixture", ["qwen2", "gemma4_shared"])
def test_a_step_of_prompts_and_rows_copies_no_window(fixture):
    runner = Harness(fixture).runner
    shape = ",".join(map(str, runner.state.pools["window_kv"].shape))
    lines = [line for each in runner._programs.values() for line in each.as_text().splitlines()]
    of_window = [line for line in lines if f"[{shape}]" in line]
    assert of_window and not [line for line in of_window if " copy(" in line]


@EACH
def test_the_oracle_masks_the_window(fixture):
    """So it is no accident that the engine equals it: without the mask it gives other scores."""
    masked, whole = oracle(fixture).start(), oracle(fixture).start()
    whole.oracle = type("Whole", (), vars(masked.oracle) | {"config": dict(masked.oracle.config)})
    whole.oracle.config["sliding_window"] = 10**6
    for position in range(WINDOW + 2):
        difference = np.abs(masked.feed(position) - whole.feed(position)).max()
        assert (difference > 1e-3) == (position >= WINDOW)


@pytest.mark.parametrize(
    ("fixture", "layers"),
    [
        ("qwen2", {"Attention + GatedMLP": 2, "WindowAttention + GatedMLP": 2}),
        ("gpt_oss", {"Attention + MoE": 2, "WindowAttention + MoE": 2}),
        ("gemma4", {"Attention + GatedMLP": 2, "WindowAttention + GatedMLP": 2}),
        ("gemma4_moe", {"Attention + DenseAndSparse": 1, "WindowAttention + DenseAndSparse": 2}),
        (
            "gemma4_shared",
            {
                **{"Attention + GatedMLP": 2, "WindowAttention + GatedMLP": 2},
                "SharedAttention + DoubleGatedMLP": 1,
                "SharedWindowAttention + DoubleGatedMLP": 2,
            },
        ),
        ("gpt_oss_mxfp4", {"Attention + MoE": 2, "WindowAttention + MoE": 2}),
    ],
)
def test_inspection_describes_the_layers(fixture, layers):
    found = jaxspec.inspect(FIXTURES / fixture)
    assert found.refused == () and found.layers == layers and found.cache.request > 0
