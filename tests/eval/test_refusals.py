"""What `python -m eval` cannot use is refused in one sentence, before weights are read."""

from pathlib import Path
from typing import Any

import pytest
from tiny_folders import PairFolders, write_yaml
from tiny_shapes import TARGET

from eval.commands import COMMANDS, evaluate
from redrafter_jax import InputError

LOOKUP_ALONE = "drafter is not set, which selects prompt lookup alone; set drafter, or set only"
BEAMS = "beam_width is 25, more than the 24 tokens"
SAMPLINGS = "samplings=[{temperature: 1}, {temperature: 1, top_p: 0.9}]"


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory, pair_settings: dict[str, Any]) -> Path:
    """A file of good settings for every command."""
    folder = tmp_path_factory.mktemp("refused")
    report = {"report_dir": str(folder / "report")}
    pair, shape = pair_settings | report, {"target": TARGET} | report
    rows = pair | {"max_new_tokens": 24}
    head = {"drafter": rows["drafter"]}
    small = {"beam_width": 3, "draft_rounds": 3}
    settings: dict[str, dict[str, Any]] = {
        "compare": {name: rows[name] for name in rows if name != "drafter"}
        | {"drafters": {"head": head}},
        "parity": pair | {"cases": {"greedy": {"max_new_tokens": 24, "tree": small}}},
        "plan": shape,
        "steps": shape | {"slots": [32], "steps": 2, "trees": [{**small, "beam_width": 2}]},
        "tune": rows,
    }
    for name, values in settings.items():
        write_yaml(folder / f"{name}.yaml", values)
    return folder


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["drafters.head.drafter=null"], LOOKUP_ALONE),
        (["drafters.head={drafter: null, tree: auto}"], LOOKUP_ALONE),
        (["drafters={a: {tree: {lookup_tokens: 4, beam_width: 2}}}"], LOOKUP_ALONE),
        (["drafters={baseline: {tree: {lookup_tokens: 4}}}"], "'baseline' cannot name"),
        (["drafters={head: {drafter: /nowhere}}"], "'/nowhere' does not exist"),
        (["drafters={}"], "drafters: Dictionary should have at least 1 item"),
        (["drafters.head.tree=auto"], r"has no draft\.yaml"),
        (["drafters.head.tree=wide"], r"head\.tree is 'wide'; it must be auto or fields"),
        (["drafters.head.tree.num_nodes=[]"], r"num_nodes is \[\]; it must be a value or a list"),
        (
            ["drafters.head.tree.static_tree=[[0], 5]"],
            r"static_tree is \[\[0\], 5\]; it must be true, false or paths such as \[\[0\], ",
        ),
        (
            ["drafters.head.tree.beam_widths=3"],
            r"tree\.beam_widths: unknown key; did you mean 'beam_width",
        ),
        (["drafters.head.tree.beam_width=25"], BEAMS),
        (["drafters.head.tree.beam_width=[2,25]"], BEAMS),
        (["drafters.head.tree.num_nodes=[99]"], "num_nodes is 99; beam_width=8 and draft_rounds=4"),
        (
            ["drafters={a: {tree: {lookup_tokens: [2, 3]}}, 'a, C=3': {tree: {lookup_tokens: 4}}}"],
            "drafters has two methods named 'a, C=3'; rename one",
        ),
        (["drafter=a"], "drafter: unknown key; did you mean 'drafters'"),
        (["clock=false", "repeats=2"], "repeats is 2, but with clock=false .* repeats=1 or"),
        (["clock=false", "warm_ups=2"], "warm_ups is 2, but with clock=false .* warm_ups=1 or"),
        (
            ["batch_size=3", "mesh.data=2"],
            "batch_size is 3, which the mesh's data=2",
        ),
        (["batch_size=2", "mesh.data=2"], "5 prompts in batches of 2 leave 1 for the last batch"),
        (["clock=false", "mesh.data=2"], "The number of prompts is 5, which the mesh's data=2"),
        (["samplings=[{temperature: 0, top_k: 5, min_p: 0.1}]"], "so leave top_k and min_p out"),
        (["target=DRAFTER"], "states model_type 'recurrent_drafting_drafter'"),
        (["report_dir=/dev/null/a"], "Cannot make report_dir /dev/null/a: Not a directory"),
        (["max_new_tokens=510"], "line 1: the prompt has 3 tokens and max_new"),
        (["max_new_tokens=600"], "max_new_tokens is 600, but"),
        (["parity", "cases.greedy.trees=3"], r"greedy\.trees: unknown key; did you mean 'tree'"),
        (["parity", "cases.greedy.tree.num_nodes=99"], "draft_rounds=3 allow 1 to 10 nodes"),
        (["parity", "tolerance.float32=0"], r"tolerance\.float32 is 0; it must be greater than 0"),
        (["parity", "cases.greedy.prompt_count=6"], "Case 'greedy': prompt_count is 6, but"),
        (
            ["parity", "cases.greedy.prompt_tokens=[9, 500]"],
            "Case 'greedy': prompt_tokens=500 and max_new_tokens=24 make 524 tokens, but the "
            "target has 512 positions; lower one of the two",
        ),
        (["parity", "cases.greedy.max_new_tokens=510"], "Case 'greedy': .*prompt has 3 tokens"),
        (["parity", "cases.greedy.tree.beam_width=30"], "Case 'greedy': .*more than the 24"),
        (["plan", "--target"], "argument --target: expected one argument; see "),
        (["plan", "--gpu", "h20"], "gpu is 'h20'; it must be 'h100', "),
        (["plan", "--cache", "31"], "slots is 31; it must be greater than or equal to 32"),
        (["plan", "--target", "no/model"], "target: 'no/model' is neither a folder nor"),
        (["plan", "--target", "plan.yaml"], "yaml is a settings file; pass it as --config"),
        (["plan", "tree.beam_width=25"], BEAMS),
        (["steps", "trees=[{beam_width: [25]}]"], BEAMS),
        (["steps", "slots=[160]"], "slots is 160, but the target has 128 positions; give fewer"),
        (["steps", "steps=10"], "slots is 32, too few for 10 steps of up to 4 tokens; give more"),
        (["tune", SAMPLINGS], r"1\.0, 1\.0, but a table has"),
        (
            ["tune", "batch_sizes=[1, 8]"],
            "batch_sizes includes 8, but there are only 5 prompts; give",
        ),
        (["tune", "output=."], r"output is \., a folder; set output=FILE"),
        (["tune", "output=none/draft.yaml"], "the folder none is missing; make .* output=FILE"),
        (
            ["tune", "drafter=some/body"],
            "some/body, not a local folder; correct drafter, or set output=FILE",
        ),
        (["tune", "mesh.model=2"], "eval tune measures one device; leave mesh out"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(
    configs: Path,
    folders: PairFolders,
    words: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("redrafter_jax.files.target_files.TargetFiles.load")
    command = words[:1] if words[0] in COMMANDS else []
    config = configs / f"{(command or ['compare'])[0]}.yaml"
    rest = [word.replace("DRAFTER", folders.drafter) for word in words[len(command) :]]
    with pytest.raises(InputError, match=sentence):
        evaluate([*command, "--config", str(config), *rest])
