import re
from typing import Any

import pytest

from redrafter_jax import InputError, SamplingConfig, TreeConfig
from redrafter_jax.config.drafter import HeadConfig

TREE: dict[str, Any] = {"beam_width": 4, "draft_rounds": 3}


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("config", "changes", "sentence"),
    [
        (TreeConfig, {"candidates": 3}, "candidates is 3; it must be at least beam_width=4."),
        (
            TreeConfig,
            {"candidates": 6, "num_nodes": 8, "rerank": True},
            "candidates is 6; rerank with 8 nodes needs at least 7.",
        ),
        (
            TreeConfig,
            {"final_beams_only": True, "rerank": True},
            "final_beams_only is True, but rerank also keeps nodes outside the final beams; leave",
        ),
        (TreeConfig, {"num_nodes": 14}, "allow 1 to 13 nodes."),
        (
            TreeConfig,
            {"lookup_tokens": 2, "num_nodes": 2, "rerank": True},
            "allow 3 to 15 nodes, lookup_tokens=2 included, and more with rerank.",
        ),
        (TreeConfig, {"lookup_tokens": 5, "num_nodes": 5}, "6 to 18 nodes, lookup_tokens=5 incl"),
        (TreeConfig, {"static_tree": [[0]]}, "static_tree is [[0]]; it must be True, False or a"),
        (TreeConfig, {"static_tree": ()}, "static_tree is empty; give paths, or True for the l"),
        (TreeConfig, {"static_tree": ((0,), (1, 0))}, "holds (1, 0) without its parent (1,); add"),
        (TreeConfig, {"static_tree": ((0,), (0,))}, "holds a path twice or an empty path; remo"),
        (TreeConfig, {"static_tree": ((0,), (0, 4))}, "holds (0, 4); a path has at most draft_ro"),
        (TreeConfig, {"static_tree": ((-1,),)}, "holds (-1,); a path has at most draft_rounds"),
        (
            TreeConfig,
            {"static_tree": ((0,),), "num_nodes": 2},
            "already sets the number of nodes;",
        ),
        (SamplingConfig, {"temperature": 1e-38}, "is 1e-38; it must be 0 for greedy decoding, or"),
        (SamplingConfig, {"temperature": 1e39}, "is 1e+39; it must be 0 for greedy decoding, or"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(
    config: Any, changes: dict[str, Any], sentence: str
) -> None:
    good = {TreeConfig: TREE, SamplingConfig: {}}[config]
    with pytest.raises(InputError, match=re.escape(sentence)):
        config(**{**good, **changes})


@pytest.mark.parametrize(
    ("tree", "all_nodes", "budget", "beam_nodes", "max_path"),
    [
        # Three rounds of four beams below the root; a path is the root and one node per round.
        (TreeConfig(**TREE), 13, 13, 13, 4),
        (TreeConfig(**TREE, num_nodes=6), 13, 6, 6, 4),
        # Lookup tokens are some of the nodes, and reach further than beams.
        (TreeConfig(**TREE, lookup_tokens=5), 18, 18, 13, 9),
        (TreeConfig(**TREE, num_nodes=6, lookup_tokens=2), 15, 6, 4, 6),
        (TreeConfig(**TREE, static_tree=((0,), (3,), (0, 3)), lookup_tokens=2), 6, 6, 4, 6),
    ],
)
def test_a_draft_counts_its_nodes_and_its_longest_path(
    tree: TreeConfig, all_nodes: int, budget: int, beam_nodes: int, max_path: int
) -> None:
    counted = (tree.max_nodes, tree.budget, tree.beam_nodes, tree.max_path)
    assert counted == (all_nodes, budget, beam_nodes, max_path)


@pytest.mark.usefixtures("unchecked_shapes")
def test_a_beam_has_no_more_extensions_than_tokens_to_draft() -> None:
    config = HeadConfig(vocab_size=5, hidden_size=4)
    config.check_tree(TreeConfig(1, 2, num_nodes=8, lookup_tokens=2, rerank=True))
    sentence = "is 9; with rerank it may be at most 8, because the drafter can draft 5 tokens"
    with pytest.raises(InputError, match=sentence):
        config.check_tree(TreeConfig(1, 2, num_nodes=9, lookup_tokens=2, rerank=True))
