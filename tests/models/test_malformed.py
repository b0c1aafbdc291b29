"""Some 8,500 checkpoints with one thing wrong: each gets one clear error, or means the same.

An error is clear if it is a ValueError or FileNotFoundError, names what is wrong, and is short. A
change that is harmless loads to exactly the same model; the tables here say which are and why. No
case may take long, wait for another process, or raise anything else.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import shutil
import signal
import struct
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pairwise import soak

from jaxspec.models import load_model, weights
from jaxspec.models.kinds import Block

MAX_SECONDS = 20
MAX_CHARACTERS = 2000
SAME = "the same model"
FLOAT32 = jnp.dtype("float32")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@contextlib.contextmanager
def bounded():
    """End a case that hangs."""

    def stop(*_):
        raise TimeoutError(f"this took more than {MAX_SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(MAX_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Corpus:
    """A copy of a checkpoint, whose files are changed one at a time, and what came of that."""

    def __init__(self, source, folder):
        self.folder = shutil.copytree(source, folder)
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.config = json.loads(self.files["config.json"])
        content = self.files[WEIGHTS]
        start = 8 + int.from_bytes(content[:8], "little")
        self.header = json.loads(content[8:start])
        self.header.pop("__metadata__", None)
        self.tensors = {
            name: (entry["dtype"], entry["shape"], content[start + begin : start + end])
            for name, entry in self.header.items()
            for begin, end in [entry["data_offsets"]]
        }
        self.expected = self._load()
        self.count, self.faults = 0, []

    def _load(self):
        """What a model is: its leaves, and its configuration but what the tensors overrule."""
        model = load_model(self.folder, FLOAT32)
        config = dataclasses.replace(
            model.config, architecture="", tie_word_embeddings=None, num_draft_layers=0
        )
        return config, [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model))]

    def outcome(self):
        """`SAME`, or the text of the error; a note of what it should not have been."""
        try:
            with bounded():
                config, leaves = self._load()
        except (ValueError, FileNotFoundError) as error:
            return str(error)
        except Exception as error:
            return f"RAW {type(error).__name__}: {error}"
        if config != self.expected[0] or len(leaves) != len(self.expected[1]):
            return "ANOTHER configuration"
        equal = all(map(np.array_equal, leaves, self.expected[1]))
        return SAME if equal else "OTHER weights"

    def check(self, case, culprits):
        """One case: `SAME` where `culprits` is that, else an error with one of the culprits."""
        outcome = self.outcome()
        self.count += 1
        culprits = (culprits,) if isinstance(culprits, str) else culprits
        is_clear = outcome.split(" ")[0] not in ("RAW", "ANOTHER", "OTHER")
        if not (
            is_clear and len(outcome) <= MAX_CHARACTERS and any(c in outcome for c in culprits)
        ):
            self.faults.append(f"{case}: {outcome:.300}")

    @contextlib.contextmanager
    def changed(self, **contents):
        """Files (`config`, `weights`, ...) with other contents; as they were afterwards."""
        names = {NAMES[key]: content for key, content in contents.items()}
        for name, content in names.items():
            (self.folder / name).write_bytes(content)
        yield
        for name in names:
            self.restore(name)

    def restore(self, name):
        path = self.folder / name
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        if name in self.files:
            path.write_bytes(self.files[name])

    def done(self, least):
        """All cases came out as they should, and there were as many as are meant."""
        assert self.faults == [], "\n".join(self.faults)
        assert self.count >= least


NAMES = {
    "config": "config.json",
    "generation": "generation_config.json",
    "weights": WEIGHTS,
    "more": "model-2.safetensors",
    "index": INDEX,
}


def packed(tensors, **entries):
    """A safetensors file of `tensors`: name -> dtype, shape, bytes. `entries` go to the header."""
    header, data = {}, []
    place = 0
    for name, (dtype, shape, content) in tensors.items():
        offsets = [place, place + len(content)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data.append(content)
        place += len(content)
    return framed(json.dumps(header | entries).encode(), b"".join(data))


def framed(header, data):
    return struct.pack("<Q", len(header)) + header + data


@pytest.fixture(scope="module", autouse=True)
def models_are_built_once():
    """Parameters without values, which all cases share whose tensors tell the same of a model.

    They tell whether there is an output head, and whether there is a draft head.
    """

    def telling(family, config, dtype, tensors):
        heads = {"mtp."} if any(name.startswith("mtp.") for name in tensors) else set()
        return built(family, config, dtype, frozenset(heads | {"lm_head.weight"} & tensors))

    built = functools.cache(weights.undefined)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "undefined", telling)
        yield


@pytest.fixture
def corpus(tmp_path, fixture_folder, request):
    name = getattr(request, "param", "qwen3_5")
    source = fixture_folder(name)
    if not (source / WEIGHTS).exists():  # config.json alone, in another spelling
        spelled, weights_of = source / "config.json", name.removesuffix("_raw")
        source = shutil.copytree(fixture_folder(weights_of), tmp_path / "source")
        shutil.copy(spelled, source)
    return Corpus(source, tmp_path / "model")


ALL = pytest.mark.parametrize("corpus", ["qwen3_5", "qwen3_5_vl", "qwen3"], indirect=True)
EXPERTS = ["qwen3_5_moe", "qwen3_next", "qwen3_moe"]
# Dtypes of the format and one that it lacks, with the bytes of an element.
WRONG_DTYPES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2}
WRONG_DTYPES |= {"U16": 2, "I32": 4, "U32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8, "Q4_K": 1}


def read_names(corpus):
    """The tensors that the model takes; those of a vision tower it passes over unread."""
    return [name for name in corpus.tensors if not name.startswith("model.visual.")]


@pytest.mark.few(1)
@ALL
def test_a_tensor_that_is_missing_or_doubled_is_named(corpus):
    for name in read_names(corpus):
        others = {other: held for other, held in corpus.tensors.items() if other != name}
        with corpus.changed(weights=packed(others)):
            corpus.check(f"without {name}", name.replace("language_model.", ""))
        with corpus.changed(more=packed({name: corpus.tensors[name]})):
            corpus.check(f"{name} in two files", "(in model-2.safetensors and model.safetensors)")
    corpus.done(60)


def test_a_tensor_of_another_name_is_named(corpus):
    for name, held in corpus.tensors.items():
        others = {other: held for other, held in corpus.tensors.items() if other != name}
        with corpus.changed(weights=packed({**others, f"{name}s": held})):
            corpus.check(f"{name}s", f"Unexpected (1): {name}s.")
    corpus.done(60)


@pytest.mark.few(1)
@ALL
def test_a_tensor_of_another_shape_is_named(corpus):
    for name in read_names(corpus):
        dtype, shape, content = corpus.tensors[name]
        width = {"F32": 4, "BF16": 2}[dtype]
        shapes = [shape[::-1], [*shape, 1], [1, *shape], [len(content) // width], [0], []]
        for other in [other for other in shapes if other != shape]:
            size = width * int(np.prod(other))
            held = dtype, other, content[:size].ljust(size, b"\0")
            with corpus.changed(weights=packed({**corpus.tensors, name: held})):
                corpus.check(f"{name} {other}", name)
    corpus.done(100)


@pytest.mark.parametrize("corpus", ["qwen3", soak("qwen3_5")], indirect=True)
def test_a_tensor_of_another_dtype_is_named(corpus):
    for name in read_names(corpus):
        _, shape, _ = corpus.tensors[name]
        for dtype, size in WRONG_DTYPES.items():
            held = dtype, shape, bytes(size * int(np.prod(shape)))
            with corpus.changed(weights=packed({**corpus.tensors, name: held})):
                corpus.check(f"{name} {dtype}", f"F16 (1): {name} {dtype}.")
    corpus.done(400)


@pytest.mark.parametrize("corpus", ["qwen3_5_vl"], indirect=True)
def test_the_tensors_of_a_vision_tower_may_be_anything(corpus):
    unread = corpus.tensors.keys() - set(read_names(corpus))
    others = {name: held for name, held in corpus.tensors.items() if name not in unread}
    with corpus.changed(weights=packed(others)):
        corpus.check("none", SAME)
    for dtype, size in WRONG_DTYPES.items():
        held = {f"model.visual.{dtype}": (dtype, [3], bytes(3 * size))}
        with corpus.changed(weights=packed({**others, **held})):
            corpus.check(dtype, SAME)
    corpus.done(1 + len(WRONG_DTYPES))


FAMILIES = ["qwen3_5_moe", "qwen3_5_moe_raw", "qwen3_next", "qwen3_moe"]  # the second has stacks
OF_EXPERTS = pytest.mark.parametrize("corpus", FAMILIES, indirect=True)


@pytest.fixture
def unread(corpus, monkeypatch):
    """The corpus; no tensor is read from here on, and no memory is taken."""
    monkeypatch.setattr(weights, "to_device", None)
    return corpus


@pytest.mark.soak
@OF_EXPERTS
def test_each_tensor_of_a_mixture_of_experts_is_missed_and_judged(unread):
    """Absent, of another shape or dtype, doubled, renamed: before any is read."""
    dtypes = itertools.cycle(WRONG_DTYPES.items())
    for name, (dtype, shape, content) in unread.tensors.items():
        others = {other: held for other, held in unread.tensors.items() if other != name}
        (other, size), same = next(dtypes), (dtype, shape, content)
        missing = name.replace("language_model.", "")
        for case, file, culprits in (
            ("missing", packed(others), f"Missing (1): {missing}"),
            ("renamed", packed({**others, f"{name}s": same}), f"Unexpected (1): {name}s."),
            (
                "of another shape",
                packed({**others, name: (dtype, [*shape, 1], content)}),
                f"Wrong shape (1): {name} {[*shape, 1]} instead of {shape}.",
            ),
            (
                "of another dtype",
                packed({**others, name: (other, shape, bytes(size * math.prod(shape)))}),
                f"F16 (1): {name} {other}.",
            ),
        ):
            with unread.changed(weights=file):
                unread.check(f"{name} {case}", culprits)
        with unread.changed(more=packed({name: same})):
            unread.check(f"{name} in two files", f"Twice (1): {missing} (in model-2.safe")
    unread.done(5 * 90)


def experts_of(corpus, number=""):
    """The tensors of all experts that compete, or of one of them."""
    return {name for name in corpus.tensors if f".mlp.experts.{number}" in name}


@OF_EXPERTS
def test_a_number_of_experts_that_the_tensors_do_not_have_is_refused(unread):
    config = unread.config.get("text_config", unread.config)
    field = "num_experts" if "num_experts" in config else "num_local_experts"
    for count in (
        config[field] // 2,
        config[field] - 1,
        config[field] + 1,
        2 * config[field],
        4096,
        4097,
        10**9,
    ):
        changed = unread.config | {field: count}
        if "text_config" in unread.config:
            changed = unread.config | {"text_config": config | {field: count}}
        with unread.changed(config=json.dumps(changed).encode()):
            unread.check(f"{count} experts", field if count > 4096 else ".mlp.experts.")
    unread.done(7)


@OF_EXPERTS
def test_experts_that_are_missing_altogether_are_named_in_both_spellings(unread):
    layer, experts = "model.layers.0.mlp.experts.", experts_of(unread)
    up = {name for name in experts if "down" not in name}
    for lost, matrix, stack, more in (
        (up, "gate_proj", "gate_up_proj", 15),
        (experts - up, "down_proj", "down_proj", 7),
    ):
        rest = {name: unread.tensors[name] for name in unread.tensors.keys() - lost}
        with unread.changed(weights=packed(rest)):
            unread.check(
                f"no {stack}",
                f"{layer}{stack} may also come as {layer}0.{matrix}.weight and {more} more. Check",
            )
    unread.done(2)


@pytest.mark.parametrize(
    "corpus", [name for name in FAMILIES if not name.endswith("raw")], indirect=True
)
def test_an_expert_too_few_or_too_many_is_named(unread):
    last = experts_of(unread, "7.")
    fewer = {name: unread.tensors[name] for name in unread.tensors.keys() - last}
    with unread.changed(weights=packed(fewer)):
        unread.check("seven experts", ".mlp.experts.7.")
    ninth = {name.replace("experts.7", "experts.8"): unread.tensors[name] for name in last}
    with unread.changed(more=packed(ninth)):
        unread.check("nine experts", f"Unexpected ({len(last)}): ")
    stack = {"model.layers.0.mlp.experts.gate_up_proj": ("F32", [1], bytes(4))}
    with unread.changed(more=packed(stack)):
        unread.check("a stack beside them", "model.layers.0.mlp.experts.gate_up_proj [1] instead")
    unread.done(3)


@pytest.mark.parametrize("corpus", ["qwen3_5_moe_raw"], indirect=True)
def test_a_stack_beside_single_experts_is_refused_and_in_place_of_them_taken(corpus):
    stack = "model.language_model.layers.0.mlp.experts.down_proj"
    dtype, (count, *shape), content = corpus.tensors[stack]
    size = len(content) // count
    single = {
        f"{stack.removesuffix('down_proj')}{i}.down_proj.weight": (
            dtype,
            shape,
            content[i * size : (i + 1) * size],
        )
        for i in range(count)
    }
    with corpus.changed(more=packed(single)):
        name = min(single).replace("language_model.", "")
        corpus.check("both", f"Twice (8): {name} (down_proj has it, too), ")
    rest = {name: held for name, held in corpus.tensors.items() if name != stack}
    with corpus.changed(weights=packed(rest), more=packed(single)):
        corpus.check("each by itself", SAME)
    corpus.done(2)


# What a field may wrongly hold; "absent" takes it away.
ABSENT = object()
WRONG = [ABSENT, None, True, False, "", "word", [], ["word"], [1], [None], {}, {"x": 1}, 0, -1, 1.5]
WRONG += [float("nan"), float("inf"), -float("inf"), 1e30, -1e-30, 10**30, -(10**30), 2**63, "1"]
# Fields that are read, and those of the values above that mean the same as what is there, each for
# the reason that stands behind it.
NONE = [ABSENT, None]
FIELDS = {
    "text_config": [*NONE, {}, {"x": 1}],  # a text model has none; what is not known is not read
    "architectures": [*NONE, []],  # then `model_type` names the same family
    "model_type": [*NONE, "", "word", "1"],  # `architectures` counts
    "vocab_size": [],
    "hidden_size": [],
    "intermediate_size": [],
    "num_hidden_layers": [],
    "num_attention_heads": [],
    "num_key_value_heads": [],
    "head_dim": [],
    "rms_norm_eps": [],
    "max_position_embeddings": [],
    "layer_types": NONE,  # attention in every fourth layer, as these four have it
    "full_attention_interval": NONE,  # four is the default
    "eos_token_id": [*NONE, []],  # there is none
    "tie_word_embeddings": [*NONE, True, False],  # the tensors tell: there is an output head
    "mtp_num_hidden_layers": [*NONE, 0],  # the tensors tell: there is a draft head
    "mtp_use_dedicated_embeddings": [*NONE, False],  # as the family's code assumes, as all below
    "attention_bias": [*NONE, False],
    "mlp_bias": [*NONE, False],
    "use_sliding_window": [*NONE, False],
    "layer_scale": [*NONE, False],
    "attn_output_gate": [*NONE, True],
    "output_gate_type": NONE,
    "hidden_act": NONE,
    "quantization": NONE,
    "quantization_config": NONE,
    "linear_num_key_heads": [],
    "linear_num_value_heads": [],
    "linear_key_head_dim": [],
    "linear_value_head_dim": [],
    "linear_conv_kernel_dim": [],
    "rope_parameters": [],
    "rope_parameters.rope_theta": [],
    "rope_parameters.rope_type": NONE,
    "rope_parameters.type": NONE,
    "rope_parameters.factor": NONE,
    "rope_parameters.partial_rotary_factor": NONE,  # a quarter is the family's default
    "rope_scaling": [*NONE, {}, {"x": 1}],  # `rope_parameters` says all
    "rope_scaling.rope_type": NONE,
    "rope_scaling.type": NONE,
    "rope_scaling.factor": NONE,
    "rope_scaling.rope_theta": NONE,
    "rope_scaling.partial_rotary_factor": NONE,
    "rope_theta": NONE,
    "partial_rotary_factor": NONE,
}
# The same of a model with experts, beside those above.
EXPERT_FIELDS = {
    "num_experts": [],
    "num_local_experts": NONE,  # another name of the same
    "num_experts_per_tok": [],
    "moe_intermediate_size": [],
    "shared_expert_intermediate_size": [],
    "norm_topk_prob": [True],
    "decoder_sparse_step": NONE,  # experts in every layer, as here
    "mlp_only_layers": [[1]],  # as it is
    "scoring_func": NONE,  # as the layer computes, as all below
    "topk_method": NONE,
    "n_group": NONE,
    "topk_group": NONE,
    "routed_scaling_factor": NONE,
    "moe_latent_size": NONE,
    "swiglu_limit": NONE,
}
# The same of Llama with llama3's rotation, beside those above.
LLAMA_FIELDS = {
    "sliding_window": NONE,
    "rope_theta": NONE,
    "rope_parameters": [],
    "rope_parameters.rope_theta": [],
    "rope_parameters.rope_type": [],
    "rope_parameters.type": NONE,
    "rope_parameters.factor": [],
    "rope_parameters.low_freq_factor": [],
    "rope_parameters.high_freq_factor": [],
    "rope_parameters.original_max_position_embeddings": [],
    "rope_scaling.rope_type": NONE,
    "rope_scaling.type": NONE,
    "rope_scaling.factor": NONE,
    "rope_scaling.low_freq_factor": NONE,
    "rope_scaling.high_freq_factor": NONE,
    "rope_scaling.original_max_position_embeddings": NONE,
}
# The same of attention beside Mamba2, beside those above.
FALCON_FIELDS = {
    "mamba_n_heads": [],
    "mamba_d_head": [],
    "mamba_d_ssm": NONE,  # the product of the two
    "mamba_d_state": [],
    "mamba_n_groups": [],
    "mamba_d_conv": [],
    "mamba_conv_bias": [*NONE, True],
    "mamba_rms_norm": [True],
    "mamba_norm_before_gate": [False],
    "mamba_proj_bias": [*NONE, False],
    "mamba_use_mlp": [*NONE, True],
    "projectors_bias": [*NONE, False],
    "attn_layer_indices": NONE,
    "sliding_window": NONE,
    "time_step_limit": NONE,
    "attention_in_multiplier": NONE,  # 1, as it is
    "attention_out_multiplier": [],
    "embedding_multiplier": [],
    "key_multiplier": [],
    "lm_head_multiplier": [],
    "mlp_multipliers": [],
    "ssm_in_multiplier": [],
    "ssm_multipliers": [],
    "ssm_out_multiplier": [],
}
# The same of short convolutions.
LFM2_FIELDS = {
    "norm_eps": [],
    "layer_types": [],
    "conv_L_cache": [],
    "conv_bias": [*NONE, False],
    "use_pos_enc": [*NONE, True],
    "block_use_swiglu": [*NONE, True],
    "block_ff_dim": NONE,
    "block_auto_adjust_ff_dim": [False],
    "tie_embedding": [*NONE, True, False],  # the tensors tell
}
# The same in the older spelling.
LFM2_RAW_FIELDS = {
    "full_attn_idxs": [],
    "block_ff_dim": [],
    "block_auto_adjust_ff_dim": [True],
    "block_ffn_dim_multiplier": NONE,  # 1, as it is
    "block_multiple_of": [],
    "tie_embedding": [*NONE, True, False],
    "rope_theta": NONE,  # a million, as it is
}
# The same of Nemotron-H, of Mamba2 and of Granite.
NEMOTRON_FIELDS = {
    "attention_head_dim": NONE,  # the older name of `head_dim`
    "layers_block_type": [],
    "hybrid_override_pattern": NONE,  # the list of words says the same
    "num_hidden_layers": NONE,  # the list has as many
    "layer_norm_epsilon": [],
    "mlp_hidden_act": NONE,
    "mamba_hidden_act": NONE,
    "use_bias": [*NONE, False],
    "mamba_proj_bias": [*NONE, False],
    "sliding_window": NONE,
    "n_shared_experts": NONE,
    "mamba_num_heads": [],
    "mamba_head_dim": [],
    "n_groups": [],
    "ssm_state_size": [],
    "conv_kernel": [],
    "use_conv_bias": [*NONE, True],
    "time_step_limit": NONE,
    "n_routed_experts": [],
    "num_experts_per_tok": [],
    "moe_intermediate_size": [],
    "moe_shared_expert_intermediate_size": [],
    "moe_latent_size": NONE,  # the experts read the stream
    "norm_topk_prob": [True],
    "routed_scaling_factor": [],
    "n_group": NONE,  # one
    "topk_group": NONE,
    "num_nextn_predict_layers": [*NONE, 0],  # the tensors tell: there is a draft head
    "mtp_layers_block_type": NONE,
    "mtp_hybrid_override_pattern": NONE,
}
MAMBA2_FIELDS = {
    "num_hidden_layers": [],
    "layer_norm_epsilon": [],
    "num_heads": [],
    "head_dim": [],
    "n_groups": [],
    "state_size": [],
    "conv_kernel": [],
    "use_conv_bias": [*NONE, True],
    "use_bias": [*NONE, False],
    "rms_norm": [*NONE, True],
    "time_step_limit": NONE,
}
GRANITE_FIELDS = {
    "layer_types": [],
    "num_local_experts": [],
    "num_experts_per_tok": [],
    "intermediate_size": [],
    "shared_intermediate_size": [],
    "embedding_multiplier": [],
    "residual_multiplier": [],
    "attention_multiplier": [],
    "logits_scaling": [],
    "position_embedding_type": NONE,
    "normalization_function": NONE,
    "mamba_n_heads": [],
    "mamba_d_head": [],
    "mamba_n_groups": [],
    "mamba_d_state": [],
    "mamba_d_conv": [],
    "mamba_conv_bias": [*NONE, True],
    "mamba_proj_bias": [*NONE, False],
    "time_step_limit": NONE,
}
# The same of Granite with attention and its biases in every layer.
ATTENDING_GRANITE_FIELDS = {
    "attention_bias": [True],
    "embedding_multiplier": [],
    "residual_multiplier": [],
    "attention_multiplier": [],
    "logits_scaling": [],
    "rope_parameters": [*NONE, {}, {"x": 1}],  # its base is the family's default
    "rope_parameters.rope_theta": NONE,
}
# The same of Qwen2 with windows in its last layers.
QWEN2_FIELDS = {
    "layer_types": NONE,  # from the second layer on, as it is
    "use_sliding_window": [True],
    "sliding_window": [],
    "rope_parameters.partial_rotary_factor": NONE,
}
# The same of gpt-oss.
GPT_OSS_FIELDS = {
    "attention_bias": [True],
    "layer_types": NONE,  # alternately, as it is
    "sliding_window": [],
    "num_local_experts": [],
    "num_experts": NONE,  # another name of the same
    "num_experts_per_tok": [],
    "experts_per_token": NONE,
    "intermediate_size": [],
    "swiglu_alpha": NONE,
    "swiglu_limit": NONE,
    "rope_parameters.truncate": [False],
    "rope_parameters.factor": [],
    "rope_parameters.original_max_position_embeddings": [],
    "rope_parameters.beta_fast": NONE,
    "rope_parameters.beta_slow": NONE,
}
# The same of Gemma 4 with experts.
GEMMA_FIELDS = {
    "hidden_activation": NONE,
    "use_bidirectional_attention": NONE,
    "hidden_size_per_layer_input": [*NONE, 0],
    "num_kv_shared_layers": [*NONE, 0],
    "enable_moe_block": [True],
    "num_experts": [],
    "top_k_experts": [],
    "moe_intermediate_size": [],
    "layer_types": NONE,  # every sixth and the last, as it is
    "sliding_window": [],
    "attention_k_eq_v": [True],
    "num_global_key_value_heads": [1],
    "global_head_dim": [],
    "per_layer_config": NONE,  # the same by layer
    "final_logit_softcapping": [],
    "rope_parameters.full_attention": [],
    "rope_parameters.full_attention.rope_type": NONE,
    "rope_parameters.full_attention.rope_theta": [],
    "rope_parameters.full_attention.partial_rotary_factor": [],
    "rope_parameters.full_attention.factor": [*NONE, 1],
    "rope_parameters.sliding_attention": [],
    "rope_parameters.sliding_attention.rope_type": NONE,
    "rope_parameters.sliding_attention.rope_theta": [],
    "rope_parameters.sliding_attention.partial_rotary_factor": [*NONE, 1],
}
SIZES_BY_LAYER = [f"per_layer_config.{layer}" for layer in (1, 3, 6)]
# The same of Gemma 4 with shared keys and values, and embeddings of each layer.
GEMMA_SHARED_FIELDS = {
    "hidden_size_per_layer_input": [],
    "vocab_size_per_layer_input": [],
    "num_kv_shared_layers": [],
    "use_double_wide_mlp": [True],
    "enable_moe_block": [*NONE, False],
    "attention_k_eq_v": [*NONE, False],
    "per_layer_config": [],
}
for own in SIZES_BY_LAYER:
    GEMMA_SHARED_FIELDS |= {own: [], f"{own}.head_dim": [], f"{own}.num_key_value_heads": NONE}
DEEPSEEK_FIELDS = {
    "q_lora_rank": [],
    "kv_lora_rank": [],
    "qk_nope_head_dim": [],
    "qk_rope_head_dim": [],
    "v_head_dim": [],
    "layer_types": NONE,
    "mlp_layer_types": NONE,  # the number of dense layers says the same
    "first_k_dense_replace": NONE,  # the list says the same
    "moe_layer_freq": [*NONE, 1],
    "rope_interleave": [*NONE, True],
    "n_routed_experts": [],
    "n_shared_experts": [],
    "index_n_heads": [],
    "index_head_dim": [],
    "index_topk": [],
    "rope_parameters.beta_fast": NONE,  # the defaults are the same
    "rope_parameters.beta_slow": NONE,
    "rope_parameters.truncate": [*NONE, True],
    "rope_parameters.attention_factor": NONE,
    "rope_parameters.mscale": [],
    "rope_parameters.mscale_all_dim": [],
    # The same in the other block; other numbers contradict.
    "rope_scaling.beta_fast": NONE,
    "rope_scaling.beta_slow": NONE,
    "rope_scaling.truncate": [*NONE, True],
    "rope_scaling.attention_factor": NONE,
    "rope_scaling.mscale": NONE,
    "rope_scaling.mscale_all_dim": NONE,
}
# The same of GLM-4.5, beside those above.
GLM_FIELDS = {
    "attention_bias": [True],
    "use_qk_norm": [True],
    "layer_types": NONE,
    "mlp_layer_types": NONE,  # the number of dense layers says the same
    "first_k_dense_replace": [1],
    "decoder_sparse_step": NONE,
    "moe_layer_freq": [*NONE, 1],
    "scoring_func": NONE,
    "topk_method": NONE,
    "n_group": [*NONE, 1],
    "topk_group": [*NONE, 1],
    "n_routed_experts": [],
    "n_shared_experts": [1],
    "num_experts_per_tok": [],
    "norm_topk_prob": [True],
    "routed_scaling_factor": [],
    "num_nextn_predict_layers": [*NONE, 0],  # the tensors tell: there is a draft head
    "rope_parameters.partial_rotary_factor": NONE,  # a half is the family's default
    "partial_rotary_factor": NONE,
}
NOT_WRONG_OF_DEEPSEEK = {
    "index_topk": [1],
    "rope_parameters.truncate": [False],
    "rope_scaling.truncate": [False],
    "rope_parameters.attention_factor": [1.5],
    "rope_scaling.attention_factor": [1.5],
    "rope_parameters.beta_fast": [1.5],
    "rope_parameters.beta_slow": [1.5],
    "rope_parameters.mscale": [*NONE, 1.5, 0, 1],
    "rope_parameters.mscale_all_dim": [*NONE, 1.5, 0, 1],
}
NOT_WRONG_OF_GPT_OSS = {
    "rope_parameters.truncate": [*NONE, True],
    "rope_parameters.factor": [1.5],
    "rope_parameters.beta_fast": [1.5],
    "rope_parameters.beta_slow": [1.5],
}
NOT_WRONG_OF_GEMMA = {
    "top_k_experts": [1],
    "final_logit_softcapping": [*NONE, 1.5, 1],
    "rope_parameters.full_attention.partial_rotary_factor": [*NONE, 1],
}
# The same of Kimi-Linear, in transformers' spelling and in the published one.
LATENT_FIELDS = {
    "model_max_length": [],
    "kv_lora_rank": [],
    "q_lora_rank": NONE,
    "qk_nope_head_dim": [],
    "qk_rope_head_dim": [],
    "v_head_dim": [],
    "mla_use_nope": [*NONE, True],
    "num_experts": [],
    "num_experts_per_token": [],
    "moe_renormalize": [True],
    "moe_router_activation_func": NONE,
    "use_grouped_topk": [*NONE, True],
    "num_expert_group": [*NONE, 1],
    "topk_group": [*NONE, 1],
    "num_shared_experts": [1],
    "num_nextn_predict_layers": [*NONE, 0],
    "routed_scaling_factor": [],
}
KIMI_FIELDS = LATENT_FIELDS | {
    "linear_num_heads": [],
    "linear_head_dim": [],
    "linear_conv_kernel_dim": [],
    "mlp_layer_types": [],
}
KIMI_RAW_FIELDS = LATENT_FIELDS | {
    "first_k_dense_replace": [1],
    "moe_layer_freq": [*NONE, 1],
    "linear_attn_config": [],
    "linear_attn_config.kda_layers": [],
    "linear_attn_config.full_attn_layers": [],
    "linear_attn_config.num_heads": [],
    "linear_attn_config.head_dim": [],
    "linear_attn_config.short_conv_kernel_size": [],
}
# The same of Ling-3.0, in transformers' spelling and in the published one.
LING_FIELDS = {
    "kv_lora_rank": [],
    "q_lora_rank": NONE,
    "qk_nope_head_dim": [],
    "qk_rope_head_dim": [],
    "v_head_dim": [],
    "rope_interleave": [*NONE, True],
    "kda_safe_gate": [*NONE, True],
    "kda_lower_bound": [],
    "scoring_func": NONE,
    "score_function": NONE,
    "topk_method": NONE,
    "moe_router_enable_expert_bias": [*NONE, True],
    "routing_group_score_top_k": NONE,
    "scale_router_input": [*NONE, False],
    "gated_attention_proj_granularity_type": NONE,
    "use_mla_nope": [*NONE, False],
    "no_kda_lora": [*NONE, True],
    "use_kda_lora": [*NONE, False],
    "num_kv_heads_for_linear_attn": [*NONE, 0],
    "mtp_use_kda": [*NONE, False],
    "use_bias": [*NONE, False],
    "use_qkv_bias": [*NONE, False],
    "use_nGPT": [*NONE, False],
    "up_proj_norm": [*NONE, False],
    "value_norm": [*NONE, False],
    "moe_layer_freq": [*NONE, 1],
    "swiglu_limit": NONE,
    "sliding_window": NONE,
    "expert_swiglu_limit_list": [*NONE, [], [None]],
    "share_expert_swiglu_limit_list": [*NONE, [], [None]],
    "num_experts": [],
    "moe_shared_expert_intermediate_size": NONE,  # by default that of the others
    "topk_group": [],
    "num_shared_experts": [1],
    "routed_scaling_factor": [],
    "num_nextn_predict_layers": [*NONE, 0],  # the tensors tell: there is a draft head
}
LING_SAVED_FIELDS = LING_FIELDS | {
    "model_max_length": [],
    "linear_num_heads": NONE,  # by default those of attention
    "linear_conv_kernel_dim": NONE,  # another field says the same
    "linear_head_dim": [],
    "num_experts_per_token": [],
    "moe_renormalize": [True],
    "num_expert_group": [],
}
LING_RAW_FIELDS = LING_FIELDS | {
    "layer_group_size": [],
    "short_conv_kernel_size": [],
    "first_k_dense_replace": [1],
    "num_experts_per_tok": [],
    "norm_topk_prob": [True],
    "n_group": [],
}
TABLES = FIELDS | EXPERT_FIELDS | LLAMA_FIELDS | FALCON_FIELDS | LFM2_FIELDS
TABLES |= LFM2_RAW_FIELDS | NEMOTRON_FIELDS | MAMBA2_FIELDS | GRANITE_FIELDS
TABLES |= KIMI_FIELDS | KIMI_RAW_FIELDS | QWEN2_FIELDS | GPT_OSS_FIELDS | DEEPSEEK_FIELDS
TABLES |= GLM_FIELDS | GEMMA_FIELDS | GEMMA_SHARED_FIELDS | LING_SAVED_FIELDS | LING_RAW_FIELDS
# An id that stands for the end of a text is right or wrong by its value alone.
NOT_WRONG = {"eos_token_id": [0, [1]]}
# Here they mean another model of the same tensors.
NOT_WRONG |= {"norm_topk_prob": [False], "moe_renormalize": [False]}
NOT_WRONG |= {"full_attn_idxs": [[], [1]]}  # lists of layers, but not those of the tensors
NOT_WRONG_OF_LLAMA = {
    "rope_parameters": [*NONE, {}, {"x": 1}],  # as Llama 2's: its base, and no scaling
    "rope_parameters.rope_type": NONE,  # another field is named, see test_rope_fields.py
    "rope_parameters.factor": [1.5],
    "rope_parameters.low_freq_factor": [1.5],
    "rope_parameters.high_freq_factor": [1.5],
}
# Factors are right or wrong by their values alone.
NOT_WRONG |= {"routed_scaling_factor": [1.5], "logits_scaling": [1.5], "residual_multiplier": [1.5]}
NOT_WRONG |= {"embedding_multiplier": [1.5], "attention_multiplier": [1.5]}
# Groups of experts, decays and their bound show in no tensor, nor do limits of activations.
NOT_WRONG_OF_LING = NOT_WRONG | {"kda_safe_gate": [False], "n_group": [*NONE, 1]}
NOT_WRONG_OF_LING |= {"num_expert_group": [*NONE, 1], "topk_group": [*NONE, 1]}
NOT_WRONG_OF_LING |= {"kda_lower_bound": [-1], "share_expert_swiglu_limit_list": [[1]]}
# Falcon-H1's factors are right or wrong by their values alone, and where there is none it is 1.
NOT_WRONG_OF_FALCON = {
    name: NONE if name.endswith("multipliers") else [*NONE, 1.5]
    for name in FALCON_FIELDS
    if "_multiplier" in name
}
NOT_WRONG_OF_FALCON |= {"mamba_norm_before_gate": [*NONE, True]}  # transformers' default
# Where another name than the field's tells what is wrong.
CULPRITS = {
    "n_shared_experts": "mlp.shared_experts",  # without it there are none
    "mamba_conv_bias": "mamba.conv1d.bias",
    "enable_moe_block": "experts",
    "hidden_size_per_layer_input": "per_layer_input_gate",  # without it there are none
    "num_kv_shared_layers": "self_attn",  # then layers have their own
    "use_double_wide_mlp": "mlp.down_proj",
    "per_layer_config": "global_head_dim",  # the other field of the same
    **dict.fromkeys(SIZES_BY_LAYER, "per_layer_config"),
    "attention_k_eq_v": "self_attn",  # values of their own, and other heads
    "num_global_key_value_heads": "k_proj",
    "use_conv_bias": "mixer.conv1d.bias",
    "attention_head_dim": "head_dim",  # its other name
    "num_shared_experts": ".shared_experts.",  # without it there is none
    "num_local_experts": "block_sparse_moe",  # without experts there are none of their tensors
    "mamba_rms_norm": "mamba.norm.weight",
    "attention_bias": "_proj.bias",
    "use_qk_norm": "k_norm.weight",
    "model_max_length": "max_position_embeddings",  # its other name
    "linear_head_dim": "dt_bias",  # by default it is `head_dim`
    "num_experts_per_token": "topk_group",  # without it the other names are expected
    "layer_types": "full_attn_idxs",  # the other field that lists layers
    "block_ff_dim": "intermediate_size",  # its other name
    "block_auto_adjust_ff_dim": ".feed_forward.",  # then the layers have another width
    "block_ffn_dim_multiplier": ".feed_forward.",
    "head_dim": "self_attn",  # by default the heads share the hidden channels
    "mlp_layer_types": "first_k_dense_replace",  # the other field that says which are dense
    "mlp_only_layers": "model.layers.1.mlp",  # else that layer would have experts
    "architectures": "config.json asks for the model 'word'",
    "rope_parameters": "rope_theta",
    "rope_parameters.rope_type": "rope type",
    "rope_parameters.type": "rope type",
    "rope_scaling.rope_type": "rope type",
    "rope_scaling.type": "rope type",
}


def is_among(value, values):
    return any(type(value) is type(other) and value == other for other in values)


def with_field(config, path, value):
    """`config` with the field at `path` set to `value` or taken away."""
    name, _, rest = path.partition(".")
    blocks = "rope", "linear_attn", "full_att", "sliding_att", "per_layer_config"
    if rest and (name.startswith(blocks) or name.isdigit()):
        return {**config, name: with_field(config.get(name) or {}, rest, value)}
    return {key: v for key, v in config.items() if key != name} | (
        {} if value is ABSENT else {name: value}
    )


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("corpus", "fields", "not_wrong"),
    [
        ("qwen3_5", FIELDS, NOT_WRONG),
        ("qwen3_next", EXPERT_FIELDS, NOT_WRONG),
        ("llama", LLAMA_FIELDS, NOT_WRONG_OF_LLAMA),
        ("falcon_h1", FALCON_FIELDS, NOT_WRONG_OF_FALCON),
        ("lfm2", LFM2_FIELDS, NOT_WRONG),
        ("lfm2_raw", LFM2_RAW_FIELDS, NOT_WRONG),
        ("nemotron_h", NEMOTRON_FIELDS, NOT_WRONG),
        ("mamba2", MAMBA2_FIELDS, NOT_WRONG),
        ("granitemoehybrid", GRANITE_FIELDS, NOT_WRONG),
        ("granite", ATTENDING_GRANITE_FIELDS, NOT_WRONG),
        ("qwen2", QWEN2_FIELDS, NOT_WRONG),
        ("gpt_oss", GPT_OSS_FIELDS, NOT_WRONG_OF_GPT_OSS),
        ("deepseek_v32", DEEPSEEK_FIELDS, NOT_WRONG_OF_DEEPSEEK),
        soak("glm4_moe", GLM_FIELDS, NOT_WRONG),
        soak("gemma4_moe", GEMMA_FIELDS, NOT_WRONG_OF_GEMMA),
        soak("gemma4_shared", GEMMA_SHARED_FIELDS, NOT_WRONG),
        ("kimi_linear", KIMI_FIELDS, NOT_WRONG),
        ("kimi_linear_raw", KIMI_RAW_FIELDS, NOT_WRONG),
        soak("bailing_hybrid", LING_SAVED_FIELDS, NOT_WRONG_OF_LING),
        soak("bailing_hybrid_raw", LING_RAW_FIELDS, NOT_WRONG_OF_LING),
    ],
    indirect=["corpus"],
    ids=[
        *("dense", "experts", "llama", "Falcon-H1", "LFM2", "LFM2 raw"),
        *("Nemotron", "Mamba2", "Granite hybrid", "Granite", "Qwen2", "gpt-oss"),
        *("DeepSeek", "GLM", "Gemma", "Gemma shared"),
        *("Kimi-Linear", "Kimi-Linear raw", "Ling", "Ling raw"),
    ],
)
def test_a_field_of_another_kind_is_named(corpus, fields, not_wrong):
    for path, harmless in fields.items():
        for value in WRONG:
            if is_among(value, not_wrong.get(path, ())):
                continue
            content = json.dumps(with_field(corpus.config, path, value)).encode()
            culprits = (path, CULPRITS.get(path, path), path.rpartition(".")[2])
            with corpus.changed(config=content):
                shown = "absent" if value is ABSENT else repr(value)
                corpus.check(f"{path} {shown}", SAME if is_among(value, harmless) else culprits)
    corpus.done(20 * len(fields))


@pytest.mark.parametrize(
    "corpus",
    [
        *("qwen3_5", "qwen3_5_vl", "qwen3", "llama", "falcon_h1", "lfm2", "lfm2_raw"),
        *("nemotron_h", "nemotron_h_latent", "nemotron_h_latent_raw"),
        *(
            "mamba2",
            "granitemoehybrid",
            "granite",
            "qwen2",
            "gpt_oss",
            "deepseek_v3",
            "deepseek_v32",
            "glm4_moe",
            "glm4_moe_lite",
            "gemma4_moe",
            "gemma4_shared",
            "kimi_linear",
            "kimi_linear_raw",
            "bailing_hybrid",
            "bailing_hybrid_raw",
            *EXPERTS,
        ),
    ],
    indirect=True,
)
def test_the_tables_have_every_field_that_is_read(corpus, monkeypatch):
    seen, find, refuse = set(), Block.find, Block.refuse_all_but

    def noted_find(block, name, kind):
        seen.add(f"{block.prefix}{name}".removeprefix("text_config."))
        return find(block, name, kind)

    def noted_refuse(block, expected):
        seen.update(f"{block.prefix}{name}" for name in expected)
        refuse(block, expected)

    monkeypatch.setattr(Block, "find", noted_find)
    monkeypatch.setattr(Block, "refuse_all_but", noted_refuse)
    corpus.check("as it is", SAME)
    assert len(seen) > 20 and seen <= TABLES.keys()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "corpus",
    [
        *("qwen3_5", "qwen3_5_vl", "qwen3", "qwen3_5_moe", "qwen3_next", "llama", "falcon_h1"),
        *("lfm2", "nemotron_h", "nemotron_h_latent", "mamba2", "granitemoehybrid", "granite"),
        *("gpt_oss", "deepseek_v32", "glm4_moe", "kimi_linear", "bailing_hybrid_raw"),
    ],
    indirect=True,
)
def test_a_size_that_is_near_the_right_one_is_refused(corpus):
    config = corpus.config.get("text_config", corpus.config)
    # What the tensors do not show.
    free = {"max_position_embeddings", "mtp_num_hidden_layers", "num_experts_per_tok"}
    free |= {"num_nextn_predict_layers", "block_multiple_of", "n_group", "topk_group"}
    free |= {"sliding_window"}
    free |= {"index_topk", "model_max_length", "num_expert_group", "num_experts_per_token"}
    if "kv_lora_rank" in config:
        free |= {"num_key_value_heads"}
        free |= set() if "layer_group_size" in config else {"head_dim"}  # the delta rule's
    sizes = [name for name in TABLES.keys() - free if type(config.get(name)) is int]
    for name, value in [(name, config[name]) for name in sizes]:
        for other in {value + 1, value - 1, value * 2, value // 2, value * 1000} - {value}:
            changed = config | {name: other}
            if "text_config" in corpus.config:
                changed = corpus.config | {"text_config": changed}
            with corpus.changed(config=json.dumps(changed).encode()):
                corpus.check(f"{name} {other}", "config.json")
    corpus.done(30)


# Fields of Nemotron that are right by themselves, and what is named where they are not together.
LISTS = ["hybrid_override_pattern", "layers_block_type"]
HEADS_LISTS = ["mtp_hybrid_override_pattern", "mtp_layers_block_type"]
HEAD_DIMS = ["head_dim", "attention_head_dim"]
NAMED = ["mamba", "moe", "attention", "mlp", "mamba", "moe"]
PAIRS = [
    ({"hybrid_override_pattern": "ME*-ME", "layers_block_type": NAMED}, SAME),
    ({"hybrid_override_pattern": "ME*-ME", "layers_block_type": NAMED[::-1]}, LISTS),
    ({"hybrid_override_pattern": "ME*-ME", "layers_block_type": NAMED[:5]}, LISTS),
    ({"hybrid_override_pattern": "MEM-ME", "layers_block_type": NAMED}, LISTS),
    ({"hybrid_override_pattern": "", "layers_block_type": NAMED}, LISTS),
    ({"mtp_hybrid_override_pattern": "*E", "mtp_layers_block_type": ["attention", "moe"]}, SAME),
    ({"mtp_hybrid_override_pattern": "*E", "mtp_layers_block_type": ["moe"]}, HEADS_LISTS),
    ({"mtp_hybrid_override_pattern": "E*", "mtp_layers_block_type": None}, HEADS_LISTS),
    ({"attention_head_dim": 32}, SAME),
    ({"head_dim": None, "attention_head_dim": 32}, SAME),
    ({"attention_head_dim": 16}, HEAD_DIMS),
    ({"head_dim": None, "attention_head_dim": 16}, ["self_attn", "q_proj"]),
    ({"head_dim": None}, HEAD_DIMS),
    # Trunks whose tensors are others, and which lack what the head needs.
    (
        {"hybrid_override_pattern": "MEM-ME", "num_nextn_predict_layers": 0},
        ["num_attention_heads"],
    ),
    ({"hybrid_override_pattern": "M-*-M-", "num_nextn_predict_layers": 0}, ["n_routed_experts"]),
    ({"hybrid_override_pattern": "MEM-ME", "head_dim": None}, HEAD_DIMS),
    ({"hybrid_override_pattern": "M-*-M-", "n_routed_experts": None}, ["n_routed_experts"]),
]


@pytest.mark.parametrize("corpus", ["nemotron_h_latent_raw"], indirect=True)
def test_fields_of_nemotron_that_do_not_go_together_are_named(corpus):
    for changes, culprits in PAIRS:
        content = json.dumps(corpus.config | changes).encode()
        with corpus.changed(config=content):
            corpus.check(str(changes), culprits)
    corpus.done(len(PAIRS))


@pytest.mark.parametrize("corpus", ["qwen3_5_vl"], indirect=True)
def test_a_field_on_either_level_of_a_nested_configuration_is_checked(corpus):
    """But the text's own comes first."""
    text = corpus.config["text_config"]
    for name, value in {
        "quantization_config": {"quant_method": "hqq"},
        "rope_scaling": {"type": "dynamic", "factor": 4.0},
        "eos_token_id": 264,
        "tie_word_embeddings": "no",
        "attn_output_gate": False,
    }.items():
        for inner in (ABSENT, None):
            changed = corpus.config | {"text_config": with_field(text, name, inner), name: value}
            with corpus.changed(config=json.dumps(changed).encode()):
                corpus.check(f"{name} beside {inner}", (name, "rope type"))
    for name in ("hidden_size", "rms_norm_eps", "rope_parameters"):
        changed = corpus.config | {"text_config": with_field(text, name, None), name: text[name]}
        with corpus.changed(config=json.dumps(changed).encode()):
            corpus.check(f"{name} on top", SAME)
    for value in WRONG[2:]:
        if value != {"x": 1} and value != {}:
            with corpus.changed(config=json.dumps(corpus.config | {"text_config": value}).encode()):
                corpus.check(f"text_config {value!r}", "text_config")
    corpus.done(30)


def test_rope_that_contradicts_itself_is_refused(corpus):
    for changes in (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 64}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"factor": 2.0}},
        {"rope_scaling": {"rope_theta": 20000.0}},
        {"rope_theta": 20000.0},
        {"partial_rotary_factor": 0.5},
    ):
        with corpus.changed(config=json.dumps(corpus.config | changes).encode()):
            corpus.check(str(changes), ("rope type", "factor", "rope_theta"))
    same = {"rope_scaling": {"type": "mrope", "rope_type": "default", "rope_theta": 10000}}
    with corpus.changed(config=json.dumps(corpus.config | same).encode()):
        corpus.check("the same twice", SAME)
    corpus.done(7)


def test_the_ends_in_a_generation_config_are_checked(corpus):
    for value in [*WRONG[2:], 264, [0, 264], [0, True], [0.0], [[0]], list(range(17))]:
        if not is_among(value, [0, [1], []]):
            with corpus.changed(generation=json.dumps({"eos_token_id": value}).encode()):
                corpus.check(f"eos_token_id {value!r}", "generation_config.json: `eos_token_id`")
    corpus.done(25)


NOT_JSON = {
    "nothing": b"",
    "an open brace": b"{",
    "a list": b"[]",
    "a string": b'"x"',
    "null": b"null",
    "a number": b"1",
    "a name twice": b'{"x": 1, "x": 2}',
    "a name twice inside": b'{"x": {"y": 1, "y": 1}}',
    "nested lists": b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "nested objects": b'{"x":' * 100_000 + b"1" + b"}" * 100_000,
    "a mark of UTF-8": b"\xef\xbb\xbf{}",
    "Latin-1": b'{"x": "\xe4"}',
    "UTF-16": '{"x": 1}'.encode("utf-16"),
    "an endless integer": b'{"x": ' + b"1" * 5000 + b"}",
    "two objects": b"{} {}",
    "a comma too many": b'{"x": 1,}',
    "zeros": bytes(100),
    "17 MiB": b'{"x": "' + b"x" * 17 * 2**20 + b'"}',
}


def test_a_file_that_is_not_json_is_named(corpus):
    for case, content in NOT_JSON.items():
        for file in ("config", "generation", "index"):
            with corpus.changed(**{file: content}):
                corpus.check(f"{file} {case}", NAMES[file])
    for case, value in {"NaN": float("nan"), "Infinity": float("inf")}.items():
        with corpus.changed(config=json.dumps(corpus.config | {"time_step_limit": value}).encode()):
            corpus.check(f"{case} in a field that is not read", SAME)
    corpus.done(50)


def test_a_header_that_is_malformed_is_refused(corpus):
    content = corpus.files[WEIGHTS]
    start = 8 + int.from_bytes(content[:8], "little")
    data, name = content[start:], "model.norm.weight"
    ends = [0, 1, 7, 8, 9, 100, start - 1, start, start + 1, len(content) // 2, len(content) - 1]
    for end in ends:
        with corpus.changed(weights=content[:end]):
            corpus.check(f"cut at {end}", WEIGHTS)
    for length in (0, 1, start - 9, start - 7, len(content), 2**32, 2**63, 2**64 - 1):
        with corpus.changed(weights=struct.pack("<Q", length) + content[8:]):
            corpus.check(f"a header of {length} bytes", WEIGHTS)
    for case, header in NOT_JSON.items():
        with corpus.changed(weights=framed(header, data)):
            corpus.check(f"{case} as header", WEIGHTS)
    for key in ("dtype", "shape", "data_offsets"):
        for value in WRONG:
            header = corpus.header | {name: with_field(corpus.header[name], key, value)}
            with corpus.changed(weights=framed(json.dumps(header).encode(), data)):
                corpus.check(f"{key} {value!r}", (name, WEIGHTS))
    begin, end = corpus.header[name]["data_offsets"]
    for offsets in (
        [end, begin],
        [begin, end + 4],
        [begin - 4, end],
        [begin + 4, end + 4],
        [begin - 4, end - 4],
        [begin, begin],
        [-4, end],
        [len(data), len(data) + end - begin],
        [2**62, 2**62 + end - begin],
        [begin, end, end],
        [begin],
    ):
        header = corpus.header | {name: corpus.header[name] | {"data_offsets": offsets}}
        with corpus.changed(weights=framed(json.dumps(header).encode(), data)):
            corpus.check(f"offsets {offsets}", (name, WEIGHTS))
    for shape in ([1] * 9 + [64], [2**70], [10**4000], [2**62, 2**62], [64.0], [True] * 6, ["64"]):
        header = corpus.header | {name: corpus.header[name] | {"shape": shape}}
        with corpus.changed(weights=framed(json.dumps(header).encode(), data)):
            corpus.check(f"shape {shape!r:.50}", (name, WEIGHTS))
    with corpus.changed(weights=content + b"\0"):
        corpus.check("a byte too many", WEIGHTS)
    with corpus.changed(weights=packed(corpus.tensors, __metadata__={"x": 1})):
        corpus.check("remarks of another kind", SAME)  # nobody reads them
    corpus.done(100)


@pytest.mark.parametrize("corpus", ["qwen3_5", "qwen3_5_moe_raw"], indirect=True)
def test_an_index_that_does_not_fit_its_files_is_refused(corpus):
    names = list(corpus.tensors)
    one = {name: WEIGHTS for name in names}

    def check(case, index, culprits):
        with corpus.changed(index=json.dumps(index).encode()):
            corpus.check(case, culprits)

    for value in WRONG:
        check(f"weight_map {value!r}", with_field({}, "weight_map", value), INDEX)
        check(
            f"a file {value!r}",
            {"weight_map": with_field(one, names[0], value)},
            (INDEX, SAME)[value is ABSENT],
        )
    for file in (
        "/etc/passwd",
        "../model.safetensors",
        f"{corpus.folder}/{WEIGHTS}",
        f"./{WEIGHTS}",
        f"sub/{WEIGHTS}",
        f"..\\{WEIGHTS}",
        "..",
        ".",
        "config.json",
        f"{WEIGHTS}\0",
        f"{'x' * 300}.safetensors",
        "absent.safetensors",
    ):
        check(f"a file {file!r}", {"weight_map": one | {names[0]: file}}, (INDEX, file))
    for name in names:
        half = {name: corpus.tensors[name]}
        with corpus.changed(more=packed(half)):
            canonical = name.replace("language_model.", "")
            where = {"weight_map": one | {name: "model-2.safetensors"}}
            check(f"{name} elsewhere", where, canonical)
    check("a tensor that no file holds", {"weight_map": one | {"x.y": WEIGHTS}}, "x.y")
    check("a tensor left out", {"weight_map": {names[0]: WEIGHTS}}, SAME)  # the headers list all
    check("as it should be", {"weight_map": one, "metadata": {"total_size": -1}}, SAME)
    corpus.done(100)


SPECIAL = {
    "a folder": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to a pipe": lambda path: (os.mkfifo(path.parent / "pipe"), path.symlink_to("pipe")),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_regular_file_is_not_opened(corpus, kind):
    for name in NAMES.values():
        (corpus.folder / name).unlink(missing_ok=True)
        (corpus.folder / "pipe").unlink(missing_ok=True)
        SPECIAL[kind](corpus.folder / name)
        corpus.check(f"{name} is {kind}", name)
        corpus.restore(name)
    corpus.done(len(NAMES))


def test_a_configuration_of_very_many_layers_costs_no_time(corpus):
    kinds = ["linear_attention", "full_attention"]
    start = time.thread_time()
    for count, culprit in ((1000, "1000 layers, and the tensors are of 4"), (10_000, "num_hidden")):
        for listed in (None, kinds * (count // 2)):
            changes = {"num_hidden_layers": count, "layer_types": listed}
            with corpus.changed(config=json.dumps(corpus.config | changes).encode()):
                corpus.check(f"{count} layers", culprit)
    with corpus.changed(config=json.dumps(corpus.config | {"layer_types": kinds * 10**5}).encode()):
        corpus.check("layer_types of 200,000", "layer_types")
    extra = {f"model.layers.{i}.x": ("F32", [1], bytes(4)) for i in range(10_000)}
    with corpus.changed(weights=packed({**corpus.tensors, **extra})):
        corpus.check("10,000 layers in the weights", "model.layers.0.x")
    corpus.done(6)
    assert time.thread_time() - start < 5
