"""What an engine's options have become once the model is loaded."""

import jax
import jax.numpy as jnp
import pytest
from gguf_files import write_gguf
from harness import FIXTURES, model

from jaxspec import SpeculativeConfig, inspect
from jaxspec.api.loading import EMBEDDED_MODEL, load
from jaxspec.api.settling import settle
from jaxspec.models import MODELS, transfer
from jaxspec.models.layers.moe import MoEConfig
from jaxspec.options.engine_options import EngineConfig
from jaxspec.pallas import dispatch
from jaxspec.pallas.moe.route import Routing


def test_whatever_the_device_decided_is_written_into_the_options():
    """So that the same options give the same engine where "auto" would mean something else."""
    loaded = load(EngineConfig(FIXTURES / "qwen3_5", max_num_seqs=2), progress=False)
    assert loaded.folder == FIXTURES / "qwen3_5" and loaded.model.vocab_size == 264
    config = loaded.config
    assert config.dtype in ("float32", "bfloat16") and config.state_policy in ("snapshot", "replay")
    assert config.num_pages == loaded.runner.shapes.num_pages
    assert config.max_num_batched_tokens == loaded.limits.max_num_batched_tokens
    assert config.speculative_config == SpeculativeConfig(num_speculative_tokens=3)
    again = load(config, progress=False)
    assert again.config == config and again.runner.shapes == loaded.runner.shapes


PLUGIN = """
import jaxspec
from jaxspec.models.llama import Llama

class Plugged(Llama):
    pass

jaxspec.register_model("PluggedForCausalLM", Plugged)
"""


def test_a_module_registers_the_model_before_it_is_loaded(tmp_path, monkeypatch):
    """Also in a process that has nothing else of it, such as the server's."""
    (tmp_path / "plugged_model.py").write_text(PLUGIN)
    (tmp_path / "plugged_fault.py").write_text("raise OSError('planted')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("jaxspec.models.MODELS", MODELS.copy())
    options = {"hf_overrides": {"architectures": ["PluggedForCausalLM"]}, "max_num_seqs": 1}
    config = EngineConfig(FIXTURES / "llama", **options, model_plugin="plugged_model")
    assert type(load(config, progress=False).runner.model()).__name__ == "Plugged"
    for plugin in ("plugged_fault", "no_module", "", "."):
        with pytest.raises(ValueError, match="model_plugin"):
            load(EngineConfig(FIXTURES / "llama", **options, model_plugin=plugin), progress=False)


def test_the_embedded_model_is_the_default():
    loaded = load(EngineConfig(max_num_seqs=1, speculative_config=None), progress=False)
    assert loaded.folder == EMBEDDED_MODEL and loaded.proposer is None


def test_overrides_replace_what_config_json_says_for_loading_and_inspecting():
    overrides = {"max_position_embeddings": 40}
    config = EngineConfig(FIXTURES / "qwen3", max_num_seqs=1, hf_overrides=overrides)
    loaded = load(config, progress=False)
    assert loaded.runner.shapes.max_model_len == loaded.model.max_position_embeddings == 40
    assert loaded.config.hf_overrides == overrides
    found = inspect(FIXTURES / "qwen3", max_num_seqs=1, hf_overrides={"num_hidden_layers": 99})
    assert any("layers" in fault for fault in found.refused)
    with pytest.raises(ValueError, match="layers"):
        load(
            EngineConfig(FIXTURES / "qwen3", hf_overrides={"num_hidden_layers": 99}),
            progress=False,
        )


def test_the_tokenizer_is_the_model_s_another_one_or_none():
    def tokenizer(model=FIXTURES / "llama_draft", **options):
        return load(EngineConfig(model, max_num_seqs=1, **options), progress=False).tokenizer

    assert tokenizer() is None  # its folder has none
    assert tokenizer(tokenizer=FIXTURES / "tokenizer_bytes").encode("a") == [97]
    assert tokenizer(None) is not None and tokenizer(None, skip_tokenizer_init=True) is None


def test_a_gguf_file_brings_its_own_tokenizer_or_serves_as_another_model_s(tmp_path):
    path = write_gguf("llama", tmp_path / "x.gguf")
    plain = write_gguf("llama", tmp_path / "plain.gguf", tokens=False)
    loaded = load(EngineConfig(path, max_num_seqs=1), progress=False)
    assert loaded.folder == path and loaded.tokenizer.encode("he") == [263]
    assert loaded.model.eos_token_ids == (258,)
    assert load(EngineConfig(plain, max_num_seqs=1), progress=False).tokenizer is None
    options = {"tokenizer": path, "load_format": "dummy"}
    loaded = load(EngineConfig(plain, max_num_seqs=1, **options), progress=False)
    assert loaded.tokenizer.encode("he") == [263]


def test_what_is_no_tokenizer_or_generation_config_is_refused_before_any_tensor_is_read(
    monkeypatch,
):
    monkeypatch.setattr("jaxspec.models.weights.to_device", None)
    for options, message in (
        ({"tokenizer": FIXTURES / "qwen3_5"}, "tokenizer: .* tokenizer.json"),
        ({"tokenizer": "./none"}, "tokenizer: .* './none' is none of these"),
        ({"generation_config": FIXTURES}, "generation_config must be 'auto', 'vllm' or a folder"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            load(EngineConfig(FIXTURES / "qwen3_5", **options), progress=False)


@pytest.mark.few(4)
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize(
    ("name", "num_bytes", "options", "rule"),
    [
        ("qwen3_5", 10**5, {}, "Weights and caches must fit"),
        ("qwen3_5", 10**6, {"num_pages": 4096}, r"with num_pages \(4096\) they would take"),
        ("qwen3_5", 10**9, {"max_model_len": 513}, "must not exceed the model's 512 positions"),
        ("qwen3", 10**9, {"speculative_config": {}}, "this checkpoint has none"),
        ("qwen3_5", 10**9, {"speculative_config": {"draft_vocab": 265}}, "ids 0 to 263"),
        ("qwen3_5", 10**9, {"max_num_batched_tokens": 9}, "every row's verify and some prompt"),
    ],
)
def test_what_inspect_refuses_is_refused_in_its_words_before_any_tensor_is_read(
    name, num_bytes, options, rule, load_format, device_with, monkeypatch
):
    monkeypatch.setattr("jaxspec.models.weights.to_device", None)
    monkeypatch.setattr("jaxspec.models.draw_weights", None)
    device_with(num_bytes)
    options |= {"load_format": load_format}
    arrays = {id(array) for array in jax.live_arrays()}
    with pytest.raises(ValueError, match=rule) as caught:
        load(EngineConfig(FIXTURES / name, **options), progress=False)
    assert [str(caught.value)] == [*inspect(FIXTURES / name, **options).refused]
    assert {id(array) for array in jax.live_arrays()} <= arrays


def test_the_budget_is_what_was_free_before_anything_was_loaded(device_with, monkeypatch):
    num_bytes = 3 * 10**7

    def to_device(*arguments):
        device_with(num_bytes, in_use=num_bytes)  # what the weights take is no other engine's
        return transfer.to_device(*arguments)

    monkeypatch.setattr("jaxspec.models.weights.to_device", to_device)
    device_with(num_bytes)
    options = {"max_num_seqs": 64, "max_model_len": 512, "speculative_config": None}
    config = EngineConfig(FIXTURES / "qwen3", dtype="float32", **options)
    runner = load(config, progress=False).runner
    held, kv = sum(runner.memory().values()), runner.memory()["kv"]
    assert held <= 0.9 * num_bytes < held + kv // runner.shapes.num_pages
    assert runner.shapes.num_pages < 1 + 64 * 512 // 16


@pytest.mark.parametrize(
    ("experts", "chosen", "tokens"),
    [
        (256, 8, 4096),  # Qwen3.5-35B-A3B
        (512, 10, 4096),  # Qwen3-Next-80B-A3B
        (128, 8, 2048),  # Qwen3-30B-A3B
        (128, 6, 3072),
        (8, 3, 512),
        (8, 8, 512),
    ],
)
def test_a_step_has_as_many_prompt_tokens_as_make_experts_worth_reading(
    experts, chosen, tokens, monkeypatch
):
    """Unless the user says how many, or no prompts have so many."""
    sparse = model("qwen3_5")
    assert sparse.tokens_per_step == 512
    part = MoEConfig(Routing(experts, chosen), intermediate_size=32)
    monkeypatch.setattr(type(sparse), "experts", property(lambda _: part))
    monkeypatch.setattr(type(sparse), "max_position_embeddings", property(lambda _: 8192))
    monkeypatch.setattr(dispatch, "kernels_here", lambda: (False, "the device is a cpu"))
    assert sparse.tokens_per_step == 512
    monkeypatch.setattr(dispatch, "kernels_here", lambda: (True, None))

    def budget(**options):
        shapes = settle(EngineConfig(**options), sparse, jnp.dtype("float32")).shapes
        return shapes.prefill_tokens[-1]

    assert sparse.tokens_per_step == tokens == budget()
    assert budget(max_num_batched_tokens=100) == 100
    assert budget(max_model_len=64, max_num_seqs=2) == 512


def test_where_kernels_run_a_dense_model_has_larger_steps_too(monkeypatch):
    dense = model("qwen3_5")
    assert (dense.tokens_per_step, dense.steps_per_dispatch) == (512, 1)
    monkeypatch.setattr(dispatch, "kernels_here", lambda: (True, None))
    monkeypatch.setattr(type(dense), "max_position_embeddings", property(lambda _: 8192))
    shapes = settle(EngineConfig(), dense, jnp.dtype("float32")).shapes
    assert shapes.prefill_tokens == (64, 256, 512, 2048)
    assert (shapes.max_prefill_seqs, shapes.steps_per_dispatch) == (8, 8)


@pytest.mark.parametrize(
    ("billions", "steps"), [(0.8, 8), (4, 8), (9, 4), (14, 2), (27, 1), (80, 1)]
)
def test_the_more_weights_a_step_reads_the_fewer_steps_are_dispatched_at_once(
    billions, steps, monkeypatch
):
    dense = model("qwen3_5")
    weights = {"all": jax.ShapeDtypeStruct((int(billions * 10**9),), jnp.bfloat16)}
    monkeypatch.setattr(dispatch, "kernels_here", lambda: (True, None))
    monkeypatch.setattr("jaxspec.models.base.nnx.state", lambda _: weights)
    assert dense.steps_per_dispatch == steps
