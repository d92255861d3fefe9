"""A head's folder on the Hugging Face hub."""

from collections.abc import Iterator
from glob import escape
from pathlib import Path
from typing import NamedTuple

from redrafter_jax.errors import InputError
from redrafter_jax.files.locate import TREE_TABLE

CARD = "README.md"
# What a card states, as `license_name`, where nobody has chosen a licence.
NOT_STATED = "not-stated"
# What a folder of a head holds for others, itself and not in folders of its own: nothing else is
# uploaded.
_FILES = ("config.json", "*.safetensors", "*.bin", "*.pt", TREE_TABLE, CARD)
# The hub's answers that another token may change.
_NO_RIGHT = (401, 403)


class Published(NamedTuple):
    """Where a folder lies on the hub, and whether its card leaves the licence open."""

    address: str
    unlicensed: bool


def publish(folder: Path, repository: str, *, private: bool = False) -> Published:
    """Upload a head with its card and its table of trees; the repository is made if needed.

    Args:
      folder: of the head.
      repository: id of the repository, ORGANISATION/NAME.
      private: whether only its owner may see a repository that is made.

    Raises:
      InputError: the id is none, the folder has no card or one that the hub could not read, nobody
        is logged in, or the hub does not take the files, for whatever reason.
    """
    from huggingface_hub import HfApi, ModelCard
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
        if repository.count("/") != 1:
            raise HFValidationError
    except HFValidationError:
        raise InputError(
            f"{repository!r} is no id of a repository; give ORGANISATION/NAME."
        ) from None
    path = folder / CARD
    if not path.is_file():
        raise InputError(
            f"{folder} has no {CARD}, the model card; `train` and `fit` write one, or write your "
            "own: https://huggingface.co/docs/hub/model-cards."
        )
    try:
        card = ModelCard.load(path)
    except Exception as error:  # of its YAML, which has errors of many kinds
        cause = str(error).partition("\n")[0].rstrip(".:")
        raise InputError(
            f"{path} does not begin with metadata that the hub reads: {cause}."
        ) from None
    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=list(_patterns(folder)),
            commit_message="A draft head for redrafter-jax",
        )
    # httpx, hf_xet and the file system raise errors of their own, which have no base in common.
    except Exception as error:
        cause = str(error).strip().partition("\n")[0].rstrip(".:") or type(error).__name__
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        way_out = (
            "log in with a token that may write, by `hf auth login`, or set HF_TOKEN"
            if status in _NO_RIGHT
            else "push again when that is mended"
        )
        raise InputError(
            f"The Hugging Face hub did not take {repository!r} ({cause}); {way_out}."
        ) from None
    stated = card.data.to_dict()
    unlicensed = stated.get("license") in (None, "other") and stated.get("license_name") in (
        None,
        NOT_STATED,
    )
    return Published(str(commit.repo_url), unlicensed)


def _patterns(folder: Path) -> Iterator[str]:
    """For each file to upload a pattern of it alone; the client's own `*` means folders too."""
    for pattern in _FILES:
        for path in folder.glob(pattern):
            if path.is_file():
                yield escape(path.name)
