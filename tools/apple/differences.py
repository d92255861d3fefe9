"""Where two traces of one prompt differ, and whether rounding accounts for it."""

from typing import Any, NamedTuple

from tools.apple.traces import Round, Step, Trace, same_prefix

# Nats. Sums of seven float32 log-probabilities from logits of two libraries differ by less, and two
# beams that are farther apart than this are no tie.
TOLERANCE = 1e-4


class Difference(NamedTuple):
    """The first place of a step where the two differ.

    Attributes:
      length: of the text before the step.
      round: counted from 0; None where beams are the same and the trees differ.
      kind: "order" of the same beams, other "beams", or another "tree".
      gap: nats that separate what was taken from what the other side took; of a tree None.
      tie: the gap is within the tolerance, so rounding decided.
    """

    length: int
    round: int | None
    kind: str
    gap: float | None
    tie: bool


def compare_traces(ours: Trace, apple: Trace, prompt_length: int) -> dict[str, Any]:
    """The texts, the calls, and every step that both sides begin from the same text."""
    shared = same_prefix(ours.tokens, apple.tokens)
    theirs = {step.length: step for step in apple.steps}
    pairs = [
        (step, theirs[step.length])
        for step in ours.steps
        if step.length in theirs and step.length - prompt_length <= shared
    ]
    found = [find_difference(*pair) for pair in pairs]
    errors = [error for pair in pairs for error in score_errors(*pair)]
    return {
        "same_text": ours.tokens == apple.tokens,
        "shared_tokens": shared,
        "target_calls": {"ours": ours.target_calls, "apple": apple.target_calls},
        "steps": len(pairs),
        "same_beams": sum(one is None or one.kind == "tree" for one in found),
        "same_trees": sum(one.paths == other.paths for one, other in pairs),
        "largest_error": max(errors, default=0.0),
        "differences": [difference._asdict() for difference in found if difference is not None],
    }


def find_difference(ours: Step, apple: Step) -> Difference | None:
    """None where all rounds have the same beams in the same order, and the trees are one."""
    for index, (one, other) in enumerate(zip(ours.rounds, apple.rounds, strict=True)):
        if one.sequences != other.sequences:
            kind = "order" if set(one.sequences) == set(other.sequences) else "beams"
            gap = _order_gap(one, other) if kind == "order" else _choice_gap(one, other)
            return Difference(ours.length, index, kind, gap, gap <= TOLERANCE)
    if ours.paths != apple.paths:
        return Difference(ours.length, None, "tree", None, tie=False)
    return None


def score_errors(ours: Step, apple: Step) -> list[float]:
    """Nats between the two scores of every sequence that both sides keep in a round."""
    errors = []
    for one, other in zip(ours.rounds, apple.rounds, strict=True):
        theirs = dict(zip(other.sequences, other.log_probs, strict=True))
        errors += [
            abs(score - theirs[sequence])
            for sequence, score in zip(one.sequences, one.log_probs, strict=True)
            if sequence in theirs
        ]
    return errors


def _order_gap(ours: Round, apple: Round) -> float:
    """The most that separates, by our scores, two beams that hold one rank on the two sides."""
    scores = dict(zip(ours.sequences, ours.log_probs, strict=True))
    return max(
        abs(scores[one] - scores[other])
        for one, other in zip(ours.sequences, apple.sequences, strict=True)
    )


def _choice_gap(ours: Round, apple: Round) -> float:
    """The most by which a beam that one side alone keeps beats the last one of the other side.

    The other side scored it no higher than its last, so this much the two scores of it differ.
    """
    gaps = []
    for one, other in ((ours, apple), (apple, ours)):
        kept, last = set(other.sequences), min(other.log_probs)
        gaps += [
            score - last
            for sequence, score in zip(one.sequences, one.log_probs, strict=True)
            if sequence not in kept
        ]
    return max(gaps)
