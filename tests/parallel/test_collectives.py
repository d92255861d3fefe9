"""What the parts of a mesh ask of each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from redrafter_jax.parallel.collectives import look_up, own_part
from redrafter_jax.parallel.mesh import make_mesh, parameter_spec


@pytest.mark.parametrize("size", [24, 22])
def test_rows_of_a_split_table(size: int) -> None:
    mesh = make_mesh(model=4)
    table = np.random.default_rng(0).normal(size=(size, 3)).astype(np.float32)
    rows = jnp.asarray([[0, 5, size - 1], [6, 11, 12]])

    def read(table: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        part = look_up(table, rows, size)
        return part, own_part(rows.repeat(8, axis=1), 6)

    split = jax.shard_map(
        read,
        mesh=mesh,
        in_specs=(parameter_spec("embed_tokens", table.shape, mesh), PartitionSpec()),
        out_specs=(PartitionSpec(), PartitionSpec(None, "model")),
        check_vma=False,
    )
    found, again = jax.jit(split)(table, rows)
    np.testing.assert_array_equal(found, table[rows])
    np.testing.assert_array_equal(again, rows.repeat(8, axis=1))
