"""Counts of drafted and accepted tokens of an answer, in vLLM's format.

The JSON object has the format of `--per-request-spec-decode-metrics summary`
(https://github.com/vllm-project/vllm/pull/48915), so that programs for vLLM can read it. Here a
draft is a tree: all of its nodes count as drafted tokens, and the histogram counts accepted depths.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from redrafter_jax.engine.messages import Event


@dataclass
class Speculation:
    """Sums over the target calls that had a draft to verify.

    Attributes:
      drafted: number of proposed tree nodes, by drafter.
      accepted: number of accepted tokens, by drafter.
      calls: number of target calls, by the number of drafted tokens that a call accepted.
    """

    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    calls: Counter[int] = field(default_factory=Counter)

    def add(self, event: Event, last_call: int) -> None:
        """Add the target calls of an event, up to and including the call `last_call`."""
        own = [one for one in event.decided if one.origin and one.call <= last_call]
        self.accepted.update(one.origin for one in own if one.origin)
        accepted = Counter(one.call for one in own)
        for draft in event.drafted:
            if draft.call <= last_call:
                self.drafted.update(draft.nodes)
                self.calls[accepted[draft.call]] += 1

    def include(self, other: "Speculation") -> None:
        """Add the counts of another answer."""
        self.drafted.update(other.drafted)
        self.accepted.update(other.accepted)
        self.calls.update(other.calls)

    def body(self, depth: int) -> dict[str, Any] | None:
        """Return the statistics as a JSON object, or None if the server drafts nothing.

        Args:
          depth: maximum number of drafted tokens that one target call can accept.
        """
        if not depth:
            return None
        calls, drafted, accepted = self.calls.total(), self.drafted.total(), self.accepted.total()
        return {
            "mean_acceptance_length": 1 + accepted / calls if calls else 1.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "acceptance_histogram": [self.calls[count] for count in range(depth + 1)],
            "num_spec_steps": calls,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": depth,
            "by_drafter": {
                name: {
                    "num_accepted_draft_tokens": self.accepted[name],
                    "num_draft_tokens": count,
                }
                for name, count in self.drafted.items()
                if count
            },
        }
