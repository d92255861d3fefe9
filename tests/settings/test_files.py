"""Settings from YAML files and overrides; all problems in one message."""

from pathlib import Path

import pydantic
import pytest

from redrafter_jax import InputError, TreeConfig
from redrafter_jax.settings.files import Settings, dump_settings, load_settings


class Inner(Settings):
    rate: float = 0.5
    names: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    fast: bool = False


class Outer(Settings):
    size: pydantic.PositiveInt
    tree: TreeConfig = TreeConfig()
    inner: Inner = Inner()
    spare: Inner | None = None
    spares: tuple[Inner, ...] = ()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "outer.yaml"
    path.write_text(
        "size: 3\ninner:\n  rate: 1e-3\n  names: []\nspares:\n  - {rate: 1}\n  - {rate: 2}\n"
    )
    return path


def test_a_file_gives_values_and_the_model_the_rest_and_so_does_its_dump(config: Path) -> None:
    spares = (Inner(rate=1.0), Inner(rate=2.0))
    expected = Outer(size=3, inner=Inner(rate=0.001, names=()), spares=spares)
    settings = load_settings(Outer, config)
    assert settings == expected
    config.write_text(dump_settings(settings))
    assert load_settings(Outer, config) == expected


def test_overrides_reach_into_sections_and_are_read_as_yaml(config: Path) -> None:
    overrides = ["size=4e0", "inner.rate=3e-4", "inner.names=[a, b]", "spares.1.rate=5"]
    settings = load_settings(Outer, config, [*overrides, "spares.0={fast: true}", "spare.rate=2"])
    assert settings.size == 4
    assert settings.spares == (Inner(fast=True), Inner(rate=5.0))
    assert settings.spare == Inner(rate=2.0)
    assert settings.inner == Inner(rate=0.0003, names=("a", "b"))


def test_an_override_changes_one_of_the_places_that_share_a_yaml_alias(tmp_path: Path) -> None:
    path = tmp_path / "outer.yaml"
    path.write_text("size: 3\ninner: &shared {rate: 1}\nspare: *shared\n")
    settings = load_settings(Outer, path, ["inner.rate=2"])
    assert (settings.inner, settings.spare) == (Inner(rate=2.0), Inner(rate=1.0))


def test_a_tree_may_be_given_as_paths(config: Path) -> None:
    settings = load_settings(Outer, config, ["tree.static_tree=[[0], [1], [0, 0]]"])
    assert settings.tree.static_tree == ((0,), (1,), (0, 0))
    assert load_settings(Outer, config, ["tree.static_tree=yes"]).tree.static_tree is True
    with pytest.raises(InputError, match=r"tree.static_tree holds \(1, 0\) without its parent"):
        load_settings(Outer, config, ["tree.static_tree=[[0], [1, 0]]"])


def test_a_date_is_a_string_and_yes_is_true_where_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "dates.yaml"
    path.write_text("size: 1\ninner:\n  names: [2024-01-31, 2024-13-01]\n", encoding="utf-8")
    settings = load_settings(Outer, path, ["inner.fast=yes"])
    assert settings.inner == Inner(names=("2024-01-31", "2024-13-01"), fast=True)
    overridden = load_settings(Outer, path, ["inner.names=[2025-02-30]"])
    assert overridden.inner.names == ("2025-02-30",)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("size", "must have the form key.path=value"),
        ("size.more=3", "names a key within a value that has no keys"),
        ("size.more.rate=3", "names a key within a value that has no keys"),
        (
            "inner.names.0=a",
            "a list entry that does not exist; give an existing path, in which entries count from",
        ),
        ("spares.one.rate=1", "a list entry that does not exist"),
        ("spares.-1.rate=1", "a list entry that does not exist"),
        ("spares.2.rate=1", "a list entry that does not exist"),
        ("size=0x_", "not a YAML value"),
        ("size=yes", "size is True; it must be a valid integer; YAML reads yes"),
        (
            "inner.weights=[1, yes]",
            "inner.weights.1 is True; it must be a valid number; YAML reads yes",
        ),
        ("inner.rate=.inf", "inner.rate is inf; it must be a finite number"),
        ("tree.beam_width=0", "tree.beam_width is 0; it must be greater than 0"),
        (
            "tree.beam_width=yes",
            "tree.beam_width is True; it must be a valid integer; YAML reads yes",
        ),
        ("tree.lookup=1", "tree.lookup: unknown key; did you mean 'lookup_tokens'?"),
    ],
)
def test_a_bad_override_is_refused(config: Path, override: str, reason: str) -> None:
    with pytest.raises(InputError) as error:
        load_settings(Outer, config, [override])
    assert reason in str(error.value)
    assert override in str(error.value)


def test_problems_of_a_file_and_of_overrides_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("size: 0\ntree: {num_nodes: 3}\n")
    with pytest.raises(InputError) as error:
        load_settings(Outer, path, ["inner.rate=fast", "tree.lookup_tokens=3"])
    assert str(error.value).splitlines() == [
        f"{path} with inner.rate=fast tree.lookup_tokens=3 is not a valid configuration:",
        "  size is 0; it must be greater than 0",
        "  tree.num_nodes is 3; beam_width=8 and draft_rounds=4 allow 4 to 36 nodes, "
        "lookup_tokens=3 included.",
        "  inner.rate is 'fast'; it must be a valid number",
    ]


class Pair(Settings):
    first: int
    second: int

    @pydantic.model_validator(mode="after")
    def _rise(self) -> "Pair":
        if self.second <= self.first:
            raise ValueError(f"second is {self.second}; it must be greater than first")
        return self


def test_a_problem_of_the_whole_is_its_sentence_alone(tmp_path: Path) -> None:
    path = tmp_path / "pair.yaml"
    path.write_text("first: 2\nsecond: 1\n")
    with pytest.raises(InputError, match=r"configuration:\n  second is 1; it must be greater than"):
        load_settings(Pair, path)
    path.write_text("first: 2\nsecond: 3\n")
    with pytest.raises(InputError, match=r"pair.yaml with first=5 is not .*\n  second is 3; it"):
        load_settings(Pair, path, ["first=5"])


def test_known_keys_are_listed_once(tmp_path: Path) -> None:
    path = tmp_path / "other.yaml"
    path.write_text("size: 1\nsteps: 3\nloss: 1\ninner:\n  a: 1\n  b: 2\n  rats: 3\n")
    with pytest.raises(InputError) as error:
        load_settings(Outer, path)
    assert str(error.value).splitlines()[1:] == [
        "  inner.a: unknown key",
        "  inner.b: unknown key; known keys: rate, names, weights, fast.",
        "  inner.rats: unknown key; did you mean 'rate'?",
        "  steps: unknown key",
        "  loss: unknown key; known keys: size, tree, inner, spare, spares.",
    ]


def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    with pytest.raises(InputError, match=r"^Cannot read .*bad.yaml: No such file"):
        load_settings(Outer, path)
    path.write_text("- a list\n")
    with pytest.raises(InputError, match="must hold settings"):
        load_settings(Outer, path)
    bad = ("size: [\n", "size: 0x_\n", "size: " + "[" * 3000, "? [a]\n: 1\n", "size: &a [*a]\n")
    # Tags that their value does not fit, each of which ends in another error of the parser.
    bad += ("size: !!int ''\n", "size: !!bool q\n", "size: !!timestamp x\n", "size: !!float _\n")
    for text in bad:
        path.write_text(text)
        with pytest.raises(InputError, match=r"^[^ ]*bad.yaml is not valid YAML"):
            load_settings(Outer, path)
    path.write_text("size: 1\n")
    with pytest.raises(InputError, match=r"^Override 'size=&a \[\*a\]': .* is not a YAML value"):
        load_settings(Outer, path, ["size=&a [*a]"])
    with pytest.raises(InputError, match=r"^Override 'size=!!int \"\"': .* is not a YAML value"):
        load_settings(Outer, path, ['size=!!int ""'])
    with pytest.raises(InputError, match=r"is not a YAML value: the key 'rate' appears twice at"):
        load_settings(Outer, path, ["inner={rate: 1, rate: 2}"])
    path.write_text("inner: {rate: 1}\nsize: 1\ninner: {fast: true}\n")
    with pytest.raises(InputError, match="the key 'inner' appears twice"):
        load_settings(Outer, path)
    # What is merged into a mapping may be stated again.
    path.write_text("size: 1\nspare: &m {<<: {rate: 1}, rate: 2}\ninner: {<<: *m}\n")
    assert load_settings(Outer, path).inner == Inner(rate=2.0)
    path.write_bytes(b"size: \xff\n")
    with pytest.raises(InputError, match="not UTF-8 text at byte 6"):
        load_settings(Outer, path)
