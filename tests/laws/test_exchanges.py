"""Exchanges through mailboxes are a chain: kernels that XLA may run at once would count together.

In every program of every family, and of every drafter that shares the devices.
"""

import harness
import jax
import jax.numpy as jnp
import pytest
from fused_sums import Chain, jaxprs_of, run_fused_sums
from harness import HYBRID, ROWS, SNAPSHOT

from jaxspec.models.base import ModelSpec
from jaxspec.options import SpeculativeConfig
from jaxspec.options.draft_methods import DraftModelOptions, Eagle3Options, MTPOptions
from jaxspec.pallas.norm import mailbox
from jaxspec.pallas.norm.add_norm import add_norm
from jaxspec.pallas.norm.mailbox import Mailbox
from jaxspec.pallas.norm.residual import OfDevices
from jaxspec.pallas.norm.rms_norm import Norm
from jaxspec.parallel import Group
from jaxspec.plan.plan import ForwardPass, Program
from jaxspec.plan.step_shapes import StepShapes
from jaxspec.proposers import make_proposer
from jaxspec.requests.sampling_features import EVERYTHING
from jaxspec.runner.blueprint import Blueprint
from jaxspec.runner.step import new_step
from jaxspec.sampling import make_verifier

PAIR = Group(2)
FLOAT32 = jnp.dtype("float32")
METHODS = {
    HYBRID: ("mtp", MTPOptions(), None),
    "qwen3_next": ("mtp", MTPOptions(), None),
    "llama": ("eagle3", Eagle3Options("somewhere"), "llama_eagle3"),
    "qwen3": ("draft_model", DraftModelOptions("somewhere"), "llama_draft"),
}
FAMILIES = [
    *METHODS,
    "falcon_h1",
    "gpt_oss",
    "granite",
    "granitemoehybrid",
    "kimi_linear",
    "bailing_hybrid",
    "lfm2",
    "deepseek_v3",
    "mamba2",
    "nemotron_h",
    "nemotron_h_latent",
    "qwen3_5_moe",
    "qwen3_moe",
]


@pytest.fixture(autouse=True)
def fused_sums(monkeypatch):
    run_fused_sums(monkeypatch)


def blueprint_of(fixture):
    """The blueprint of an engine on two devices, with drafts if the fixture has a drafter."""
    speculation = proposer = head = None
    if fixture in METHODS:
        method, options, drafter = METHODS[fixture]
        speculation = SpeculativeConfig(method, 2, options=options)
        head = drafter and harness.drafting(drafter, PAIR)
        spec = head and ModelSpec.of(head, FLOAT32)
        proposer = make_proposer(speculation, harness.model(fixture), spec)
    model = harness.model(fixture, PAIR)
    shapes = StepShapes(
        max_num_seqs=ROWS,
        max_model_len=64,
        page_size=4,
        num_pages=80,
        num_drafts=2 if speculation else 0,
        decode_rows=(ROWS,),
        prefill_tokens=(16,),
        max_prefill_seqs=3,
        steps_per_dispatch=2,
        vocab_size=model.vocab_size,
    )
    return Blueprint.of(
        harness.abstract(model),
        shapes,
        proposer,
        dtype=FLOAT32,
        verifier=make_verifier(speculation),
        states=SNAPSHOT,
        drafter=harness.abstract(head),
        group=PAIR,
    )


def scatters_without_indices(jaxpr):
    """The scatters at no indices of a jaxpr, which end XLA of jax 0.11.2 on several devices."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith("scatter") and not eqn.invars[1].aval.size:
            yield eqn
        for inner in jaxprs_of(eqn):
            yield from scatters_without_indices(inner)


@pytest.mark.few(1)
@pytest.mark.parametrize("fixture", FAMILIES)
def test_each_exchange_of_a_program_depends_on_the_one_before(fixture):
    blueprint = blueprint_of(fixture)
    drafts = blueprint.config.shapes.num_drafts
    for program in (
        Program(ROWS, 16, EVERYTHING, num_drafts=drafts),
        Program(ROWS, 0, EVERYTHING, num_steps=2, num_drafts=drafts),
        half := ForwardPass(ROWS, drafts),
        half.rest,
    ):
        traced = new_step(blueprint.config, program).trace(*blueprint._args(program))
        chain = Chain.of(traced)
        num_layers = len(blueprint.model_spec.model().config.layer_types)
        assert chain.length >= (0 if program == half.rest else num_layers)
        assert chain.broken == []
        assert not list(scatters_without_indices(traced.jaxpr.jaxpr))
        # Exchanges are gathers here. XLA loads a program with a collective on all devices at once.
        assert program != half or "psum" in str(traced.jaxpr)


def two_exchanges(second):
    """A program that exchanges twice, and what the second exchange takes of the first."""
    box, norm = Mailbox(2, 512), Norm(jnp.ones(512), 1e-6, zero_centred=False)

    def program(own, mailbox_args):
        with mailbox.use(box, mailbox_args):
            stream, normed = add_norm(own, OfDevices(own), norm)
            return second(lambda x: add_norm(x, OfDevices(own), norm), own, stream), normed

    arrays = PAIR.like((jax.ShapeDtypeStruct((2, 512), FLOAT32), box.like()))
    return Chain.of(jax.jit(PAIR.on_each(program, equal=False)).trace(*arrays))


def in_a_loop(first):
    return lambda add, own, stream: jax.lax.fori_loop(
        0, 3, lambda _, x: add(x)[0], {"own": own, "stream": stream}[first]
    )


@pytest.mark.parametrize(
    ("second", "broken"),
    [
        (lambda add, own, stream: add(stream), []),
        (lambda add, own, stream: jax.jit(add)(stream + own), []),
        (in_a_loop("stream"), []),
        (lambda add, own, stream: (add(own), add(stream))[1], []),  # the first is needed by none
        (lambda add, own, stream: add(own), [2]),
        (lambda add, own, stream: jax.jit(lambda x, y: (add(x), y))(own, stream), [2]),
        (in_a_loop("own"), [2]),
    ],
)
def test_exchanges_that_could_run_at_once_are_seen(second, broken):
    chain = two_exchanges(second)
    assert (chain.length, chain.broken) == (2, broken)
