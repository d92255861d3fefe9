"""What decodes the texts of `generate` and `chat`: the tree of the options, or of `draft.yaml`."""

from pathlib import Path

import pytest
from tiny_folders import PairFolders, write_pair

from redrafter_jax import InputError, MirrorConfig, TreeConfig
from redrafter_jax.commands.options import adaptive_of, open_decoder
from redrafter_jax.commands.parser import read_arguments
from redrafter_jax.commands.served import load_served
from redrafter_jax.drafters.base import LoadedHead, as_drafter
from redrafter_jax.files.target_files import open_target
from redrafter_jax.files.tree_table import TreeTable, TunedTree, write_tree_table
from redrafter_jax.models.target import Target

TUNED = TreeConfig(beam_width=2, draft_rounds=3, num_nodes=5)


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory, habitual_target: Target, good_drafter: LoadedHead
) -> PairFolders:
    folders = write_pair(tmp_path_factory.mktemp("models"), habitual_target, good_drafter)
    trees = (TunedTree(1, 0.0, TUNED, 1.6, 1.52), TunedTree(4, 0.0, None, 1.0, 1.0))
    table = TreeTable("TPU v9", "float32", trees)
    write_tree_table(Path(folders.drafter) / "draft.yaml", table)
    return folders


@pytest.mark.parametrize(
    ("options", "batch_size", "tree", "told"),
    [
        (
            [],
            1,
            TUNED,
            "draft.yaml: beam_width=2, draft_rounds=3, num_nodes=5, 1.52 times the baseline for "
            "batch size 1 at temperature 0 on TPU v9\n",
        ),
        (
            ["--temperature", "0.4"],
            3,
            None,
            "draft.yaml: no tree beats the baseline for batch size 4 at temperature 0 on TPU v9; "
            "the drafter is not used\n",
        ),
        # An option of the tree, be it the default, is for the default tree with it.
        (["--beam-width", "8"], 1, TreeConfig(), ""),
        (["--lookup-tokens", "2"], 1, TreeConfig(lookup_tokens=2), ""),
    ],
)
def test_without_options_the_tree_is_the_tables_and_it_is_told(
    folders: PairFolders,
    good_drafter: LoadedHead,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    batch_size: int,
    tree: TreeConfig | None,
    told: str,
) -> None:
    models = ["--target", folders.target, "--drafter", folders.drafter]
    arguments = read_arguments(["generate", *models, "--prompt", "a", *options])
    decoder = open_decoder(arguments, open_target(folders.target), ["a"], batch_size)
    drafted = decoder.tree
    if isinstance(drafted, TreeTable):  # of the table the one tree, which may give way
        assert not options
        (tuned,) = drafted.trees
        drafted = tuned.tree
    assert drafted == tree
    # A tree that is asked for stays.
    assert decoder.adaptive is not bool({"--beam-width", "--lookup-tokens"} & {*options})
    assert type(decoder.drafter) is type(as_drafter(None if tree is None else good_drafter))
    assert capsys.readouterr().err == told


def test_one_tree_of_a_table_is_mirrored_and_no_whole_table(folders: PairFolders) -> None:
    models = ["--target", folders.target, "--drafter", folders.drafter, "--mirror-layer", "1"]
    arguments = read_arguments(["generate", *models, "--prompt", "a", "--mirror-candidates", "3"])
    decoder = open_decoder(arguments, open_target(folders.target), ["a"])
    assert decoder.mirror == MirrorConfig(layer=1, candidates=3)
    assert not decoder.adaptive
    with pytest.raises(InputError, match="tree is a table of trees, but mirror drafts one tree"):
        load_served(read_arguments(["serve", *models]))


def test_a_schema_that_is_too_deep_is_refused(folders: PairFolders, tmp_path: Path) -> None:
    file = tmp_path / "deep.json"
    file.write_text('{"items": ' * 100_000 + "{}" + "}" * 100_000)
    models = ["--target", folders.target, "--drafter", folders.drafter, "--prompt", "a"]
    arguments = read_arguments(["generate", *models, "--json-schema", str(file)])
    with pytest.raises(InputError, match=r"deep\.json is nested too deeply"):
        open_decoder(arguments, open_target(folders.target), ["a"])


@pytest.mark.parametrize(("words", "adaptive"), [("on", True), ("off", False)])
def test_the_option_says_whether_trees_give_way(
    folders: PairFolders, words: str, adaptive: bool
) -> None:
    models = ["--target", folders.target, "--drafter", folders.drafter, "--prompt", "a"]
    for more in ([], ["--beam-width", "8"]):
        arguments = read_arguments(["generate", *models, *more, "--adaptive", words])
        assert adaptive_of(arguments) is adaptive
