"""The engine on a mesh: the texts of one device, and nothing compiled for a new request."""

import pytest
from engine_runs import ROOM, ROWS, STOPS, generated, make_requests, run

from redrafter_jax import TreeConfig, make_mesh
from redrafter_jax.drafters.base import LoadedHead
from redrafter_jax.engine.engine import Engine
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import place

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.long
@pytest.mark.parametrize(("data", "model"), [(2, 1), (2, 2)])
def test_every_request_gets_what_generate_gives_it_on_one_device(
    habitual_target: Target, good_drafter: LoadedHead, data: int, model: int
) -> None:
    mesh = make_mesh(data, model)
    engine = Engine(
        place(habitual_target, mesh),
        place(good_drafter, mesh),
        tree=TreeConfig(beam_width=2, draft_rounds=2),
        slots=4,
        context_length=ROOM,
        stop_tokens=STOPS,
        prefill_chunk=8,
        prefill_rows=2,
        prefill_joins=True,
        row_counts=(),
    )
    engine.warm_up()
    requests = [request._replace(speculate=True) for request in make_requests(0, ROWS)]
    for request in requests:
        engine.submit(request)
    told = run(engine)
    assert engine.counters.compiled == 0
    assert engine.counters.reused_tokens > 0
    texts = generated(habitual_target, requests).tokens
    assert [told[number].tokens for number in range(ROWS)] == texts
