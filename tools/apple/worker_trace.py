"""What Apple's code drafts and packs in every step, as lists for JSON.

Part of worker.py, under a Python that has PyTorch: nothing of this project is imported.
"""

# pyright: reportMissingImports=false

import contextlib
from collections.abc import Generator
from typing import Any


@contextlib.contextmanager
def recorded(drafter: Any) -> Generator[list[dict[str, Any]]]:
    """A list that grows by one entry for every step that is decoded meanwhile.

    `rounds`: the beams after each round, best first: `sequences` of the tokens after the root, and
    their `log_probs`. Apple's search returns the last round's alone; those of the others are what
    it gathers from in the round that follows.
    `tree`: `tokens` of the packed nodes, the root first, and `parents`, their indices.
    """
    from recurrent_drafting import modeling_drafter, tree_attention

    steps: list[dict[str, Any]] = []
    search, pack = drafter.beam_search_candidates, tree_attention.pack
    gather = modeling_drafter._gather_beams
    gathered: list[Any] = []

    def traced_gather(values: Any, beams: Any) -> Any:
        gathered.append(values)
        return gather(values, beams)

    def traced_search(*arguments: Any) -> Any:
        gathered.clear()
        found = search(*arguments)
        # Of each round: the beams before it, their states, log-probabilities of their tokens, and
        # those of the tokens to come. Before the first round there is the root alone.
        before = zip(gathered[4::4], gathered[6::4], strict=True)
        steps.append({"rounds": [describe_beams(*beams) for beams in (*before, found)]})
        return found

    def traced_pack(beams: Any, padding_mask: Any) -> Any:
        packed = pack(beams, padding_mask)
        tokens, _, mask, depths = packed
        steps[-1]["tree"] = describe_tree(tokens, mask, depths)
        return packed

    drafter.beam_search_candidates, tree_attention.pack = traced_search, traced_pack
    modeling_drafter._gather_beams = traced_gather
    try:
        yield steps
    finally:
        # The instance's attribute; the class's method is as it was.
        del drafter.beam_search_candidates
        tree_attention.pack, modeling_drafter._gather_beams = pack, gather


def describe_beams(beams: Any, log_probs: Any) -> dict[str, Any]:
    """Of row 0; summed from the root on in float32, as the search sums them."""
    drafted = beams[0, :, 1:]
    scores = log_probs[0].gather(-1, drafted[..., None])[..., 0]
    total = scores[:, 0]
    for score in scores.T[1:]:
        total = score + total
    return {"sequences": drafted.tolist(), "log_probs": total.tolist()}


def describe_tree(packed: Any, mask: Any, depths: Any) -> dict[str, list[int]]:
    """Of row 0; a node's parent is what it sees one step higher, and the root's the root."""
    count = packed.shape[1]
    depth = depths[0]
    above = mask[0, :, -count:].bool() & (depth[None, :] == depth[:, None] - 1)
    parents = above.int().argmax(dim=1)
    return {"tokens": packed[0].tolist(), "parents": parents.tolist()}
