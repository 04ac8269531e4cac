# SPDX-License-Identifier: Apache-2.0
"""A small model at every kind of origin, and a store to bring it to."""

import hashlib
import random
from pathlib import Path

import pytest
from hub_server import HubServer

from ddtree_models.store import Store
from ddtree_models.wanted import Config, Model

REVISION = "6a9e13bd6fc8f0983b9b99948120bc37f49c13e9"


class Origin:
    """A hub with one repository, also reachable as a mirror and as a directory."""

    repo = "owner/model"
    revision = REVISION

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder / self.repo / self.revision
        generator = random.Random(seed)
        self.files = {
            "config.json": b'{"a": 1}\n',
            "README.md": b"text\n",
            "empty.txt": b"",
            "tokenizer/merges file.txt": b"a b\n",
            "model-00001-of-00002.safetensors": generator.randbytes(300_000),
            "model-00002-of-00002.safetensors": generator.randbytes(200_001),
        }
        for name, data in self.files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def sha256s(self) -> dict[str, str]:
        return {name: hashlib.sha256(data).hexdigest() for name, data in self.files.items()}

    def write_manifest(self) -> str:
        """SHA256SUMS in the folder; returns its own digest."""
        text = "".join(f"{digest}  ./{name}\n" for name, digest in self.sha256s().items())
        (self.folder / "SHA256SUMS").write_text(text)
        return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def origin(tmp_path, request):
    return Origin(tmp_path / "hub", request.config.getoption("--seed") or 1)


@pytest.fixture
def hub(origin, tmp_path):
    with HubServer(tmp_path / "hub") as server:
        yield server


@pytest.fixture
def model():
    return Model("model", repo=Origin.repo, revision=Origin.revision)


@pytest.fixture
def config(tmp_path, hub, model):
    return Config(
        (model,),
        folder=str(tmp_path / "models"),
        state=str(tmp_path / "state"),
        endpoint=hub.url,
        workers=3,
        reserve_mib=1,
    )


@pytest.fixture
def store(config):
    return Store(config)
