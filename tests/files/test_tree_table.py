"""`draft.yaml`: written for people, read back, the nearest tree taken, bad files refused."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from redrafter_jax import InputError, TreeConfig, load_tree, load_tree_table
from redrafter_jax.files.tree_table import TreeTable, TunedTree, write_tree_table

CHAIN = TreeConfig(beam_width=1, draft_rounds=2, num_nodes=6, rerank=True)
WIDE = TreeConfig(beam_width=4, draft_rounds=3, num_nodes=9, sharpness=1.2)
LOOKUP = TreeConfig(beam_width=1, draft_rounds=2, lookup_tokens=8)
PATHS = TreeConfig(beam_width=2, draft_rounds=2, static_tree=((0,), (1,), (0, 0)))
TABLE = TreeTable(
    "CPU, 2 cores",
    "float32",
    (
        TunedTree(1, 0.0, WIDE, 1.9, 1.8),
        TunedTree(1, 1.0, LOOKUP, 1.4, 1.3),
        TunedTree(4, 0.0, PATHS, 1.4, 1.2),
        TunedTree(8, 0.0, CHAIN, 1.2, 1.1),
        TunedTree(8, 1.0, None, 1.0, 1.0),
    ),
)


@pytest.mark.parametrize(
    ("batch_size", "temperature", "expected"),
    [
        (1, 0.0, WIDE),
        (1, 1.0, LOOKUP),
        # The nearest batch by ratio, or the larger of two; then the nearest temperature, or the
        # lower of two.
        (2, 0.0, PATHS),
        (3, 0.0, PATHS),
        (5, 0.0, PATHS),
        (6, 0.0, CHAIN),
        (7, 0.0, CHAIN),
        (9, 0.1, CHAIN),
        (9, 0.5, CHAIN),
        (6, 0.7, None),
        (5, 0.7, PATHS),
        (1, 2.0, LOOKUP),
    ],
)
def test_the_tree_of_the_nearest_entry_is_read_back(
    tmp_path: Path, batch_size: int, temperature: float, expected: TreeConfig | None
) -> None:
    write_tree_table(tmp_path / "draft.yaml", TABLE)
    assert load_tree(tmp_path, batch_size, temperature) == expected


def test_the_file_explains_itself_and_reads_like_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "draft.yaml"
    write_tree_table(path, TABLE)
    text = path.read_text()
    assert text.startswith("# How this drafter's trees are drafted fastest, as `python -m eval tun")
    assert "\ndevice: CPU, 2 cores\ndtype: float32\ntrees:\n- batch_size: 1\n" in text
    assert "  tree:\n    beam_width: 4\n    draft_rounds: 3\n    num_nodes: 9\n" in text
    assert text.endswith("  measured_speedup: 1.0\n  acceptance_length: null\n")
    assert "\n  tree: null\n  predicted_speedup: 1.0\n" in text


@pytest.mark.usefixtures("unchecked_shapes")
def test_a_field_that_an_older_file_lacks_has_its_default(tmp_path: Path) -> None:
    (tmp_path / "draft.yaml").write_text(entry(tree="{beam_width: 2}"))
    assert load_tree(tmp_path) == TreeConfig(beam_width=2)


def test_the_table_of_a_hub_repository_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tree_table(tmp_path / "draft.yaml", TABLE)
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(return_value=tmp_path))
    assert load_tree("some/body") == WIDE
    assert load_tree_table("some/body") == TABLE


def test_without_a_table_the_sentence_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no draft\.yaml, .*`python -m eval tune`, or give"):
        load_tree_table(tmp_path)


def entry(**changes: str) -> str:
    """A table of one entry."""
    values = {"batch_size": "1", "temperature": "0", "tree": "null"}
    values |= {"predicted_speedup": "1", "measured_speedup": "1"} | changes
    stated = ", ".join(f"{name}: {value}" for name, value in values.items() if value)
    return f"device: a\ndtype: b\ntrees: [{{{stated}}}]\n"


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [", "is not valid YAML: "),
        ("a: 1\na: 2", "is not valid YAML: the key 'a' appears twice at line 2, column 1."),
        ("a: !!int ''", "is not valid YAML: '' is not a valid 'int' at line 1, column 4."),
        ("a: !!timestamp x", "is not valid YAML: 'x' is not a valid 'timestamp' at line 1"),
        ("a: [!!bool q]", "is not valid YAML: 'q' is not a valid 'bool' at line 1, column 5."),
        ("a: &b [1]\nc: *b", "aliases are not allowed here; write out their values."),
        ("[1, 2]", "draft.yaml: the file is [1, 2]; it must be a mapping of device, dtype, trees."),
        ("device: a\ntrees: []", "does not state 'dtype', which has no default; add it."),
        ("device: 3\ndtype: b\ntrees: [1]", ": device is 3; it must be a string."),
        (
            "device: a\ndtype: b\ntrees: {}",
            ": trees is {}; it must be a tuple of mappings, in files a list.",
        ),
        ("device: a\ndtype: b\ntrees: []", "states no trees; delete it, or run"),
        (entry(tree=""), "does not state 'trees.0.tree'"),
        (entry(batch_size="0"), "trees.0.batch_size is 0; it must be greater than 0."),
        (entry(temperature="9" * 400), "9; it must be less than 2 to the 63rd."),
        (entry(temperature="hot"), "trees.0.temperature is 'hot'; it must be a number"),
        (
            entry(tree="{beam: 4}"),
            "trees.0.tree.beam is an unknown key; known keys: beam_width, draft_",
        ),
        (entry(tree="wide"), "trees.0.tree is 'wide'; it must be a mapping of beam_width, "),
        (entry(tree="{num_nodes: 99}"), "trees.0.tree.num_nodes is 99; beam_width=8 and draft_"),
        (entry(tree="{final_beams_only: 1}"), "final_beams_only is 1; it must be true or false"),
    ],
)
def test_a_bad_table_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "draft.yaml").write_text(text)
    with pytest.raises(InputError) as refused:
        load_tree(tmp_path)
    assert sentence in str(refused.value)
    assert str(refused.value).startswith(str(tmp_path))
