"""A beam search over scores that the code of a head's authors computes, path by path."""

from collections.abc import Callable

import numpy as np
import torch

# Beams, rounds and nodes (the root included) of a golden's tree.
WIDTH, ROUNDS, NODES = 3, 4, 9
# Maps the tokens of a text and of a chain after it, beginning with the root, to the scores after
# each token of the chain, and to the logits of a confidence head, if there is one.
Follow = Callable[[list[int], list[int]], tuple[torch.Tensor, torch.Tensor | None]]


def beam_search(
    follow: Follow, tokens: list[int], text: list[int], root: int
) -> dict[str, np.ndarray]:
    """Return the best nodes of a tree: `paths` from the root, padded with -1, and `log_probs`.

    A token's log-probability is that of the scores. With a confidence head, the logarithm of the
    confidence after the previous token is added.

    Args:
      follow: function that runs the authors' code.
      tokens: tokens that can be drafted, in the order of their scores.
      text: tokens before the root.
      root: the first token of every path.
    """
    beams: list[tuple[float, list[int]]] = [(0.0, [root])]
    found: list[tuple[float, list[int]]] = []
    for done in range(ROUNDS):
        longer = []
        for total, path in beams:
            scores, confidence = follow(text, path)
            trust = 0.0
            if confidence is not None:
                trust = torch.nn.functional.logsigmoid(confidence[done].double()).item()
            best = torch.log_softmax(scores[done].double(), dim=-1)
            longer += [
                (total + trust + best[place].item(), [*path, token])
                for place, token in enumerate(tokens)
            ]
        longer.sort(reverse=True)
        assert longer[WIDTH - 1][0] - longer[WIDTH][0] > 5e-4, "beams are too close to a tie"
        beams = longer[:WIDTH]
        found += beams
    found.sort(reverse=True)
    assert found[NODES - 2][0] - found[NODES - 1][0] > 5e-4, "nodes are too close to a tie"
    kept = found[: NODES - 1]
    return {
        "paths": np.asarray([path + [-1] * (ROUNDS + 1 - len(path)) for _, path in kept]),
        "log_probs": np.asarray([total for total, _ in kept], np.float32),
    }
