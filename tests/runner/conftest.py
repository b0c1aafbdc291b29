"""What the tests of the step's parts share: building rows of the batch state, and reading them."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.plan import ROW_FLOATS, row_ints
from jaxspec.runner.batch_state import BatchState


@pytest.fixture
def make_rows():
    """A batch state from a dict of fields a row; what a dict leaves out is 0, None an empty row."""

    def build(num_drafts, rows):
        layout = row_ints(num_drafts)
        ints = np.zeros((len(rows), layout.size), np.int32)
        floats = np.zeros((len(rows), ROW_FLOATS.size), np.float32)
        for index, row in enumerate(rows):
            if row is None:
                continue
            fields = layout.unpack(ints[index]) | ROW_FLOATS.unpack(floats[index])
            fields["stop_ids"][...] = -1
            fields["drafts"][...] = -1
            for name, value in row.items():
                if np.ndim(value):
                    fields[name][: len(value)] = value
                else:
                    fields[name][...] = value
        return BatchState(ints=jnp.asarray(ints), floats=jnp.asarray(floats))

    return build
