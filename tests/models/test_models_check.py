# SPDX-License-Identifier: Apache-2.0
"""What is told of models that were verified: intact, changed, corrupted, missing."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ddtree_models import wanted
from ddtree_models.errors import ModelsError
from ddtree_models.fetch import fetch
from ddtree_models.sources import source_of
from ddtree_models.store import Store
from ddtree_models.wanted import Model

ROOT = Path(__file__).parents[2]
WEIGHTS = "model-00001-of-00002.safetensors"


@pytest.fixture
def folder(config, store, model):
    fetch(store, model, source_of(model, config, ""), config, lambda s: None)
    return Path(store.folder(model))


@pytest.fixture
def settings(config, tmp_path, model):
    path = tmp_path / "models.json"
    path.write_text(
        json.dumps(
            {
                "folder": config.folder,
                "state": config.state,
                "endpoint": config.endpoint,
                "models": [{"name": "model", "repo": model.repo, "revision": model.revision}],
            }
        )
    )
    return path


def program(settings, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "ddtree_models", "--config", str(settings), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def flip(path, keep_time=False):
    """One bit of a file, in place."""
    before = path.stat()
    path.chmod(0o644)
    with path.open("r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))
    path.chmod(0o444)
    if keep_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_second_look_reads_no_file(store, model, folder):
    state = store.check(model)
    assert (state.good, state.read) == (True, 0)


def test_a_corrupted_file_is_named(store, model, folder):
    flip(folder / WEIGHTS)
    state = store.check(model)
    assert state.read == 1
    assert len(state.faults) == 1
    assert state.faults[0].startswith(f"{folder / WEIGHTS} is corrupted: its SHA-256 is ")


def test_a_file_that_rotted_without_a_new_time_is_found_by_a_full_look(store, model, folder):
    flip(folder / WEIGHTS, keep_time=True)
    assert store.check(model).good  # what size and time can tell
    state = store.check(model, full=True)
    assert [fault.split()[0] for fault in state.faults] == [str(folder / WEIGHTS)]


def test_what_a_full_look_found_is_fetched_again(folder, settings, hub):
    flip(folder / WEIGHTS, keep_time=True)
    assert program(settings, "check", "--full").returncode == 3
    assert program(settings, "check").returncode == 3
    hub.behaviour.requests.clear()
    assert program(settings, "fetch").returncode == 0
    assert [request.path.rpartition("/")[2] for request in hub.asked("/resolve/")] == [WEIGHTS]
    assert program(settings, "check", "--full").returncode == 0


def test_a_file_that_was_only_touched_is_read_once_and_noted(store, model, folder):
    os.utime(folder / WEIGHTS)
    assert (store.check(model).good, store.check(model).read) == (True, 0)


def test_a_missing_file_is_named(store, model, folder):
    (folder / "config.json").unlink()
    assert store.check(model).faults == [f"{folder}/config.json is missing"]


def test_weights_that_do_not_belong_are_named(store, model, folder):
    (folder / "extra.safetensors").write_bytes(b"x")
    assert "extra.safetensors" in store.check(model).faults[0]


def test_another_revision_has_to_be_fetched(store, model, folder):
    state = store.check(replace(model, revision="f" * 40))
    assert state.missing == ("model was fetched as something else than owner/model at ffffffffffff")


def test_what_is_installed_holds_while_another_revision_is_wanted(store, model, folder):
    """Else no instance could be restarted while 55 GB come."""
    newer = replace(model, revision="f" * 40)
    assert store.check(newer, installed=True).good
    flip(folder / WEIGHTS)
    assert WEIGHTS in store.check(newer, installed=True).faults[0]


@pytest.fixture
def another(settings, hub):
    """A second model in models.json, not fetched; returns its name."""
    told = json.loads(settings.read_text())
    told["models"].append({"name": "new", "repo": "owner/new", "revision": "f" * 40})
    settings.write_text(json.dumps(told))
    return "new"


def test_a_model_that_is_yet_to_be_fetched_keeps_no_other_from_being_served(
    folder, settings, another, config
):
    """Else no instance could be restarted while another model comes, or if it never came."""
    assert program(settings, "check", "--installed").returncode == 0
    serve = f'"{folder}" "--budget" "31" "--hf-overrides" "{{\\"a\\": \\"b/c\\"}}"'
    assert program(settings, "check", "--installed", f"--used-by={serve}").returncode == 0
    # What is wanted and not there is still told where that is asked.
    assert program(settings, "check").returncode == 3
    used = program(settings, "check", "--installed", f"--used-by={serve} --drafter={folder}/../new")
    assert used.returncode == 3
    assert "new was never fetched and verified on this host" in used.stderr


def test_only_the_models_that_an_instance_uses_keep_it_down(folder, settings, another, config):
    flip(folder / WEIGHTS)
    new = Path(config.folder) / another
    for words, status in ((f"{folder}/", 3), (f"x {folder}", 3), ("/elsewhere/model 31", 0)):
        done = program(settings, "check", "--installed", f"--used-by={words}")
        assert (words, done.returncode) == (words, status)
    new.mkdir()  # somebody's, not verified
    assert program(settings, "check", "--installed", f"--used-by={new}").returncode == 3
    refused = program(settings, "check", "--installed", f'--used-by="{new}')
    assert (refused.returncode, "is no command line" in refused.stderr) == (1, True)


def test_a_lost_note_means_that_everything_is_verified_again(
    store, model, folder, config, settings, hub
):
    (Path(config.state) / "model.json").write_text("{")
    hub.behaviour.requests.clear()
    assert program(settings, "check").returncode == 3
    assert program(settings, "fetch").returncode == 0
    assert not hub.asked("/resolve/")
    assert program(settings, "check").returncode == 0


def test_the_program_refuses_by_file_name_and_mends_only_that_file(folder, settings, hub):
    flip(folder / WEIGHTS)
    done = program(settings, "check")
    assert done.returncode == 3
    assert f"{folder / WEIGHTS} is corrupted" in done.stderr
    assert "Traceback" not in done.stderr
    told = json.loads(program(settings, "check", "--json").stdout)["models"][0]
    assert told["name"] == "model"
    assert WEIGHTS in told["faults"][0]
    hub.behaviour.requests.clear()
    assert program(settings, "fetch").returncode == 0
    assert [request.path for request in hub.asked("/resolve/")] == [
        f"/owner/model/resolve/6a9e13bd6fc8f0983b9b99948120bc37f49c13e9/{WEIGHTS}"
    ]
    assert program(settings, "check", "--full").returncode == 0


def test_removing_leaves_nothing(folder, settings, config):
    assert program(settings, "remove", "model").returncode == 0
    assert not list(Path(config.folder).iterdir())
    assert not list(Path(config.state).iterdir())


def test_what_was_never_fetched_here_is_not_removed(settings, config):
    mine = Path(config.folder) / "model"
    mine.mkdir(parents=True)
    refused = program(settings, "remove", "model")
    assert (refused.returncode, "model was never fetched on this host" in refused.stderr) == (
        1,
        True,
    )
    assert program(settings, "remove", "--all").returncode == 0
    assert mine.is_dir()


def test_removing_all_finds_models_that_are_no_longer_configured(
    folder, settings, config, store, tmp_path
):
    """Renamed, dropped, half fetched, or in a store that has moved since."""
    elsewhere = replace(config, folder=str(tmp_path / "before"))
    half = Model("half", directory="/nowhere")
    Store(elsewhere).begin(half)
    (Path(elsewhere.folder) / ".half.partial").mkdir(parents=True)
    (Path(elsewhere.folder) / ".half.partial/a.part").write_bytes(b"x")
    (Path(elsewhere.folder) / "half").mkdir()  # somebody's: nothing was put there yet
    (Path(config.folder) / "of-others").mkdir()
    without = tmp_path / "without.json"
    without.write_text(json.dumps({"folder": config.folder, "state": config.state}))
    done = program(without, "remove", "--all")
    assert (done.returncode, done.stdout) == (0, "removed half\nremoved model\n")
    assert [path.name for path in Path(config.folder).iterdir()] == ["of-others"]
    assert [path.name for path in Path(elsewhere.folder).iterdir()] == ["half"]
    assert not list(Path(config.state).iterdir())


COMMIT = "6a9e13bd6fc8f0983b9b99948120bc37f49c13e9"


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"name": "a"}, "model a names no source; it has to name one of repo, url and directory"),
        (
            {"name": "a", "repo": "o/n", "directory": "/d"},
            "names repo, directory; it has to name one",
        ),
        ({"name": "a", "repo": "o/n", "revision": "main"}, "pins no revision"),
        ({"name": "a", "repo": "o/n"}, "git ls-remote https://huggingface.co/o/n HEAD"),
        ({"name": "a", "repo": "n", "revision": COMMIT}, "'n' is not OWNER/NAME"),
        ({"name": "../a", "repo": "o/n", "revision": COMMIT}, "name is the name of a folder"),
        (
            {"name": "a", "url": "https://h/m"},
            "manifest_sha256 has to be what `sha256sum SHA256SUMS`",
        ),
        ({"name": "a", "url": "ftp://h", "manifest_sha256": "0" * 64}, "is not an http"),
        ({"name": "a", "directory": "d"}, "directory has to be an absolute path"),
        ({"name": "a", "directory": "/d", "revision": COMMIT}, "revision belongs to repo"),
        ({"name": "a", "directory": "/d", "manifest_sha256": "x"}, "is not a SHA-256 digest"),
        ({"name": "a", "directory": "/d", "token": "x"}, "has unknown keys: token"),
        ({"name": "a", "directory": "/d", "exclude": "*.bin"}, "exclude is a list of patterns"),
        ({"name": "a", "directory": "/d", "exclude": [5]}, "exclude is a list of patterns"),
        ("a", "models[0] is no mapping"),
    ],
)
def test_a_model_that_cannot_be_had_is_refused_in_a_sentence(item, words):
    with pytest.raises(ModelsError) as refused:
        wanted.config_from({"models": [item]})
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([], "the settings are no mapping"),
        ({"models": 5}, "models is no list"),
        ({"workers": 0}, "workers has to be 1 or more"),
        ({"workers": "x"}, "workers has to be 1 or more"),
        ({"reserve_mib": -1}, "reserve_mib has to be 0 or more"),
        ({"speed": 1}, "unknown settings: speed"),
    ],
)
def test_settings_that_mean_nothing_are_refused_in_a_sentence(settings, words):
    with pytest.raises(ModelsError, match=words):
        wanted.config_from(settings)


def test_numbers_of_a_command_line_are_numbers():
    config = wanted.config_from({"workers": "4", "reserve_mib": "16"})
    assert (config.workers, config.reserve_mib) == (4, 16)


def test_two_models_of_one_name_are_refused():
    item = {"name": "a", "directory": "/d"}
    with pytest.raises(ModelsError, match="two models are called a"):
        wanted.config_from({"models": [item, item]})


@pytest.mark.parametrize("line", ["abc  file", f"{'0' * 64}", f"{'0' * 63}g  file", "\0"])
def test_a_manifest_that_is_none_is_refused_by_its_line(line):
    with pytest.raises(ModelsError, match="line 2 of M is not one that"):
        wanted.read_manifest(f"{'0' * 64}  good\n{line}\n", "M")


def test_manifests_are_read_in_both_of_sha256sums_forms():
    digest = "a" * 64
    text = f"{digest}  text file\n{digest} *binary\n\n{digest}  ./below/it\n"
    assert wanted.read_manifest(text, "M") == dict.fromkeys(
        ("text file", "binary", "below/it"), digest
    )
    assert wanted.read_manifest(wanted.write_manifest({"a b": digest}), "M") == {"a b": digest}
