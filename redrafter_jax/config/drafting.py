"""Settings of drafting and of sampling, and grammars that constrain the text."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le

from redrafter_jax.config.limits import Checked, Count, Natural, Positive, require
from redrafter_jax.errors import InputError

_FILTERS = ("top_k", "top_p", "min_p")


@dataclass(frozen=True)
class TreeConfig(Checked):
    """How a tree is drafted in one decode step.

    Attributes:
      beam_width: W, number of beams kept per round; for Medusa heads, which draft by rank, the
        number of best tokens taken from each head.
      draft_rounds: R, number of tokens drafted per beam (Apple's "beam length" is R + 1); for
        Medusa heads, the number of heads that are used.
      num_nodes: N, number of tree nodes that the target verifies, including the root and the lookup
        tokens; by default `1 + R * W + lookup_tokens`, which keeps every token of the beams.
      final_beams_only: keep only the nodes on the paths to the last round's beams, as in the
        ReDrafter paper.
      sharpness: factor on the draft scores before they are normalised and summed along a beam; with
        1.0, beams are ranked by the drafter's own log-probabilities.
      candidates: number of best tokens, W or more, over which a beam's scores are normalised; by
        default all tokens (Apple's code uses 50).
      lookup_tokens: C, number of nodes (among the N) for prompt lookup, which drafts the tokens
        that followed the last earlier occurrence of the text's last tokens; 0 for no lookup, as in
        the ReDrafter paper.
      static_tree: for Medusa heads, draft the same tree of ranks in every step: the N - 1 paths
        that are likeliest in general, instead of the paths that are most probable in each step. In
        Python and YAML, the paths may be given instead of True: ((0,), (1,), (0, 0)) takes the two
        best tokens of the first head and, after the best one, the best token of the second head.
      rerank: choose the N nodes among all extensions (tokens scored after a beam), not only among
        those that become beams; the other chosen extensions become leaves (after EAGLE-2, arXiv
        2406.16858, section 4.2). N may then exceed `1 + R * W`, up to one more than the number of
        tokens that can be drafted.
      mean_nodes: average number of nodes per row that the target verifies in a batch of B rows.
        Each step verifies the `B * mean_nodes` nodes that the drafter finds likeliest in the whole
        batch; a row that has ended leaves its nodes to the other rows. By default every row has N
        nodes.
    """

    beam_width: Count = 8
    draft_rounds: Count = 4
    num_nodes: Count | None = None
    final_beams_only: bool = False
    sharpness: Positive = 1.0
    candidates: Count | None = None
    lookup_tokens: Natural = 0
    static_tree: bool | tuple[tuple[int, ...], ...] = False
    rerank: bool = False
    mean_nodes: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.static_tree, bool):
            self._check_paths(self.static_tree)
        width, least = self.beam_width, 1 + self.lookup_tokens
        lookup = f", lookup_tokens={self.lookup_tokens} included" if self.lookup_tokens else ""
        problem = (
            f"is {self.num_nodes}; beam_width={width} and draft_rounds={self.draft_rounds} allow "
            f"{least} to {self.max_nodes} nodes{lookup}{', and more with rerank' * self.rerank}."
        )
        fits = least <= self.budget and (self.rerank or self.budget <= self.max_nodes)
        require(fits, self, "num_nodes", problem)
        problem = f"is {self.mean_nodes}; a row has {self.budget} nodes, so give at most that many."
        require((self.mean_nodes or 1) <= self.budget, self, "mean_nodes", problem)
        problem = (
            "is True, but rerank also keeps nodes outside the final beams; leave one of them out."
        )
        require(not (self.final_beams_only and self.rerank), self, "final_beams_only", problem)
        taken = self.extensions
        problem = f"is {self.candidates}; it must be at least beam_width={width}."
        if taken > width:
            problem = (
                f"is {self.candidates}; rerank with {self.beam_nodes} nodes needs at least {taken}."
            )
        require((self.candidates or taken) >= taken, self, "candidates", problem)

    def _check_paths(self, paths: tuple[tuple[int, ...], ...]) -> None:
        def check(holds: bool, problem: str) -> None:
            require(holds, self, "static_tree", problem)

        is_paths = isinstance(paths, tuple) and all(
            isinstance(path, tuple) and all(type(rank) is int for rank in path) for path in paths
        )
        check(is_paths, f"is {paths!r}; it must be True, False or a tuple of tuples of ranks.")
        check(len(paths) > 0, "is empty; give paths, or True for the likeliest paths.")
        check(self.num_nodes is None, "already sets the number of nodes; leave num_nodes out.")
        known = {(), *paths}
        check(len(known) == len(paths) + 1, "holds a path twice or an empty path; remove it.")
        for path in paths:
            check(path[:-1] in known, f"holds {path} without its parent {path[:-1]}; add it.")
            inside = all(0 <= rank < self.beam_width for rank in path)
            check(
                inside and len(path) <= self.draft_rounds,
                f"holds {path}; a path has at most draft_rounds={self.draft_rounds} ranks, each "
                f"below beam_width={self.beam_width}.",
            )

    def check_tokens(self, drafted: int) -> None:
        """Refuse a tree that keeps more tokens per round than U = `drafted`, the draftable ones."""
        for name in ("beam_width", "candidates"):
            asked = getattr(self, name) or 0
            if asked > drafted:
                raise InputError(
                    f"TreeConfig.{name} is {asked}, more than the {drafted} tokens that the "
                    f"drafter can draft; give {drafted} or fewer."
                )
        if self.rerank and self.extensions > drafted:
            raise InputError(
                f"TreeConfig.num_nodes is {self.budget}; with rerank it may be at most "
                f"{drafted + 1 + self.lookup_tokens}, because the drafter can draft {drafted} "
                "tokens."
            )

    def check_beams(self, drafter: str) -> None:
        """Refuse a static tree for a drafter that drafts in beams.

        `drafter` is what the error calls the drafter, such as "a recurrent head".
        """
        if self.static_tree:
            raise InputError(
                "TreeConfig.static_tree is for heads that draft by rank (Medusa heads), not for "
                f"{drafter}; leave static_tree out."
            )

    @property
    def max_nodes(self) -> int:
        """Number of nodes if every token of the beams, or every given path, becomes a node.

        The root and the lookup tokens are included.
        """
        drafted = self.beam_width * self.draft_rounds
        if isinstance(self.static_tree, tuple):
            drafted = len(self.static_tree)
        return 1 + drafted + self.lookup_tokens

    @property
    def budget(self) -> int:
        """N, the number of nodes of the tree, including the root, lookup tokens and padding."""
        return self.max_nodes if self.num_nodes is None else self.num_nodes

    @property
    def beam_nodes(self) -> int:
        """Number of nodes that the drafter itself fills, including the root."""
        return self.budget - self.lookup_tokens

    @property
    def extensions(self) -> int:
        """X, the number of best (beam, next token) pairs per round that may become nodes.

        The first W of them are the beams of the next round.
        """
        return max(self.beam_width, self.beam_nodes - 1) if self.rerank else self.beam_width

    @property
    def max_path(self) -> int:
        """P, the number of nodes on the longest path, root included."""
        return self.draft_rounds + self.lookup_tokens + 1

    def shared_nodes(self, rows: int) -> int | None:
        """Number of nodes that a batch of `rows` rows shares; None if every row has N nodes."""
        mean = self.mean_nodes or self.budget
        return None if mean == self.budget else rows * mean

    @property
    def without_lookup(self) -> "TreeConfig":
        """The tree that the drafter itself proposes, before prompt lookup adds its nodes."""
        if not self.lookup_tokens:
            return self
        nodes = None if self.num_nodes is None else self.beam_nodes
        return replace(self, num_nodes=nodes, lookup_tokens=0, mean_nodes=None)


@dataclass(frozen=True)
class MirrorConfig(Checked):
    """How the next trees are drafted while the target still verifies (arXiv 2510.13161).

    Attributes:
      layer: l, the number of target layers that run before the target's next tokens are guessed.
      candidates: k, number of next tokens that are guessed after each node, not counting the node's
        children.
      branches: M, number of likeliest guesses (last accepted node, next token) for which a tree is
        drafted ahead; by default k for each of the P nodes of the longest path, which is every
        guess if the tree is a chain.
      drafter_devices: number of devices that only the drafter uses: the first ones that the target
        does not use. With 0, the drafter shares the target's devices, and target and drafter do not
        run at the same time.
    """

    layer: Count
    candidates: Count = 8
    branches: Count | None = None
    drafter_devices: Natural = 0

    def count(self, tree: TreeConfig) -> int:
        """M for this tree: `branches` or its default, limited to the guesses that the tree has."""
        asked = self.branches or tree.max_path * self.candidates
        return min(asked, tree.budget * self.candidates)


def longest_path(tree: TreeConfig | None) -> int:
    """P, the number of nodes on a tree's longest path; 1 for None, a tree of only the root."""
    return 1 if tree is None else tree.max_path


def node_count(tree: TreeConfig | None) -> int:
    """N, the number of nodes of a tree; 1 for None, a tree of only the root."""
    return 1 if tree is None else tree.budget


@dataclass(frozen=True)
class SamplingConfig(Checked):
    """How the target's next token is chosen, speculatively or autoregressively.

    Attributes:
      temperature: 0 takes the most likely token; a value above 0 draws from
        `softmax(logits / temperature)`.
      top_k: keep only the k most likely tokens; by default all.
      top_p: keep the smallest set of most likely tokens whose probability reaches top_p.
      min_p: drop tokens whose probability is less than min_p times that of the most likely token.
      presence_penalty: subtracted from the logit of every token that the answer already contains.
      frequency_penalty: subtracted from a token's logit once per occurrence in the answer.
      repetition_penalty: divides the positive logits of tokens that the prompt or the answer
        contains, and multiplies their negative logits; 1 changes nothing.
      logit_bias: numbers added to the logits of tokens, by token id, such as {42: -100}.
      min_tokens: number of new tokens before a stop token or a stop string may end the answer.
    """

    temperature: Annotated[float, Ge(0)] = 0.0
    top_k: Count | None = None
    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    min_p: Annotated[float, Ge(0), Le(1)] | None = None
    presence_penalty: Annotated[float, Ge(-2), Le(2)] = 0.0
    frequency_penalty: Annotated[float, Ge(-2), Le(2)] = 0.0
    repetition_penalty: Annotated[float, Ge(0.01), Le(100)] = 1.0
    logit_bias: dict[int, float] | None = field(default=None, hash=False)
    min_tokens: Natural = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for token, bias in (self.logit_bias or {}).items():
            problem = f"has {token}: {bias}; token ids start at 0 and biases are from -100 to 100."
            require(token >= 0 and -100 <= bias <= 100, self, "logit_bias", problem)
        # Outside this range, logits divided by the temperature overflow or underflow in float32.
        fits = self.temperature == 0 or 1e-6 <= self.temperature <= 1e6
        problem = f"is {self.temperature}; it must be 0 for greedy decoding, or from 1e-6 to 1e6."
        require(fits, self, "temperature", problem)

    @property
    def adjusts(self) -> bool:
        """Whether a penalty, a bias or `min_tokens` changes the logits."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1
        return any(penalties) or bool(self.logit_bias) or self.min_tokens > 0

    def refuse_idle_filters(self, spelled: Callable[[str], str] = str) -> "SamplingConfig":
        """Refuse filters at temperature 0, where they have no effect; return the configuration.

        Args:
          spelled: function from a field's name to the name that the user writes, for the error.

        Raises:
          InputError: a filter is set at temperature 0.
        """
        names = [spelled(name) for name in _FILTERS if getattr(self, name) is not None]
        if names and self.temperature == 0:
            idle, temperature = " and ".join(names), spelled("temperature")
            raise InputError(
                f"{temperature} is 0, which takes the most likely token whatever the filter, so "
                f"leave {idle} out, or give a {temperature} above 0."
            )
        return self


@dataclass(frozen=True)
class Grammar:
    """The form that an answer must have: JSON by a schema, or a match of a regular expression.

    Attributes:
      json_schema: JSON Schema that the answer must fit; `{"type": "object"}` allows any object.
      regex: regular expression, in Rust's syntax, that the whole answer must match.

    Raises:
      InputError: neither field is given, or both are.
    """

    json_schema: Mapping[str, Any] | None = None
    regex: str | None = None

    def __post_init__(self) -> None:
        if (self.json_schema is None) == (self.regex is None):
            raise InputError("A Grammar has a json_schema or a regex; give exactly one of them.")
        if not isinstance(self.json_schema, Mapping | None):
            raise InputError(f"json_schema is {self.json_schema!r:.80}; it must be a mapping.")
        if not isinstance(self.regex, str | None):
            raise InputError(f"regex is {self.regex!r:.80}; it must be a string.")
