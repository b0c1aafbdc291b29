"""DeepSeek-V3 and V3.2: published configs, names, the draft head's copies, planted bugs, FP8."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from quantised_folders import FORMATS, write_pair
from safetensors.numpy import load_file, save_file

import jaxspec
from benchmarks.published import MODELS
from jaxspec.models import deepseek, load_model, parse_config, unread
from jaxspec.models.config import DENSE, LATENT_ATTENTION, SPARSE
from jaxspec.models.layers import latent_attention, token_indexer
from jaxspec.models.layers.latent_attention import LatentAttentionConfig
from jaxspec.models.layers.moe import MoEConfig
from jaxspec.models.layers.token_indexer import TokenIndexConfig

FLOAT32 = jnp.dtype("float32")
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
COPIES = {
    "model.layers.3.shared_head.head.weight": HEAD,
    "model.layers.3.embed_tokens.weight": EMBEDDINGS,
}


@pytest.fixture
def changed(tmp_path, fixture_folder):
    """A fixture's copy with other fields and other tensors."""

    def change(name, tensors=lambda held: held, **fields):
        folder = shutil.copytree(fixture_folder(name), tmp_path / "model")
        config = json.loads((folder / "config.json").read_text()) | fields
        config = {name: value for name, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors(load_file(folder / "model.safetensors")), folder / "model.safetensors")
        return folder

    return change


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v3.2"])
def test_a_published_configuration_is_read(name):
    config = parse_config(MODELS[name].config)
    assert config.layer_types == (LATENT_ATTENTION,) * 61
    assert config.feed_forward_types == (DENSE,) * 3 + (SPARSE,) * 58
    sizes = config.part(LatentAttentionConfig)
    assert (sizes.query_rank, sizes.rank, sizes.width, sizes.value_dim) == (1536, 512, 576, 128)
    assert sizes.scale == pytest.approx(192**-0.5 * (0.1 * np.log(40) + 1) ** 2)
    assert config.rope.rotary_dim == 64 and config.rope.magnitude == 1
    assert config.max_position_embeddings == 163840
    experts = config.part(MoEConfig)
    rule = experts.routing
    assert (rule.num_experts, rule.num_chosen, rule.groups, rule.top_groups) == (256, 8, 8, 4)
    assert (rule.score, rule.scale, experts.shared_size) == ("sigmoid", 2.5, 2048)
    index = config.find_part(TokenIndexConfig)
    wanted = TokenIndexConfig(64, 128, 2048) if name == "deepseek-v3.2" else None
    assert index == wanted
    assert config.num_draft_layers == 1 and config.draft_mixer_type == LATENT_ATTENTION


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scoring_func": "softmax"}, "`scoring_func` must be 'sigmoid'"),
        ({"topk_method": "greedy"}, "`topk_method` must be 'noaux_tc'"),
        ({"rope_interleave": False}, "`rope_interleave` must be True"),
        ({"moe_layer_freq": 2}, "`moe_layer_freq` must be 1"),
        ({"n_group": 3}, "not a multiple of 3"),
        ({"num_experts_per_tok": 5}, "`num_experts_per_tok` must be an integer from 1 to 4"),
        ({"num_nextn_predict_layers": 2}, "`num_nextn_predict_layers` must be"),
        ({"layer_types": ["linear_attention"] * 3}, "`layer_types` must name 'full_attention'"),
        ({"mlp_layer_types": ["dense", "sparse"]}, "`mlp_layer_types` must name 'dense' or"),
        ({"mlp_layer_types": ["dense"] * 3}, "`first_k_dense_replace` mean the same, and differ"),
        ({"first_k_dense_replace": None}, "must give `first_k_dense_replace`"),
        ({"q_lora_rank": "48"}, "`q_lora_rank` must be"),
        ({"attention_bias": True}, "`attention_bias` must be False"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(fields, message, fixture_folder):
    config = json.loads((fixture_folder("deepseek_v3") / "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        parse_config(config | fields)


def test_an_index_needs_a_latent_of_queries_and_channels_to_rotate(fixture_folder):
    config = json.loads((fixture_folder("deepseek_v32") / "config.json").read_text())
    with pytest.raises(ValueError, match="must give `q_lora_rank`"):
        parse_config(config | {"q_lora_rank": None})
    with pytest.raises(ValueError, match="`index_head_dim` must be at least `qk_rope_head_dim`"):
        parse_config(config | {"index_head_dim": 8})


def test_dense_layers_are_told_by_a_list_or_a_number(changed, fixture_folder):
    listed = changed(
        "deepseek_v3", first_k_dense_replace=None, mlp_layer_types=["dense"] + ["sparse"] * 2
    )
    one, other = (load_model(each, FLOAT32) for each in (listed, fixture_folder("deepseek_v3")))
    assert one.config == other.config


def test_queries_may_have_no_latent(changed, reference, single_request):
    """DeepSeek-V2-Lite's form, with the product of both projections."""

    def joined(held):
        for layer in range(4):
            prefix = f"model.layers.{layer}.self_attn."
            held.pop(prefix + "q_a_layernorm.weight")
            first, second = (
                held.pop(f"{prefix}{name}.weight").astype(np.float32)
                for name in ("q_a_proj", "q_b_proj")
            )
            held[prefix + "q_proj.weight"] = second @ first
        return held

    model = load_model(changed("deepseek_v3", joined, q_lora_rank=None), FLOAT32)
    ids = np.arange(20) * 7 % 256
    _, whole = single_request(model).prefill(ids)
    _, parts = single_request(model).prefill(ids, 3)
    assert np.isfinite(whole).all()
    np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize(("top_k", "length"), [(512, 94), (94, 94), (24, 24)])
def test_an_index_that_selects_everything_changes_nothing(
    top_k, length, changed, tmp_path, reference, single_request
):
    """Neither one of more tokens than there may be, nor one of as many as there are."""

    def without_index(held):
        return {name: each for name, each in held.items() if ".indexer." not in name}

    folder = changed(
        "deepseek_v32", without_index, architectures=["DeepseekV3ForCausalLM"], layer_types=None
    )
    plain = load_model(folder, FLOAT32)
    folder.rename(tmp_path / "plain")
    indexed = load_model(changed("deepseek_v32", index_topk=top_k), FLOAT32)
    expected = reference("deepseek_v32")
    ids = np.concatenate([expected["prompt_ids"], expected["greedy_ids"]])[:length]
    for count in (1, 4):
        parts = ids[: length - 12], ids[length - 12 :]
        one, other = (single_request(model).decode(*parts, count) for model in (plain, indexed))
        np.testing.assert_array_equal(one, other)
    one, other = (single_request(model).prefill(ids, 31)[1] for model in (plain, indexed))
    np.testing.assert_array_equal(one, other)


# The draft head's layer


@pytest.mark.parametrize("names", [[], [HEAD], [EMBEDDINGS], [HEAD, EMBEDDINGS]])
def test_copies_of_embeddings_and_head_may_be_left_out(names, changed, fixture_folder):
    def without(held):
        return {name: each for name, each in held.items() if COPIES.get(name) not in names}

    model = load_model(changed("deepseek_v3", without), FLOAT32)
    whole = load_model(fixture_folder("deepseek_v3"), FLOAT32)
    assert model.has_draft_head
    for a, b in zip(*(jax.tree.leaves(nnx.state(each)) for each in (model, whole)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_that_differs_is_refused(copy, changed):
    def differing(held):
        held[copy] = held[copy].copy()
        held[copy][-1, -1] += 1
        return held

    def integers(held):
        held[copy] = np.zeros(held[copy].shape, np.int64)
        return held

    for change in (differing, integers):
        folder = changed("deepseek_v3", change)
        with pytest.raises(
            ValueError, match=f"{copy} must equal {COPIES[copy]}, .* remove all tensors"
        ):
            load_model(folder, FLOAT32)
        shutil.rmtree(folder)


def test_without_the_layer_after_the_last_there_is_no_draft_head(changed):
    def without(held):
        return {name: each for name, each in held.items() if ".layers.3." not in name}

    assert not load_model(changed("deepseek_v3", without), FLOAT32).has_draft_head


def test_weights_of_a_copy_are_compared_in_updates_too(fixture_folder):
    folder = fixture_folder("deepseek_v3")
    tensors = load_file(folder / "model.safetensors")
    with unread(folder, FLOAT32) as found:
        found.read()
        found.layout.fitting("weights", tensors, ())
        name = next(iter(COPIES))
        for changed in (tensors[name] * 2, tensors[name][1:]):
            # On the host: beside an engine, devices may have no room for both.
            with (
                jax.transfer_guard_host_to_device("disallow_explicit"),
                pytest.raises(ValueError, match=f"weights: {name} must equal {HEAD}"),
            ):
                found.layout.fitting("weights", tensors | {name: changed}, ())


def test_inspection_names_the_layers(fixture_folder):
    found = jaxspec.inspect(fixture_folder("deepseek_v32"))
    assert found.refused == () and found.cache.token > 0
    assert found.layers == {"LatentAttention + GatedMLP": 1, "LatentAttention + MoE": 2}


# Quantised folders


@pytest.mark.few(1)
@pytest.mark.parametrize("fixture", ["deepseek_v3", "deepseek_v32"])
def test_published_blocks_of_8_bits_are_read(fixture, fixture_folder, tmp_path, single_request):
    pair = write_pair(fixture_folder(fixture), tmp_path, FORMATS["fp8 blocks"])
    logits = [
        single_request(load_model(folder, FLOAT32)).prefill(np.arange(30))[1] for folder in pair
    ]
    np.testing.assert_allclose(*logits, rtol=0, atol=2e-3)


# Planted bugs


def halves_for_pairs(monkeypatch):
    monkeypatch.setattr(latent_attention, "rotate_pairs", token_indexer.rotate_halves)


def no_growth_of_scores(monkeypatch):
    def read(fields, *, growth=1.0, found=LatentAttentionConfig.read):
        return found(fields)

    monkeypatch.setattr(deepseek.LatentAttentionConfig, "read", staticmethod(read))


def index_without_rotation(monkeypatch):
    monkeypatch.setattr(token_indexer, "rotate_halves", lambda x, turns: x)


def norm_of_the_index_without_shift(monkeypatch):
    found = token_indexer.TokenIndexer._normed
    monkeypatch.setattr(
        token_indexer.TokenIndexer,
        "_normed",
        lambda self, keys: found(self, keys) - self.shift[...][None].astype(keys.dtype),
    )


@pytest.mark.soak
@pytest.mark.parametrize(
    ("fixture", "bug"),
    [
        ("deepseek_v3", halves_for_pairs),
        ("deepseek_v3", no_growth_of_scores),
        ("deepseek_v32", index_without_rotation),
        ("deepseek_v32", norm_of_the_index_without_shift),
    ],
)
def test_a_planted_bug_is_seen(
    fixture, bug, fixture_folder, reference, single_request, monkeypatch
):
    expected = reference(fixture)
    bug(monkeypatch)
    jax.clear_caches()  # programs of the same model without the bug
    model = load_model(fixture_folder(fixture), FLOAT32)
    _, logits = single_request(model).prefill(expected["prompt_ids"])
    jax.clear_caches()
    assert np.abs(logits - expected["logits_full"][: len(logits)]).max() > 0.05
