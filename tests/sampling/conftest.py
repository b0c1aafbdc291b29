"""What the tests of sampling share: building inputs, and judging counts."""

import numpy as np
import pytest

from jaxspec.sampling import SamplingInputs


@pytest.fixture
def make_inputs():
    """Sampling inputs of `rows` rows; every field but the seeds may be one value for all."""

    def build(rows, temperature=1.0, top_k=-1, top_p=1.0, seeds=None, stop_ids=None, min_len=0):
        def column(value, dtype):
            return np.broadcast_to(np.asarray(value, dtype), (rows,))

        stops = np.zeros((rows, 0)) if stop_ids is None else np.asarray(stop_ids)
        return SamplingInputs(
            {
                "temperature": column(temperature, np.float32),
                "top_k": column(top_k, np.int32),
                "top_p": column(top_p, np.float32),
                "seed": column(np.arange(rows) if seeds is None else seeds, np.int32),
                "stop_ids": stops.astype(np.int32),
                "min_len": column(min_len, np.int32),
            }
        )

    return build


@pytest.fixture
def assert_distributed_as():
    """Pearson's chi-square test of token counts, at about four standard deviations."""

    def check(tokens, probabilities):
        tokens, probabilities = np.asarray(tokens), np.asarray(probabilities, np.float64)
        assert tokens.min() >= 0 and tokens.max() < probabilities.size
        counts = np.bincount(tokens, minlength=probabilities.size)
        possible = probabilities > 0
        assert counts[~possible].sum() == 0
        expected = tokens.size * probabilities[possible] / probabilities.sum()
        assert expected.min() > 5, "too few samples for the test to mean anything"
        statistic = (((counts[possible] - expected) ** 2) / expected).sum()
        freedom = possible.sum() - 1
        spread = 2 / (9 * freedom)  # Wilson and Hilferty 1931
        assert statistic < freedom * (1 - spread + 4 * np.sqrt(spread)) ** 3

    return check
