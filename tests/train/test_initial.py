"""Where a drafter starts: its head, and the tokens that it knows."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from published_heads import GOLDENS
from tiny_folders import change_json
from tiny_models import assert_same, random_target

from redrafter_jax import load_drafter, load_target, save_drafter
from redrafter_jax.config import TargetConfig
from redrafter_jax.drafters.base import LoadedHead
from redrafter_jax.drafters.medusa import MedusaConfig
from redrafter_jax.errors import InputError
from redrafter_jax.models.target import init_target
from train.config import DrafterSettings
from train.data.types import Windows
from train.initial import most_frequent, new_drafter, share_drafted

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = TargetConfig(31, 16, 24, 1, 2, 1, 8, 1e4, 1e-5, 64, True, (0,))
TARGET = random_target(CONFIG, 3)
ROWS = Windows(
    np.asarray([[4, 4, 7, 9]], np.int32), np.ones((1, 4), bool), np.ones((1, 4), np.int32)
)
HEAD = np.asarray(TARGET.merge().embed_tokens[...]).T


def new_head(settings: DrafterSettings) -> np.ndarray:
    return np.asarray(
        new_drafter(TARGET, settings, 2, [(ROWS, 1.0)], 0).merge().lm_head.kernel[...]
    )


def check_strongest(rows: np.ndarray, whole: np.ndarray) -> None:
    """As much of the head as any so many directions can hold (Eckart and Young)."""
    strengths = np.linalg.svd(whole, compute_uv=False)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), strengths[: len(rows)], rtol=1e-4)


def test_a_head_can_start_from_the_targets() -> None:
    head = new_head(DrafterSettings(exit_dim=16, initial_head="target"))
    np.testing.assert_array_equal(head, HEAD)
    check_strongest(new_head(DrafterSettings(exit_dim=4, initial_head="target")), HEAD)


def test_a_small_head_knows_the_most_learnt_tokens_and_the_end() -> None:
    settings = DrafterSettings(exit_dim=16, initial_head="target", draft_vocab_size=3)
    drafter = new_drafter(TARGET, settings, 2, [(ROWS, 1.0)], 0)
    assert drafter.config.draft_tokens == (0, 4, 7)
    np.testing.assert_array_equal(new_head(settings), HEAD[:, [0, 4, 7]])
    narrow = settings.model_copy(update={"exit_dim": 2})
    check_strongest(new_head(narrow), HEAD[:, [0, 4, 7]])


def test_without_a_word_a_head_drafts_16384_tokens_of_the_data_or_all_of_fewer() -> None:
    large = init_target(replace(CONFIG, vocab_size=20_000), 0)
    # The last tokens of the vocabulary are the only ones that carry loss.
    tokens = np.arange(19_990, 20_000, dtype=np.int32)[None]
    rows = Windows(tokens, np.ones_like(tokens, bool), np.ones_like(tokens))
    shape: dict[str, Any] = {"exit_dim": 4, "head": "target"}
    drafter = new_drafter(large, DrafterSettings(**shape), 2, [(rows, 1.0)], 0)
    drafted = drafter.config.draft_tokens or ()
    assert len(drafted) == 16_384
    assert set(range(19_990, 20_000)) < set(drafted)
    whole = DrafterSettings(**shape, draft_vocab_size=None)
    assert new_drafter(large, whole, 2, [(rows, 1.0)], 0).config.draft_tokens is None
    assert new_drafter(TARGET, DrafterSettings(**shape), 2, [], 0).config.draft_tokens is None


def test_the_share_of_the_data_that_can_be_drafted_counts_what_carries_loss() -> None:
    tokens = np.asarray([[9, 1, 1, 2], [9, 3, 3, 3]], np.int32)
    mask = np.asarray([[0, 1, 1, 1], [0, 1, 1, 1]], bool)
    rows = Windows(tokens, mask, np.ones_like(tokens))
    assert share_drafted([(rows, 1.0)], (1, 2, 9), 10) == 0.5
    # Sources count by their weights: twice as often what is of the second, of one row.
    first, second = (Windows(*(part[i : i + 1] for part in rows)) for i in (0, 1))
    assert share_drafted([(first, 1.0), (second, 2.0)], (1, 2, 9), 10) == pytest.approx(1 / 3)


def test_other_heads_start_as_the_best_of_their_rank_too() -> None:
    lent = DrafterSettings(exit_dim=4, initial_head="target", head="target", draft_vocab_size=3)
    drafter = new_drafter(TARGET, lent, 2, [(ROWS, 1.0)], 0)
    some = HEAD[:, list(drafter.config.draft_tokens or ())]
    proj = np.asarray(drafter.merge().head_proj.kernel[...])
    check_strongest(proj[:3] @ some, some)
    wide = lent.model_copy(update={"exit_dim": 20, "draft_vocab_size": None})
    proj = new_drafter(TARGET, wide, 2, [], 0).merge().head_proj.kernel[...]
    np.testing.assert_array_equal(proj, np.eye(20, 16))
    factors = DrafterSettings(exit_dim=20, initial_head="target", head="low_rank", head_rank=4)
    head = new_drafter(TARGET, factors, 2, [], 0).merge()
    product = np.asarray(head.head_proj.kernel[...]) @ np.asarray(head.lm_head.kernel[...])
    check_strongest(product[:4], HEAD)
    assert not product[4:].any()


@pytest.mark.parametrize("kind", ["recurrent", "medusa"])
def test_a_run_can_start_with_a_trained_drafter(
    kind: Literal["recurrent", "medusa"], tmp_path: Path
) -> None:
    shape: dict[str, Any] = {"kind": kind, "draft_vocab_size": 3}
    trained = new_drafter(TARGET, DrafterSettings(**shape), 2, [(ROWS, 1.0)], 7)
    save_drafter(trained, tmp_path)
    # Data of which three other tokens would be the most frequent.
    others = [(ROWS._replace(tokens=ROWS.tokens + 1), 1.0)]

    def start_with(rounds: int, **changes: Any) -> LoadedHead:
        settings = DrafterSettings(**shape | changes, initial_drafter=str(tmp_path))
        return new_drafter(TARGET, settings, rounds, others, 0)

    assert_same(start_with(2), trained)
    assert_same(start_with(2, draft_vocab_size="auto"), trained)
    with pytest.raises(InputError, match=r"draft_vocab_size is None, but .*_vocab_size 3; set"):
        start_with(2, draft_vocab_size=None)
    with pytest.raises(InputError, match=r"whose num_draft_layers is ., not 5; set the same"):
        start_with(2, num_draft_layers=5)
    if kind == "medusa":
        with pytest.raises(InputError, match="whose num_heads is 2, not 3; set draft_rounds to"):
            start_with(3)


def test_a_published_head_that_no_setting_describes_is_refused() -> None:
    folder = GOLDENS / "eagle/deepspec"
    target = load_target(GOLDENS / "eagle/target", "float32")
    settings = DrafterSettings(
        kind="eagle3",
        context_layers=(0, 1, 3, 4, 6),
        draft_vocab_size="auto",
        initial_drafter=str(folder),
    )
    with pytest.raises(
        InputError, match=r"whose rope_theta is 1000000\.0, not 10000\.0; no setting"
    ):
        new_drafter(target, settings, 2, [(ROWS, 1.0)], 0)
    deeper = random_target(replace(target.config, num_hidden_layers=9))
    with pytest.raises(InputError, match="for a target with 8 layers, and this target has 9"):
        new_drafter(deeper, settings, 2, [(ROWS, 1.0)], 0)


def test_a_published_head_that_names_the_depth_of_its_target_is_trained_further(
    tmp_path: Path,
) -> None:
    shutil.copytree(GOLDENS / "eagle/safeailab_3", tmp_path / "head")
    change_json(tmp_path / "head/config.json", num_target_layers=8)
    head = load_drafter(tmp_path / "head", "float32")
    assert head.config.num_target_layers == 8
    target = load_target(GOLDENS / "eagle/target", "float32")
    settings = DrafterSettings(
        kind="eagle3", draft_vocab_size="auto", initial_drafter=str(tmp_path / "head")
    )
    trained = new_drafter(target, settings, 2, [(ROWS, 1.0)], 0)
    assert_same(trained, head)
    save_drafter(trained, tmp_path / "saved")
    assert_same(load_drafter(tmp_path / "saved", "float32"), head)


def test_a_trained_drafter_without_parameters_of_tokens_drafts_others(tmp_path: Path) -> None:
    lent = DrafterSettings(head="target", draft_vocab_size=3)
    trained = new_drafter(TARGET, lent, 2, [(ROWS, 1.0)], 7)
    save_drafter(trained, tmp_path)
    more = lent.model_copy(update={"initial_drafter": str(tmp_path), "draft_vocab_size": 5})
    drafter = new_drafter(TARGET, more, 2, [(ROWS, 1.0)], 0)
    assert drafter.config.draft_tokens == most_frequent([(ROWS, 1.0)], 5, 31)
    assert drafter.merge().draft_token_ids.tolist() == list(drafter.config.draft_tokens)
    jax.tree.map(np.testing.assert_array_equal, drafter.params, trained.params)
    # As many as it has stay those that it has.
    others = [(ROWS._replace(tokens=ROWS.tokens + 1), 1.0)]
    same = more.model_copy(update={"draft_vocab_size": 3})
    assert_same(new_drafter(TARGET, same, 2, others, 0), trained)


def test_a_trained_head_gets_a_layer_that_attends_and_drafts_as_before(tmp_path: Path) -> None:
    trained = new_drafter(TARGET, DrafterSettings(exit_dim=20), 2, [(ROWS, 1.0)], 7)
    save_drafter(trained, tmp_path)
    more = DrafterSettings(exit_dim=20, attention=True, initial_drafter=str(tmp_path))
    drafter = new_drafter(TARGET, more, 2, [(ROWS, 1.0)], 0)
    assert drafter.config == more.build_for(TARGET.config, 2)
    head, old = drafter.merge(), trained.merge()
    embedded = jnp.asarray(np.random.default_rng(0).normal(size=(2, 9, 16)), jnp.float32)
    hidden, segments = jnp.cos(embedded[:, :7]), jnp.ones((2, 7), jnp.int32)
    contexts = head.contexts(hidden, embedded[:, :7], segments, 2)
    for ours, theirs in zip(
        head.unroll(contexts, embedded, 2), old.unroll(hidden, embedded, 2), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    # Its layer is ready to learn: not all of it is zero.
    assert jnp.abs(head.attention.self_attn.qkv_proj[...]).max() > 0
    # The other way round the layer would be lost.
    save_drafter(drafter, tmp_path)
    less = DrafterSettings(exit_dim=20, initial_drafter=str(tmp_path))
    with pytest.raises(InputError, match="whose attention is True, not False; set the same"):
        new_drafter(TARGET, less, 2, [(ROWS, 1.0)], 0)


WIDE: dict[str, Any] = {"exit_dim": 20, "initial_head": "target"}


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        (WIDE, r"^drafter\.exit_dim is 20; with initial_head=target it must be at most 16"),
        (
            WIDE | {"head": "low_rank", "head_rank": 17},
            r"^drafter\.head_rank is 17; with initial_head=target",
        ),
        (
            {"exit_dim": 16, "context_layers": (0,)},
            "context_layers holds 0; the last layer of this target is 0",
        ),
        (
            {"kind": "eagle3"},
            "The EAGLE-3 head names no target layers .* has 1; name layers in context_layers",
        ),
        (
            {"exit_dim": 16, "draft_vocab_size": 32},
            "draft_vocab_size is 32; the target has 31 tokens, .* so set 1 to 31",
        ),
    ],
)
def test_what_the_target_cannot_give_is_refused(shape: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        new_head(DrafterSettings(**shape))


def windows(tokens: list[list[int]], mask: list[list[int]]) -> Windows:
    ids = np.asarray(tokens, np.int32)
    return Windows(ids, np.asarray(mask, bool), np.ones_like(ids))


# Token 5 carries loss three times, 2 twice, 7 once; 1 is there four times and never does.
TEXT = windows([[5, 2, 1, 1], [5, 7, 1, 1], [5, 2, 9, 9]], [[1, 1, 0, 0]] * 3)
SMALL = windows([[8, 8]], [[1, 1]])
SHORT, LONG = windows([[3, 1]], [[1, 0]]), windows([[6, 6, 7, 7]], [[1] * 4])


@pytest.mark.parametrize(
    ("sources", "count", "always", "expected"),
    [
        ([(TEXT, 1.0)], 1, (), (5,)),
        ([(TEXT, 1.0)], 3, (), (2, 5, 7)),
        # Of equally rare tokens the lower.
        ([(TEXT, 1.0)], 5, (), (0, 1, 2, 5, 7)),
        ([(TEXT, 1.0)], 2, (9,), (5, 9)),
        # A source counts by its weight, not its size: 5 stands in each row of TEXT.
        ([(TEXT, 1.0), (SMALL, 1.0)], 1, (), (8,)),
        ([(TEXT, 9.0), (SMALL, 1.0)], 1, (), (5,)),
        # The weights are of rows: one that teaches more tokens counts for more.
        ([(SHORT, 1.0), (LONG, 1.0)], 1, (), (6,)),
    ],
)
def test_the_tokens_that_carry_loss_most_often_come_in_rising_order(
    sources: list[tuple[Windows, float]],
    count: int,
    always: tuple[int, ...],
    expected: tuple[int, ...],
) -> None:
    assert most_frequent(sources, count, vocab_size=10, always=always) == expected


@pytest.mark.parametrize("head", ["own", "target"])
def test_medusa_heads_can_start_as_the_target(head: Literal["own", "target"]) -> None:
    settings = DrafterSettings(
        kind="medusa", head=head, initial_head="target", draft_vocab_size=3, num_draft_layers=2
    )
    drafter = new_drafter(TARGET, settings, 2, [(ROWS, 1.0)], 0)
    assert drafter.config == MedusaConfig(31, 16, 2, 2, draft_tokens=(0, 4, 7), head=head)
    hidden = np.random.default_rng(0).normal(size=(5, 16)).astype(np.float32)
    some = HEAD[:, [0, 4, 7]]
    logits = drafter.merge().logits(jnp.asarray(hidden), 2, lambda features: features @ some)
    np.testing.assert_allclose(logits, np.stack([hidden @ some] * 2, axis=1), rtol=1e-5, atol=1e-6)
