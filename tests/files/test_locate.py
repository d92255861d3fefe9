"""Models by their hub id: what is fetched, in which order, and what is said when nothing comes."""

import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from httpx2 import ProxyError, Request, Response
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
)
from safetensors.numpy import load_file
from tiny_folders import change_json
from tiny_models import assert_same, random_drafter, random_target, tiny_config
from torch_archives import write_archive

from redrafter_jax import (
    InputError,
    RecurrentConfig,
    load_drafter,
    load_target,
    save_drafter,
    save_target,
)
from redrafter_jax.files.convert import convert
from redrafter_jax.files.locate import from_hub

CONFIG = tiny_config(num_hidden_layers=1)


@pytest.fixture
def target_folder(tmp_path: Path) -> Path:
    save_target(random_target(CONFIG), tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def asked(target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """What is asked of a hub with that target; only the files asked for arrive."""
    snapshot, asked = target_folder.parent / "snapshots" / "0123abc", []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        snapshot.mkdir(parents=True, exist_ok=True)
        for pattern in allow_patterns:
            for path in target_folder.glob(pattern):
                shutil.copy(path, snapshot)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return asked


@pytest.mark.parametrize("stored", ["safetensors", "bin"])
def test_the_hubs_description_comes_before_its_weights(
    target_folder: Path, asked: list[tuple[str, str | None]], stored: str
) -> None:
    (target_folder / "consolidated.safetensors").write_text("the same again")
    if stored == "bin":
        path = target_folder / "model.safetensors"
        write_archive(target_folder / "pytorch_model.bin", load_file(path))
        path.unlink()
    assert_same(load_target("some/body", dtype="float32"), random_target(CONFIG))
    # Of one commit; torch's files are asked for where there are no safetensors.
    of_commit = [("some/body", "0123abc")] * (2 if stored == "bin" else 1)
    assert asked == [("some/body", None), *of_commit]
    assert not list(target_folder.parent.glob("snapshots/*/consolidated*"))


@pytest.mark.usefixtures("asked")
def test_a_drafters_weights_come_from_the_hub_too(target_folder: Path) -> None:
    drafter = random_drafter(RecurrentConfig(24, 32, exit_dim=8, num_draft_layers=0))
    shutil.rmtree(target_folder)
    save_drafter(drafter, target_folder)
    assert_same(load_drafter("some/body", dtype="float32"), drafter)


@pytest.mark.usefixtures("asked")
def test_chat_template_and_tree_table_come_with_the_description(
    target_folder: Path, tmp_path: Path
) -> None:
    for file in ("chat_template.jinja", "draft.yaml"):
        (target_folder / file).write_text(f"of {file}")
    convert("some/body", tmp_path / "new")
    for file in ("chat_template.jinja", "draft.yaml"):
        assert (tmp_path / "new" / file).read_text() == f"of {file}"


@pytest.mark.usefixtures("asked")
def test_a_repository_without_weights_is_told_about_gguf(target_folder: Path) -> None:
    (target_folder / "model.safetensors").rename(target_folder / "tiny-Q8_0.gguf")
    with pytest.raises(InputError, match=r"no weights .* `hf download some/body FILE\.gguf`"):
        load_target("some/body")


def test_what_the_hub_gave_before_serves_offline(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cache laid out by hand: the commit of a branch, and a snapshot of the commit."""
    commit = "0123456789" * 4
    cached = tmp_path / "cache" / "models--some--body"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    shutil.copytree(target_folder, cached / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert_same(load_target("some/body", dtype="float32"), random_target(CONFIG))
    with pytest.raises(InputError, match="'some/one' is neither a folder nor an accessible repo"):
        load_target("some/one")


def test_the_weights_of_a_model_that_cannot_be_used_are_not_fetched(
    target_folder: Path, asked: list[tuple[str, str | None]]
) -> None:
    change_json(target_folder / "config.json", model_type="gemma2")
    with pytest.raises(InputError, match="model_type 'gemma2'; this version"):
        load_target("some/body")
    assert asked == [("some/body", None)]


def test_the_folder_that_was_meant_is_named(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline = Mock(side_effect=LocalEntryNotFoundError("offline"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(InputError, match=r"' is a file; give the path of a folder"):
        load_target(target_folder / "model.safetensors")
    around, name = target_folder.parent, target_folder.name
    (around / f"{name}_notes").mkdir()
    meant = re.escape(f"did you mean '{target_folder}'?")
    with pytest.raises(InputError, match=f"holds no config.json; {meant}$"):
        load_target(around)
    monkeypatch.chdir(around.parent)
    # The first could be the hub's, which is asked; the second cannot.
    for missing, why in (
        (f"{around.name}/{name}s", "offline"),
        (f"./{around.name}/{name}s", "not"),
    ):
        with pytest.raises(
            InputError, match=rf"{why}.*\(did you mean '{around.name}/{name}'\?\)\.$"
        ):
            load_target(missing)
    for number in range(5):
        shutil.copytree(target_folder, around / f"all/{number}")
    with pytest.raises(InputError, match=r"/0' or '.*/1' or '.*/2' or one of 2 others\?$"):
        load_target(around / "all")


@pytest.mark.parametrize(
    "name",
    [
        "runs/demo/drafter",
        "./here",
        "/a/b",
        "~/here",
        r"C:\models\a",
        "here/",
        "a b",
        "a/b.safetensors",
    ],
)
def test_the_hub_is_not_asked_for_what_can_only_be_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ask = Mock()
    monkeypatch.setattr("huggingface_hub.snapshot_download", ask)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        InputError, match=r"does not exist, and is not an id .*; give the path of a fol"
    ):
        load_target(name)
    ask.assert_not_called()


def test_a_home_folder_that_the_shell_did_not_see_is_named(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(target_folder.parent))
    with pytest.raises(InputError, match=rf"did you mean '{re.escape(str(target_folder))}'"):
        load_target(f"~/{target_folder.name}")


def test_no_name_is_no_folder() -> None:
    with pytest.raises(InputError, match="name of a model is empty; give a folder"):
        load_target("")


ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": 8}
IS_ADAPTER = (
    r"is an adapter \(LORA\) for the model 'org/base', not a model; merge the two .* folder\.$"
)


@pytest.mark.parametrize("with_config", [False, True])
@pytest.mark.parametrize("on_hub", [False, True])
def test_an_adapter_is_told_as_one(
    target_folder: Path, asked: list[Any], with_config: bool, on_hub: bool
) -> None:
    """As peft saves it, and as programs for fine-tuning do, beside the model's `config.json`."""
    (target_folder / "adapter_config.json").write_text(json.dumps(ADAPTER))
    name = "some/body" if on_hub else target_folder
    load_target(name)  # a whole model may have one too
    shutil.rmtree(target_folder.parent / "snapshots", ignore_errors=True)
    (target_folder / "model.safetensors").rename(target_folder / "adapter_model.safetensors")
    if not with_config:
        (target_folder / "config.json").unlink()
    with pytest.raises(InputError, match=IS_ADAPTER):
        load_target(name)
    assert bool(asked) == on_hub


REQUEST = Request("GET", "http://h")
GATED = GatedRepoError("403 Client Error", response=Response(403, request=REQUEST))
WITHOUT = RemoteEntryNotFoundError("404 Client Error", response=Response(404, request=REQUEST))


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (WITHOUT, r"^'a/b' on the Hugging Face hub has no config\.json; give the path"),
        (ProxyError("407 Proxy\nmore"), r"neither a folder nor .* hub \(407 Proxy\); give the"),
        (RuntimeError(), r"neither a folder nor .* hub \(RuntimeError\); give the path"),
        (OSError(28, "No space left", "/c"), r"'a/b' was not .* No space left \(/c\); fix that"),
        (GATED, r"'a/b' is gated on .* accept the licence .* log in with `hf auth login`\.$"),
    ],
)
def test_whatever_the_hub_fails_with_is_one_sentence(error: Exception, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as refused:
        from_hub(Mock(side_effect=error), "a/b", "config.json")
    assert "\n" not in str(refused.value)
