"""A head's folder to a hub, which is an HTTP server of the test."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from redrafter_jax.errors import InputError
from redrafter_jax.files.publish import publish

CARD = "---\nlicense: apache-2.0\n---\n# A head\n"


class FakeHub(ThreadingHTTPServer):
    """Takes repositories and commits of files that are not large, as the hub's API does."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.made: list[dict[str, object]] = []
        self.files: dict[str, bytes] = {}
        self.refuses_with: int | None = None


class Answers(BaseHTTPRequestHandler):
    server: FakeHub  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.refuses_with is not None:
            self._answer(self.server.refuses_with, {"error": "no right to write"})
        elif self.path == "/api/repos/create":
            self.server.made.append(json.loads(body))
            self._answer(200, {"url": f"{self._base}/some/head"})
        elif self.path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif self.path.endswith("/preupload/main"):
            asked = json.loads(body)["files"]
            told = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in asked
            ]
            self._answer(200, {"files": told})
        else:
            assert self.path.startswith("/api/models/some/head/commit/main"), self.path
            for line in body.decode().splitlines():
                told = json.loads(line)
                if told["key"] == "file":
                    content = base64.b64decode(told["value"]["content"])
                    self.server.files[told["value"]["path"]] = content
            commit = {"commitUrl": f"{self._base}/some/head/commit/1", "commitOid": "1"}
            self._answer(200, {"success": True, **commit})

    def do_GET(self) -> None:
        self._answer(200, {"id": "some/head", "sha": "0", "siblings": []})

    do_HEAD = do_GET  # noqa: N815

    @property
    def _base(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def _answer(self, status: int, body: object) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        base = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", base)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    for name in (
        *("config.json", "model.safetensors", "model[1].safetensors", "draft.yaml", "notes.txt"),
        *("run/config.json", "run/state.pt", "run/optimizer.bin", "run/model.safetensors"),
    ):
        (tmp_path / name).write_text(f"content of {name}")
    (tmp_path / "README.md").write_text(CARD)
    return tmp_path


def test_what_others_need_is_uploaded_and_nothing_else(hub: FakeHub, folder: Path) -> None:
    published = publish(folder, "some/head", private=True)
    assert published.address.endswith("/some/head")
    assert not published.unlicensed
    assert [(made["name"], made["organization"]) for made in hub.made] == [("head", "some")]
    heads = {"model.safetensors", "model[1].safetensors"}
    assert hub.files.keys() == {"config.json", "draft.yaml", "README.md"} | heads
    for name, content in hub.files.items():
        assert content == (folder / name).read_bytes()


@pytest.mark.parametrize("stated", ["", "license: other\nlicense_name: not-stated\n"])
def test_a_card_without_a_licence_is_told_of(hub: FakeHub, folder: Path, stated: str) -> None:
    (folder / "README.md").write_text(f"---\n{stated}tags: [a]\n---\n# A head\n")
    assert publish(folder, "some/head").unlicensed


@pytest.mark.parametrize("status", [401, 403, 413, 422])
def test_a_hub_that_refuses_is_a_sentence_of_its_cause(
    hub: FakeHub, folder: Path, status: int
) -> None:
    hub.refuses_with = status
    with pytest.raises(InputError, match=rf"to 'some/head' .*failed \(.*{status}.*\); ") as told:
        publish(folder, "some/head")
    assert ("hf auth login" in str(told.value)) == (status in (401, 403))
    assert hub.files == {}


@pytest.mark.parametrize("name", ["head", "a/b/c", "some/he ad", ""])
def test_what_is_no_repository_is_refused(hub: FakeHub, folder: Path, name: str) -> None:
    with pytest.raises(InputError, match="is not an id of a repository; give ORGANISATION/NAME"):
        publish(folder, name)
    assert hub.made == []


def test_a_folder_without_a_card_or_with_a_broken_one_is_refused(
    hub: FakeHub, folder: Path
) -> None:
    (folder / "README.md").write_text("---\nlicense: [\n---\n")
    with pytest.raises(InputError, match="does not begin with metadata that the hub can read"):
        publish(folder, "some/head")
    (folder / "README.md").unlink()
    with pytest.raises(InputError, match=r"has no README.md, the model card; `train` and `fit`"):
        publish(folder, "some/head")
    assert hub.made == []
