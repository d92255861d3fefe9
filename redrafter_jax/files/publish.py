"""Uploads a head's folder to the Hugging Face hub."""

from collections.abc import Iterator
from glob import escape
from pathlib import Path
from typing import NamedTuple

from redrafter_jax.errors import InputError
from redrafter_jax.files.locate import TREE_TABLE

CARD = "README.md"
# The value of `license_name` in a card without a chosen licence.
NOT_STATED = "not-stated"
# The files that are uploaded, from the folder itself and not from subfolders.
_FILES = ("config.json", "*.safetensors", "*.bin", "*.pt", TREE_TABLE, CARD)
# HTTP statuses of requests that may succeed with another token.
_NO_RIGHT = (401, 403)


class Published(NamedTuple):
    """The address of an uploaded folder, and whether its model card states no licence."""

    address: str
    unlicensed: bool


def publish(folder: Path, repository: str, *, private: bool = False) -> Published:
    """Upload a head with its model card and its table of trees; create the repository if needed.

    Args:
      folder: folder of the head.
      repository: id of the repository, ORGANISATION/NAME.
      private: whether a new repository is private.

    Raises:
      InputError: the id is not valid, the folder has no card or a card that the hub cannot read, no
        user is logged in, or the upload failed for another reason.
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
            f"{repository!r} is not an id of a repository; give ORGANISATION/NAME."
        ) from None
    path = folder / CARD
    if not path.is_file():
        raise InputError(
            f"{folder} has no {CARD}, the model card; `train` and `fit` write one, or write your "
            "own: https://huggingface.co/docs/hub/model-cards."
        )
    try:
        card = ModelCard.load(path)
    except Exception as error:  # YAML raises errors of many types
        cause = str(error).partition("\n")[0].rstrip(".:")
        raise InputError(
            f"{path} does not begin with metadata that the hub can read: {cause}."
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
    # The errors of httpx, hf_xet and the file system have no common base class.
    except Exception as error:
        cause = str(error).strip().partition("\n")[0].rstrip(".:") or type(error).__name__
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        way_out = (
            "run `hf auth login` with a token that has write access, or set HF_TOKEN to one"
            if status in _NO_RIGHT
            else "fix this cause, then push again"
        )
        raise InputError(
            f"The upload to {repository!r} on the Hugging Face hub failed ({cause}); {way_out}."
        ) from None
    stated = card.data.to_dict()
    unlicensed = stated.get("license") in (None, "other") and stated.get("license_name") in (
        None,
        NOT_STATED,
    )
    return Published(str(commit.repo_url), unlicensed)


def _patterns(folder: Path) -> Iterator[str]:
    """A pattern for each file to upload; a `*` would also match files in subfolders."""
    for pattern in _FILES:
        for path in folder.glob(pattern):
            if path.is_file():
                yield escape(path.name)
