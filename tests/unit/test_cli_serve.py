# SPDX-License-Identifier: Apache-2.0
"""`ddtree-vllm serve`: what it hands to vLLM, and how it refuses bad input."""

import json
import subprocess
import sys

import pytest

from ddtree_vllm import __version__, cli

TARGET = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "hidden_size": 8,
    "vocab_size": 32,
}
DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 8,
    "vocab_size": 32,
    "num_target_layers": 4,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2]},
}


def write_safetensors(path, **shapes):
    """A float32 safetensors file of zeros: 8 bytes of length, a JSON header, the data."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 4
        for n in shape:
            size *= n
        header[name.replace("__", ".")] = {
            "dtype": "F32",
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(offset))


def write_checkpoint(folder, config, **shapes):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    write_safetensors(folder / "model.safetensors", **shapes)
    return folder


@pytest.fixture
def target(tmp_path):
    return write_checkpoint(tmp_path / "target", TARGET, lm_head__weight=(32, 8))


@pytest.fixture
def drafter(tmp_path):
    return write_checkpoint(tmp_path / "drafter", DRAFTER, fc__weight=(8, 16))


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    """Whatever device the machine has, these tests are about the CPU's options."""
    for name in ("VLLM_USE_V2_MODEL_RUNNER", "VLLM_PLUGINS", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(cli, "_device", lambda: "cpu")


@pytest.fixture
def started(monkeypatch):
    """The arguments vLLM would have been started with."""
    calls = []

    def record(arguments, debug):
        calls.append(arguments)
        return 0

    monkeypatch.setattr(cli, "_run_vllm", record)
    return calls


def refusal(capsys, *arguments) -> str:
    """The sentence `ddtree-vllm serve` ends with; fails unless it is one, with exit code 2."""
    assert cli.main(["serve", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ddtree-vllm: ")
    assert err.count("\n") == 1
    return err


# ---- what is started


def test_serve_hands_vllm_the_tree_options_and_the_users(target, drafter, started, capsys):
    code = cli.main(
        ["serve", f"{target}", "--drafter", f"{drafter}", "--budget", "31", "--port", "9"]
    )
    assert code == 0
    [[command, model, *options]] = started
    assert (command, model) == ("serve", str(target))
    speculative = json.loads(options[options.index("--speculative-config") + 1])
    assert speculative == {
        "method": "dflash",
        "model": str(drafter),
        "num_speculative_tokens": 31,
    }
    assert options[options.index("--port") + 1] == "9"
    printed = capsys.readouterr().out
    assert "trees of up to 31 nodes" in printed
    assert (
        f"vllm serve {target} --middleware ddtree_vllm.drain.DrainMiddleware --worker-cls"
        in printed
    )
    assert "TRITON_INTERPRET=1" in printed


def test_the_middleware_of_drains_is_added_once_beside_the_users(target, started):
    ours = "ddtree_vllm.drain.DrainMiddleware"
    for given, expected in (
        (["--middleware", "a.b"], [ours, "a.b"]),
        (["--middleware", ours], [ours]),
        ([f"--middleware={ours}"], []),
    ):
        cli.main(["serve", f"{target}", "--no-speculation", *given])
        options = started.pop()
        assert [options[i + 1] for i, o in enumerate(options) if o == "--middleware"] == expected


def test_the_printed_command_is_the_one_that_is_run(target, drafter, started, capsys):
    cli.main(["serve", f"{target}", "--drafter", f"{drafter}", "--budget=7", "--dtype", "float32"])
    import shlex

    line = capsys.readouterr().out.splitlines()[1]
    words = [word for word in shlex.split(line) if "=" not in word.split("{")[0] or "-" in word[:1]]
    assert words == ["vllm", *started[0]]


@pytest.mark.parametrize(
    "options",
    [
        ["--api-key", "s3cret-1", "s3cret-2", "--port", "9"],
        ["--api_key=s3cret-1", "--port", "9"],
        ["--api-k", "s3cret-1", "-123s3cret", "--port", "9"],
        ["--hf-token", "s3cret-1", "--port", "9"],
        ["--hf-token=s3cret-1", "--port", "9"],
        ["--watermark-config", '{"key": "s3cret-1"}', "--port", "9"],
        ["--watermark-config.key", "s3cret-1", "--port", "9"],
    ],
)
def test_the_printed_command_keeps_keys_and_tokens_to_itself(target, started, capsys, options):
    assert cli.main(["serve", str(target), "--no-speculation", *options]) == 0
    assert any("s3cret" in option for option in started[0])
    printed = capsys.readouterr().out
    assert "s3cret" not in printed
    assert "***" in printed
    assert "--port 9" in printed


def test_the_printed_command_hides_no_other_value(target, started, capsys):
    options = ["--watermark", "0.25", "--ssl-keyfile", "/key", "--headless"]
    assert cli.main(["serve", str(target), "--no-speculation", *options]) == 0
    assert " ".join(options) in capsys.readouterr().out


def test_no_speculation_needs_no_drafter(target, started):
    assert cli.main(["serve", str(target), "--no-speculation"]) == 0
    assert "--speculative-config" not in started[0]


def test_an_automatic_budget_follows_the_size_of_the_batch(target, drafter, started):
    cli.main(["serve", f"{target}", "--drafter", f"{drafter}", "--budget", "auto"])
    [options] = started
    speculative = json.loads(options[options.index("--speculative-config") + 1])
    assert speculative["num_speculative_tokens"] == 63
    assert speculative["num_speculative_tokens_per_batch_size"] == [
        [1, 1, 63],
        [2, 2, 31],
        [3, 3, 15],
    ]
    additional = json.loads(options[options.index("--additional-config") + 1])
    assert additional == {"ddtree": {"budget": 63}}


def test_on_a_stand_in_gpu_rows_are_reserved_for_64_requests_unless_given(
    target, drafter, started, monkeypatch
):
    monkeypatch.setattr(cli, "_device", lambda: "cuda")
    monkeypatch.delenv("TRITON_INTERPRET")
    model = ["serve", f"{target}", "--drafter", f"{drafter}", "--budget", "7"]
    for given, values in (
        ([], ["64"]),
        (["--max-num-seqs", "8"], ["8"]),
        (["--max_num_seqs=8"], []),
    ):
        assert cli.main([*model, *given]) == 0
        options = started.pop()
        found = [options[i + 1] for i, name in enumerate(options) if name == "--max-num-seqs"]
        assert found == values
    assert cli.main(["serve", f"{target}", "--no-speculation"]) == 0
    assert "--max-num-seqs" not in started.pop()


def test_a_static_tree_sets_the_budget(target, drafter, started, tmp_path):
    file = tmp_path / "tree.json"
    file.write_text("[[0], [0, 0], [1]]")
    for tree in ("[[0],[0,0],[1]]", f"@{file}"):
        arguments = ["--drafter", f"{drafter}", "--policy", "static", "--static-tree", tree]
        assert cli.main(["serve", str(target), *arguments]) == 0
        options = started.pop()
        entry = json.loads(options[options.index("--additional-config") + 1])["ddtree"]
        assert entry == {
            "budget": 3,
            "policy": "static",
            "static_tree": [[0], [0, 0], [1]],
        }


@pytest.mark.parametrize(
    ("option", "added"),
    [
        ((), True),
        (("--kv-cache-memory-bytes", "5"), False),
        (("--kv_cache_memory_bytes=5",), False),
        (("--gpu-memory-utilization", "0.5"), False),
    ],
)
def test_the_cpu_gets_a_small_kv_cache_unless_the_user_sizes_it(target, started, option, added):
    cli.main(["serve", str(target), "--no-speculation", *option])
    assert (
        "--kv-cache-memory-bytes" in started[0][-2:] and started[0][-1] == str(1 << 30)
    ) == added


def test_names_on_hugging_face_are_left_to_vllm(started, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    arguments = ["--drafter", "z-lab/Qwen3.6-27B-DFlash", "--budget", "31"]
    assert cli.main(["serve", "Qwen/Qwen3.6-27B", *arguments]) == 0
    assert started[0][1] == "Qwen/Qwen3.6-27B"


# ---- bad input


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--budget", "0"], "budget must be between 1 and 127 nodes, not 0"),
        (["--budget", "128"], "budget must be between 1 and 127 nodes, not 128"),
        (["--budget", "many"], "--budget must be a whole number or auto, not 'many'"),
        ([], "--budget is missing"),
        (["--budget", "auto", "--policy", "chain"], "--budget auto is for policy ddtree"),
        (["--budget", "7", "--policy", "best"], "policy must be 'ddtree', 'chain' or 'static'"),
        (["--budget", "7", "--top-k", "0"], "top_k must be between 1 and 127"),
        (["--budget", "7", "--policy", "static"], "needs a static tree"),
        (["--policy", "static", "--static-tree", "[[0"], "--static-tree is not valid JSON"),
        (["--policy", "static", "--static-tree", "[[0,1]]"], "parent of node [0, 1] is missing"),
        (["--policy", "static", "--static-tree", "[[0],[0]]"], "appears twice"),
        (["--policy", "static", "--static-tree", "[]"], "no nodes"),
        (["--policy", "static", "--static-tree", "@no-such-file"], "No such file"),
        (["--policy", "static", "--static-tree", "5"], "static tree: "),
        (["--policy", "static", "--static-tree", "null"], "needs a static tree"),
        (
            ["--policy", "static", "--static-tree", json.dumps([[i] for i in range(128)])],
            "128 nodes are more than the limit, 127",
        ),
        (["--policy", "static", "--static-tree", "[" * 100_000], "is not valid JSON"),
        (["--budget", "7", "--attention-backend", "FLASH_ATTN"], "needs CPU_ATTN"),
        (
            [
                "--budget",
                "7",
                "--additional-config.ddtree",
                "5",
                "--additional-config.ddtree.top_k",
                "4",
            ],
            "ddtree is given a value of its own as well",
        ),
        (["--budget"], "expected one argument"),
        (["--static-tree", "[[0]]"], "it belongs to 'static'"),
        (["--budget", "7", "--spec-tokens", "8"], "num_speculative_tokens is 8 there, but 7"),
        (["--budget", "7", "--no-speculation"], "leave out --drafter, --budget"),
    ],
)
def test_wrong_options_are_refused(target, drafter, started, capsys, options, sentence):
    assert sentence in refusal(capsys, target, "--drafter", drafter, *options)
    assert started == []


def test_a_static_tree_deeper_than_the_drafters_block_is_refused(target, drafter, capsys):
    chain = json.dumps([[0] * depth for depth in range(1, 17)])
    sentence = refusal(
        capsys, target, "--drafter", drafter, "--policy", "static", "--static-tree", chain
    )
    assert "is at depth 16" in sentence
    assert "drafts 15 positions" in sentence


def test_a_static_tree_file_that_is_no_text_is_refused(target, drafter, capsys, tmp_path):
    file = tmp_path / "tree.json"
    file.write_bytes(b"\xff\xfe")
    options = ["--policy", "static", "--static-tree", f"@{file}"]
    assert "--static-tree: 'utf-8' codec" in refusal(capsys, target, "--drafter", drafter, *options)


def test_own_options_may_have_underscores_as_vllms_do(target, drafter, started):
    shape = ["--static_tree", "[[0]]", "--top_k=3"]
    arguments = ["--drafter", f"{drafter}", "--policy", "static", *shape]
    assert cli.main(["serve", str(target), *arguments]) == 0
    assert cli.main(["serve", str(target), "--no_speculation"]) == 0
    options = started[0]
    entry = json.loads(options[options.index("--additional-config") + 1])["ddtree"]
    assert (entry["static_tree"], entry["top_k"]) == ([[0]], 3)


def test_the_model_comes_first(capsys):
    assert "MODEL comes first, before --port" in refusal(capsys, "--port", 8000, "MODEL")


def test_a_missing_drafter_option_is_refused(target, capsys):
    assert "--drafter is missing" in refusal(capsys, target, "--budget", 31)


def test_paths_that_do_not_exist_are_refused(target, drafter, tmp_path, capsys):
    gone = tmp_path / "gone"
    assert f"the target {gone} does not exist" in refusal(
        capsys, gone, "--drafter", drafter, "--budget", 31
    )
    assert f"the drafter {gone} does not exist" in refusal(
        capsys, target, "--drafter", gone, "--budget", 31
    )


def test_a_name_on_hugging_face_that_is_not_cached_is_refused_offline(drafter, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    sentence = refusal(capsys, "nobody/nothing-at-all", "--drafter", drafter, "--budget", 31)
    assert "the target nobody/nothing-at-all does not exist" in sentence


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda f: (f / "model.safetensors").unlink(), "weights are missing"),
        (lambda f: (f / "model.safetensors").write_text("version https://git-lfs"), "pointer"),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "not a safetensors file"),
        (
            lambda f: (f / "model.safetensors").write_bytes(
                (f / "model.safetensors").read_bytes()[:-1]
            ),
            "is cut short",
        ),
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "cannot be read"),
        (lambda f: (f / "config.json").write_text("[]"), "is not a JSON object"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {"a": "model-00002.safetensors"}})
            ),
            "weights are incomplete",
        ),
    ],
)
@pytest.mark.parametrize("role", ["target", "drafter"])
def test_a_damaged_checkpoint_is_refused(target, drafter, capsys, role, damage, sentence):
    damage({"target": target, "drafter": drafter}[role])
    told = refusal(capsys, target, "--drafter", drafter, "--budget", 31)
    assert sentence in told
    assert f"the {role}" in told


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "is no DFlash drafter"),
        ({"architectures": None}, "is no DFlash drafter"),
        ({"hidden_size": 16}, "expects a hidden size of 16, and the target's is 8"),
        ({"vocab_size": 64}, "expects a vocabulary size of 64, and the target's is 32"),
        ({"num_target_layers": 8}, "expects a number of layers of 8, and the target's is 4"),
        ({"block_size": None}, "block_size"),
        ({"dflash_config": {"mask_token_id": 3}}, "target_layer_ids is missing"),
        ({"dflash_config": {"target_layer_ids": [0, 2]}}, "mask_token_id"),
        (
            {"dflash_config": {"mask_token_id": 32, "target_layer_ids": [0, 2]}},
            "mask_token_id is 32",
        ),
        (
            {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 4]}},
            "reads the hidden state of layer 4, and the target has layers 0 to 3",
        ),
        (
            {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 1, 2]}},
            "fc.weight takes 16 inputs, but 3 hidden states of the target are 24",
        ),
    ],
)
def test_a_wrong_drafter_is_refused(target, drafter, capsys, change, sentence):
    (drafter / "config.json").write_text(json.dumps({**DRAFTER, **change}))
    assert sentence in refusal(capsys, target, "--drafter", drafter, "--budget", 31)


@pytest.mark.parametrize(
    ("kept", "missing"),
    [
        ({"fc__weight": (8, 16), "layers__0__norm__weight": (8,)}, "layers.1.*"),
        ({"layers__0__norm__weight": (8,), "layers__1__norm__weight": (8,)}, "fc.*"),
    ],
)
def test_a_drafter_that_lacks_tensors_is_refused(target, drafter, capsys, kept, missing):
    (drafter / "config.json").write_text(json.dumps({**DRAFTER, "num_hidden_layers": 2}))
    write_safetensors(drafter / "model.safetensors", **kept)
    sentence = refusal(capsys, target, "--drafter", drafter, "--budget", 31)
    assert f"the drafter's weights are incomplete: {drafter} has no {missing}; " in sentence


def test_a_multimodal_targets_language_model_is_what_counts(tmp_path, drafter, started):
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": TARGET}
    target = write_checkpoint(tmp_path / "multimodal", config, w=(1,))
    assert cli.main(["serve", f"{target}", "--drafter", f"{drafter}", "--budget", "7"]) == 0


def test_a_drafter_is_not_served_as_the_model(drafter, started, capsys):
    sentence = refusal(capsys, drafter, "--no-speculation")
    assert "is a DFlash drafter, which generates nothing alone" in sentence
    assert started == []


def test_a_target_without_a_tokenizer_is_refused_unless_another_is_named(target, started, capsys):
    (target / "tokenizer.json").unlink()
    assert "has no tokenizer (tokenizer.json)" in refusal(capsys, target, "--no-speculation")
    assert started == []
    for option in (["--tokenizer", "other"], ["--tokenizer=other"], ["--skip-tokenizer-init"]):
        assert cli.main(["serve", str(target), "--no-speculation", *option]) == 0


def test_an_empty_name_is_refused(target, capsys):
    assert "the target's name is empty" in refusal(capsys, "", "--no-speculation")
    assert "the drafter's name is empty" in refusal(capsys, target, "--drafter", "", "--budget", 7)


# ---- vLLM's own file of options


@pytest.fixture
def file(tmp_path):
    return tmp_path / "options.yaml"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("budget: 5\n", "sets budget, which belongs on the command line"),
        ("worker_cls: other.Worker\n", "sets worker_cls, which belongs on the command line"),
        ("speculative-config:\n  method: ngram\n", "sets speculative-config, which belongs"),
        ("additional-config.ddtree.budget: 5\n", "sets additional-config.ddtree.budget, which"),
        ("enforce-eager: false\n", "on the CPU the engine is always eager"),
        ("port: [\n", "cannot be read: while parsing"),
        ("", "must hold options by name"),
        ("- port\n", "must hold options by name"),
    ],
)
def test_a_file_of_options_is_refused_where_it_would_not_count(
    target, drafter, started, capsys, file, text, sentence
):
    file.write_text(text)
    told = refusal(capsys, target, "--drafter", drafter, "--budget", 7, "--config", file)
    assert f"--config: {file} " in told
    assert sentence in told
    assert started == []


def test_a_file_of_options_that_does_not_exist_is_refused(target, capsys, file):
    told = refusal(capsys, target, "--no-speculation", "--config", file)
    assert "No such file" in told


def test_a_file_of_options_after_an_equals_sign_is_refused_as_vllm_would_not_read_it(
    target, capsys, file
):
    told = refusal(capsys, target, "--no-speculation", f"--config={file}")
    assert told == f"ddtree-vllm: write --config {file}, with a space\n"


def test_a_file_of_options_is_left_to_vllm_and_may_size_the_kv_cache(target, started, file):
    file.write_text("max_model_len: 512\n")
    cli.main(["serve", str(target), "--no-speculation", "--config", str(file)])
    assert started[0][-4:] == ["--config", str(file), "--kv-cache-memory-bytes", str(1 << 30)]
    file.write_text("kv_cache_memory_bytes: 5000000\n")
    cli.main(["serve", str(target), "--no-speculation", "--config", str(file)])
    assert started[1][-2:] == ["--config", str(file)]


# ---- the environment


@pytest.mark.parametrize(
    ("name", "value"),
    [("VLLM_USE_V2_MODEL_RUNNER", "0"), ("VLLM_PLUGINS", "lora_filesystem_resolver")],
)
def test_a_contradicting_environment_is_refused(target, name, value):
    done = subprocess.run(
        [sys.executable, "-m", "ddtree_vllm.cli", "serve", str(target), "--no-speculation"],
        env={"PATH": "/usr/bin:/bin", name: value},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert f"{name}={value}" in done.stderr
    assert "Traceback" not in done.stderr


# ---- the command itself


def run(*arguments, timeout=240):
    return subprocess.run(
        [sys.executable, "-m", "ddtree_vllm.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_bad_input_ends_in_one_sentence_exit_code_2_and_no_traceback(target, drafter):
    done = run("serve", target, "--drafter", drafter, "--budget", 0)
    assert done.returncode == 2
    assert done.stderr == "ddtree-vllm: budget must be between 1 and 127 nodes, not 0\n"


def test_debug_shows_the_traceback(target, drafter):
    done = run("serve", target, "--drafter", drafter, "--budget", 0, "--debug")
    assert done.returncode != 0
    assert "Traceback" in done.stderr


def test_version_and_help():
    assert run("--version").stdout == f"ddtree-vllm {__version__}\n"
    assert "--drafter" in run("serve", "--help").stdout
    assert run().returncode == 2
    assert run("serve").returncode == 2
    assert run("no-such-command").returncode == 2


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        (
            "--gpu-memory-utilization=7",
            "gpu_memory_utilization should be less than or equal to 1, not 7.0",
        ),
        ("--no-such-option", "unrecognized arguments: --no-such-option; `vllm serve --help` "),
    ],
)
def test_what_vllm_refuses_is_told_in_one_sentence_too(target, option, sentence):
    done = run("serve", target, "--no-speculation", option)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert f"ddtree-vllm: {sentence}" in done.stderr
    assert "usage:" not in done.stderr
