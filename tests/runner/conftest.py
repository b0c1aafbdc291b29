"""What the tests of the step's parts share: building rows of the batch state, and reading them."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.plan.row import row_layout
from jaxspec.runner.batch_state import BatchState


@pytest.fixture
def make_rows():
    """A batch state from a dict of fields a row; what a dict leaves out is 0, None an empty row.

    Unless a dict says otherwise, a row may have as many drafts as it has room for.
    """

    def build(num_drafts, rows):
        layout = row_layout(num_drafts)
        table = np.zeros((len(rows), layout.size), np.int32)
        for index, row in enumerate(rows):
            if row is None:
                continue
            fields = layout.unpack(table[index])
            fields["stop_ids"][...] = -1
            fields["drafts"][...] = -1
            fields["max_drafts"][...] = num_drafts
            for name, value in row.items():
                if np.ndim(value):
                    fields[name][: len(value)] = value
                else:
                    fields[name][...] = value
        return BatchState(jnp.asarray(table))

    return build
