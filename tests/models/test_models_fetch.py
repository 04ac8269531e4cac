# SPDX-License-Identifier: Apache-2.0
"""Models fetched over real HTTP, from a server with the file interface of Hugging Face."""

import http.client
import json
import os
import shutil
import signal
import ssl
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hub_server import HubServer

from ddtree_models.errors import ModelsError
from ddtree_models.fetch import ATTEMPTS, fetch, reach
from ddtree_models.sources import source_of
from ddtree_models.store import Store
from ddtree_models.wanted import Model

ROOT = Path(__file__).parents[2]
WEIGHTS = "model-00001-of-00002.safetensors"


@pytest.fixture
def said():
    return []


@pytest.fixture
def bring(config, store, model, said):
    """Fetches the model, without pauses; returns its folder."""

    def run(model=model, config=config, token="", store=store):
        fetch(store, model, source_of(model, config, token), config, said.append, lambda s: None)
        return Path(store.folder(model))

    return run


def test_a_transfer_that_tls_breaks_off_is_continued(bring, origin, monkeypatch):
    read1, broken = http.client.HTTPResponse.read1, []

    def breaking(answer, amount=-1):
        if not broken:
            broken.append(answer)
            raise ssl.SSLError("decryption failed or bad record mac")
        return read1(answer, amount)

    monkeypatch.setattr(http.client.HTTPResponse, "read1", breaking)
    assert content(bring()) == origin.files
    assert len(broken) == 1


def content(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "SHA256SUMS"
    }


def test_every_file_of_the_revision_arrives_and_is_verified(bring, origin, hub, store, model):
    folder = bring()
    assert content(folder) == origin.files
    state = store.check(model, full=True)
    assert (state.good, state.read) == (True, len(origin.files))
    assert len(hub.asked("/tree/")) == 3  # 7 entries with the folder, 3 a page
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"],
        cwd=folder, check=False, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "")


def test_the_server_of_these_tests_is_one_that_huggingface_hub_downloads_from(
    hub, origin, tmp_path
):
    script = (
        "import sys; from huggingface_hub import snapshot_download; "
        "snapshot_download('owner/model', revision=sys.argv[1], local_dir=sys.argv[2])"
    )
    hub.behaviour.token = "hf_secret"
    subprocess.run(
        [sys.executable, "-c", script, origin.revision, str(tmp_path / "theirs")],
        check=True, timeout=120, capture_output=True,
        env={
            **os.environ,
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": "hf_secret",
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(tmp_path / "home"),
        },
    )  # fmt: skip
    shutil.rmtree(tmp_path / "theirs/.cache")
    assert content(tmp_path / "theirs") == origin.files


def test_files_belong_to_who_fetched_them_and_nobody_may_write_them(bring):
    folder = bring()
    for path in [folder, *folder.rglob("*")]:
        found = path.stat()
        assert found.st_uid == os.geteuid()
        wanted = 0o755 if path.is_dir() else 0o444
        assert stat.S_IMODE(found.st_mode) == wanted, path


def test_excluded_files_do_not_come(bring, model, origin, hub):
    folder = bring(replace(model, exclude=("*.md", "tokenizer/*")))
    assert "README.md" not in content(folder)
    assert len(content(folder)) == len(origin.files) - 2
    assert not hub.asked("README.md")


def test_a_transfer_that_is_cut_continues_where_it_was(bring, origin, hub):
    hub.behaviour.cut_after, hub.behaviour.cuts = 100_000, 3
    assert content(bring()) == origin.files
    starts = [request.range for request in hub.asked(".safetensors") if request.range]
    assert len(starts) >= 3
    assert {int(start.removeprefix("bytes=").rstrip("-")) % 100_000 for start in starts} == {0}


def test_a_server_without_ranges_sends_the_whole_again(bring, origin, hub):
    hub.behaviour.cut_after, hub.behaviour.cuts, hub.behaviour.ranges = 100_000, 2, False
    assert content(bring()) == origin.files


def test_a_busy_server_is_asked_again(bring, origin, hub):
    hub.behaviour.failures = ATTEMPTS - 1
    assert content(bring()) == origin.files


def test_a_server_that_stays_away_is_given_up_and_what_came_is_kept(
    bring, origin, hub, store, model
):
    hub.behaviour.cut_after, hub.behaviour.cuts = 0, 1000
    with pytest.raises(ModelsError, match=r"safetensors: .* times in a row. What came is kept"):
        bring()
    assert not Path(store.folder(model)).exists()
    assert len(hub.asked(".safetensors")) >= 2 * ATTEMPTS - 1
    hub.behaviour.cuts = 0
    assert content(bring()) == origin.files


def test_a_killed_fetch_continues_at_the_byte_it_had(config, hub, origin, tmp_path, store, model):
    """The process, not only the connection, ends."""
    hub.behaviour.bytes_per_s = 200_000
    settings = tmp_path / "models.json"
    settings.write_text(
        json.dumps(
            {
                "folder": config.folder, "state": config.state, "endpoint": hub.url,
                "reserve_mib": 1,
                "models": [{"name": "model", "repo": model.repo, "revision": model.revision}],
            }
        )
    )  # fmt: skip
    command = [sys.executable, "-m", "ddtree_models", "--config", str(settings), "fetch"]
    part = Path(store.staging(model)) / f"{WEIGHTS}.part"
    running = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 30
        while not (part.exists() and part.stat().st_size > 50_000):
            assert time.monotonic() < end, "no transfer began"
            time.sleep(0.02)
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait(timeout=30)
    kept = part.stat().st_size
    assert 0 < kept < 300_000
    hub.behaviour.bytes_per_s = 0
    hub.behaviour.requests.clear()
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert content(Path(store.folder(model))) == origin.files
    assert {request.range for request in hub.asked(WEIGHTS)} == {f"bytes={kept}-"}
    assert not list(Path(config.folder).glob(".*"))


def test_a_part_that_was_wrong_is_fetched_from_the_start(bring, store, model, origin, hub):
    part = Path(store.staging(model)) / f"{WEIGHTS}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 1000)
    assert content(bring()) == origin.files
    assert [request.range for request in hub.asked(WEIGHTS) if request.host == hub.files_url] == [
        "bytes=1000-",
        "",
    ]


def test_a_file_that_is_corrupted_at_its_origin_is_refused_by_name(bring, store, model, hub):
    hub.behaviour.corrupt = {WEIGHTS}
    with pytest.raises(ModelsError, match=f"^{WEIGHTS} is corrupted at its origin: its SHA-256 is"):
        bring()
    assert not Path(store.folder(model)).exists()


def test_a_small_file_is_checked_by_gits_digest(bring, hub):
    hub.behaviour.corrupt = {"config.json"}
    with pytest.raises(ModelsError, match=r"^config.json is corrupted at its origin: its git"):
        bring()


def test_the_token_goes_to_the_hub_and_to_no_other_origin(bring, origin, hub, said):
    hub.behaviour.token = "hf_secret"
    assert content(bring(token="hf_secret")) == origin.files
    assert {
        request.authorized for request in hub.behaviour.requests if request.host == hub.url
    } == {True}
    elsewhere = [request for request in hub.behaviour.requests if request.host == hub.files_url]
    assert len(elsewhere) == 2
    assert not any(request.authorized for request in elsewhere)
    assert "hf_secret" not in " ".join(said)


def test_a_gated_model_without_a_token_is_refused_with_what_to_do(bring, hub):
    hub.behaviour.token = "hf_secret"
    with pytest.raises(ModelsError, match=r"refuses owner/model without a token \(401\): accept"):
        bring()


def test_a_revision_that_is_not_there_is_refused(bring, model):
    with pytest.raises(ModelsError, match=r"is not there \(404\)"):
        bring(replace(model, revision="0" * 40))


def test_a_disk_without_room_is_refused_before_a_byte_comes(bring, config, hub):
    free = shutil.disk_usage(Path(config.folder).parent).free // 2**20
    with pytest.raises(ModelsError, match=r"0\.5 MB are to come: make room"):
        bring(config=replace(config, reserve_mib=free + 100))
    assert not hub.asked("/resolve/")


def test_a_mirror_gives_what_its_manifest_names(bring, origin, hub):
    digest = origin.write_manifest()
    url = f"{hub.url}/{origin.repo}/{origin.revision}"
    mirrored = Model("mirrored", url=url, manifest_sha256=digest)
    hub.behaviour.cut_after, hub.behaviour.cuts = 100_000, 2
    assert content(bring(mirrored)) == origin.files
    with pytest.raises(ModelsError, match="is not the one that manifest_sha256 of"):
        bring(Model("other", url=url, manifest_sha256="0" * 64))


def test_a_directory_of_the_host_is_copied_and_verified(bring, origin):
    digest = origin.write_manifest()
    local = Model("local", directory=str(origin.folder), manifest_sha256=digest)
    folder = bring(local)
    assert content(folder) == origin.files
    # Copied: what happens to the origin later does not matter.
    (origin.folder / WEIGHTS).write_bytes(b"later")
    assert content(folder) == origin.files
    with pytest.raises(ModelsError, match=f"^{WEIGHTS} is corrupted at its origin"):
        bring(Model("again", directory=str(origin.folder)))


def test_a_directory_without_a_manifest_is_refused_with_the_command_that_writes_one(bring, origin):
    local = Model("local", directory=str(origin.folder))
    with pytest.raises(ModelsError, match="SHA256SUMS cannot be read") as refused:
        bring(local)
    command = str(refused.value).partition("`")[2].partition("`")[0]
    subprocess.run(["sh", "-c", command], cwd=origin.folder, check=True, timeout=30)
    assert content(bring(local)) == origin.files


def test_another_revision_brings_only_what_differs(bring, origin, hub, model, config, tmp_path):
    folder = bring()
    before = (folder / WEIGHTS).stat()
    newer = "f" * 40
    shutil.copytree(origin.folder, origin.folder.parent / newer)
    (origin.folder.parent / newer / "config.json").write_bytes(b'{"a": 2}\n')
    (origin.folder.parent / newer / "README.md").unlink()
    hub.behaviour.requests.clear()
    with (folder / "config.json").open() as reader:  # as an engine that runs has it
        bring(replace(model, revision=newer))
        assert reader.read() == '{"a": 1}\n'
    assert (folder / "config.json").read_text() == '{"a": 2}\n'
    assert not (folder / "README.md").exists()
    assert (folder / WEIGHTS).stat().st_ino == before.st_ino
    assert [request.path for request in hub.asked("/resolve/")] == [
        f"/owner/model/resolve/{newer}/config.json"
    ]


def test_a_model_that_lies_there_already_is_adopted_without_a_transfer(
    bring, origin, hub, store, model
):
    shutil.copytree(origin.folder, store.folder(model))
    assert store.check(model).missing
    assert content(bring()) == origin.files
    assert not hub.asked("/resolve/")
    assert store.check(model).good


def test_a_path_that_leads_out_of_the_folder_is_refused(bring, origin, hub, tmp_path):
    (origin.folder / "SHA256SUMS").write_text(f"{'0' * 64}  ../outside\n")
    with pytest.raises(ModelsError, match="leads out of the model's folder"):
        bring(Model("local", directory=str(origin.folder)))


def test_a_server_that_is_not_a_hub_is_told_from_one(bring, config, tmp_path, model):
    gone = pytest.raises(ModelsError, match=r"is not there \(404\)")
    with HubServer(tmp_path / "nothing") as other, gone:
        bring(config=replace(config, endpoint=other.url))
    with pytest.raises(ModelsError, match=r"is not reached"):
        bring(config=replace(config, endpoint=other.url))


def test_the_store_is_offline_once_it_is_filled(bring, store, model, hub, config):
    bring()
    hub.behaviour.requests.clear()
    assert Store(config).check(model, full=True).good
    assert not hub.behaviour.requests


# ---- before anything is changed


def asks(hub):
    return [(request.method, request.path.rpartition("/")[2]) for request in hub.behaviour.requests]


def test_whether_a_model_can_be_had_is_asked_without_fetching_it(config, store, model, hub):
    hub.behaviour.token = "right"
    reach(store, model, source_of(model, config, "right"))
    *listing, last = asks(hub)  # the listing comes in pages
    assert (set(listing), last) == ({("GET", model.revision)}, ("HEAD", "empty.txt"))
    assert not hub.asked("/resolve/")
    with pytest.raises(ModelsError, match=r"refuses owner/model with the token given \(401\)"):
        reach(store, model, source_of(model, config, "wrong"))
    with pytest.raises(ModelsError, match=r"refuses owner/model without a token \(401\)"):
        reach(store, model, source_of(model, config, ""))


def test_an_origin_that_is_not_reached_is_told_after_a_second_try(config, store, model, hub):
    pauses = []
    hub.behaviour.failures = 1
    reach(store, model, source_of(model, config, ""), pauses.append)
    assert pauses == [1.0]
    away = replace(config, endpoint="http://127.0.0.1:1")
    with pytest.raises(ModelsError, match=r"127\.0\.0\.1:1 is not reached"):
        reach(store, model, source_of(model, away, ""), pauses.append)
    nowhere = Model("n", directory="/nowhere")
    with pytest.raises(ModelsError, match="/nowhere/SHA256SUMS cannot be read"):
        reach(store, nowhere, source_of(nowhere, config, ""))


def test_nobody_is_asked_for_what_is_here(config, store, model, hub):
    fetch(store, model, source_of(model, config, ""), config, lambda s: None)
    hub.behaviour.requests.clear()
    reach(store, model, source_of(model, config, ""))
    assert not hub.behaviour.requests
    newer = replace(model, revision="f" * 40)
    with pytest.raises(ModelsError):
        reach(store, newer, source_of(newer, config, ""))
