"""What an engine tells of drafts, counted by hand."""

from typing import Any

import numpy as np

from redrafter_jax.engine.gains import Gains
from redrafter_jax.engine.messages import Counters, Draft, Token, new_drafts, new_tokens

# Two places of a batch and three calls of up to three tokens each. At place 0 the first call
# verified two nodes of the head and one of the lookup and accepted one, the second had the root
# alone, and the third verified one node, which it accepted, and the end cut its bonus off.
COUNTS: Any = np.array([[2, 1, 2], [0, 0, 0]])
TOKENS: Any = np.array([[[5, 6, 0], [7, 0, 0], [8, 9, 0]], np.zeros((3, 3), int)])
ORIGINS: Any = np.array([[[1, -1, -1], [-1, -1, -1], [0, -1, -1]], np.full((3, 3), -1)])
DRAFTED: Any = np.array([[[2, 1], [0, 0], [1, 0]], [[0, 0]] * 3])
GAINS = Gains(COUNTS, TOKENS, ORIGINS, DRAFTED, None)
SOURCES = ("head", "lookup")


def test_drafts_are_told_call_by_call_as_tokens_are() -> None:
    drafts = new_drafts(GAINS, 0, SOURCES, first=4)
    assert drafts == [Draft(4, {"head": 2, "lookup": 1}), Draft(6, {"head": 1, "lookup": 0})]
    assert [token.call for token in new_tokens(GAINS, 0, SOURCES, first=4)] == [4, 4, 5, 6, 6]
    assert new_drafts(GAINS, 1, SOURCES, first=0) == []


def test_what_was_accepted_is_counted_by_drafter_and_by_depth() -> None:
    counters = Counters()
    path = [Token(1, 3, "head"), Token(2, 3, "head"), Token(3, 3, "lookup"), Token(4, 3, None)]
    counters.add(path, 1, [Draft(3, {"head": 7, "lookup": 2})])
    counters.add(new_tokens(GAINS, 0, SOURCES, 4), 3, new_drafts(GAINS, 0, SOURCES, 4))
    assert (counters.target_calls, counters.drafted_calls, counters.gained) == (4, 3, 9)
    assert counters.drafted == {"head": 10, "lookup": 3}
    assert counters.accepted == {"head": 3, "lookup": 2}
    assert counters.accepted_at == {1: 3, 2: 1, 3: 1}


def test_nodes_of_two_sources_of_one_name_are_added() -> None:
    # A lookup that is the drafter itself has the name of the lookup beside other drafters.
    drafts = new_drafts(GAINS, 0, ("lookup", "lookup"), first=0)
    assert drafts == [Draft(0, {"lookup": 3}), Draft(2, {"lookup": 1})]
