"""A program gets the tables of its own processors, and nobody else's change."""

import jax

from jaxspec.requests.sampling_features import BIAS, FULL, GREEDY, PENALTIES, SamplingFeatures
from jaxspec.sampling.tables import SamplingTables


def test_a_program_has_the_tables_of_its_processors_alone():
    tables = SamplingTables.empty(3, 40, 99, 4)
    assert not tables.is_empty
    for features in (GREEDY, FULL):
        assert tables.of(features).is_empty and not jax.tree.leaves(tables.of(features))
    assert tables.of(SamplingFeatures.of(BIAS)) == SamplingTables(bias=tables.bias)
    assert tables.of(SamplingFeatures.of(PENALTIES)) == SamplingTables(seen=tables.seen)


def test_what_a_program_was_not_given_stays():
    tables, newer = SamplingTables.empty(3, 40, 99, 4), SamplingTables.empty(3, 40, 99, 4)
    after = tables.replaced_by(newer.of(SamplingFeatures.of(BIAS)))
    assert after.bias is newer.bias and after.seen is tables.seen
    assert tables.replaced_by(SamplingTables()).seen is tables.seen
