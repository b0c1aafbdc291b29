"""Arguments of processors in a plan."""

import dataclasses

from jaxspec.plan.plan import PROCESSOR_ARGS, entry_of, plan_layout, program_of
from jaxspec.plan.processor_plan import pack_processor_args, processor_layout
from jaxspec.plan.step_shapes import StepShapes
from jaxspec.requests.logits_processors import ProcessorArgs
from jaxspec.requests.request import Request
from jaxspec.requests.sampling_params import SamplingParams

SHAPES = StepShapes(
    max_num_seqs=3,
    max_model_len=64,
    page_size=4,
    num_pages=9,
    num_drafts=3,
    decode_rows=(3,),
    prefill_tokens=(16,),
    processor_params=3,
    processor_tokens=4,
)


def fields_of(num_computed, args):
    request = Request((10, 11, 12, 13, 14), SamplingParams(), 0, processor_args=args)
    request.slot, request.num_computed = 2, num_computed
    return processor_layout(SHAPES).unpack(pack_processor_args(request, SHAPES))


def test_the_arguments_are_those_of_the_request():
    fields = fields_of(7, ProcessorArgs(2, (0.0, 1.5, 0.0)))
    assert (fields["slot"], fields["used"]) == (2, 2)
    assert fields["params"].tolist() == [0.0, 1.5, 0.0]


def test_a_request_without_arguments_clears_those_of_its_slot():
    fields = fields_of(1, None)
    assert fields["slot"] == 2 and fields["used"] == 0 and not fields["params"].any()


def test_the_program_is_one_of_those_between_steps():
    assert plan_layout(PROCESSOR_ARGS, SHAPES) is processor_layout(SHAPES)
    assert program_of(entry_of(PROCESSOR_ARGS)) == PROCESSOR_ARGS
    assert dataclasses.replace(SHAPES, processor_tokens=0) != SHAPES
