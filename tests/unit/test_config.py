# SPDX-License-Identifier: Apache-2.0
"""DDTreeConfig, and the vLLM options it turns into."""

import json
from types import SimpleNamespace

import pytest

from ddtree_vllm.config import DDTreeConfig, uses_trees, vllm_options

STATIC = [[0], [0, 0], [1]]


def option(options: list[str], name: str) -> str:
    assert options.count(name) == 1, options
    return options[options.index(name) + 1]


# ---- the configuration


def test_budget_alone_gives_the_documented_defaults():
    config = DDTreeConfig.create(budget=31)
    assert (config.policy, config.static_tree, config.top_k) == ("ddtree", None, 8)


@pytest.mark.parametrize("budget", [1, 127])
def test_both_ends_of_the_budget_range_are_allowed(budget):
    assert DDTreeConfig.create(budget=budget).budget == budget


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"budget": 0}, "budget must be between 1 and 127 nodes, not 0"),
        ({"budget": 128}, "budget must be between 1 and 127 nodes, not 128"),
        ({"budget": -1}, "budget must be between 1 and 127 nodes, not -1"),
        ({"budget": "31"}, "budget must be a valid integer, not '31'"),
        ({"budget": True}, "budget must be a valid integer, not True"),
        ({}, "the ddtree configuration lacks 'budget'"),
        ({"budget": 3, "top_k": 0}, "top_k must be between 1 and 127 candidates, not 0"),
        ({"budget": 3, "policy": "best"}, "policy must be 'ddtree', 'chain' or 'static', not 'b"),
        ({"budget": 3, "nodes": 3}, "unknown ddtree setting 'nodes'"),
        ({"budget": 3, "policy": "static"}, "policy 'static' needs a static tree"),
        ({"budget": 3, "static_tree": STATIC}, "it belongs to 'static'"),
        ({"budget": 2, "policy": "static", "static_tree": STATIC}, "3 nodes, more than the bud"),
        (
            {"budget": 3, "policy": "static", "static_tree": [[0], [5]], "top_k": 5},
            "uses rank 5, but top_k 5 leaves ranks 0 to 4",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_one_sentence(values, sentence):
    with pytest.raises(ValueError) as refusal:
        DDTreeConfig.create(**values)
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("static_tree", "sentence"),
    [
        ([], "no nodes"),
        ([[]], "not a node"),
        ([[0], [0]], "twice"),
        ([[0, 1]], "the parent of node [0, 1] is missing"),
        ([[-1]], "not a node"),
        ([["0"]], "not a node"),
        ([[True]], "not a node"),
        ("[[0]]", "must be a list"),
        ({"0": 1}, "not a node"),
    ],
)
def test_a_malformed_static_tree_is_refused_with_one_sentence(static_tree, sentence):
    with pytest.raises(ValueError) as refusal:
        DDTreeConfig.create(budget=8, policy="static", static_tree=static_tree)
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_static_tree_is_stored_parents_first_and_sets_top_k():
    config = DDTreeConfig.create(budget=8, policy="static", static_tree=[[0, 2], [0], [1]])
    assert config.static_tree == [[0], [0, 2], [1]]
    assert config.top_k == 3


# ---- through vLLM's additional_config


@pytest.mark.parametrize(
    "values",
    [
        {"budget": 31},
        {"budget": 15, "policy": "chain"},
        {"budget": 63, "top_k": 4},
        {"budget": 3, "policy": "static", "static_tree": STATIC},
    ],
)
def test_the_configuration_survives_the_command_line(values):
    config = DDTreeConfig.create(**values)
    through_json = json.loads(json.dumps(config.to_additional_config()))
    assert DDTreeConfig.from_additional_config(through_json) == config


@pytest.mark.parametrize("additional", [None, {}, {"ddtree": 31}, {"other": {}}])
def test_a_missing_entry_is_refused_and_says_what_to_add(additional):
    with pytest.raises(ValueError, match="--additional-config"):
        DDTreeConfig.from_additional_config(additional)


@pytest.mark.parametrize(
    ("speculative", "additional", "expected"),
    [
        (object(), {"ddtree": {"budget": 3}}, True),
        (None, {"ddtree": {"budget": 3}}, False),
        (object(), {}, False),
        (object(), {"ddtree_other": 1}, False),
    ],
)
def test_trees_are_used_when_speculating_with_our_entry(speculative, additional, expected):
    config = SimpleNamespace(speculative_config=speculative, additional_config=additional)
    assert uses_trees(config) is expected


# ---- vLLM's options


def test_gpu_options_name_worker_backend_drafter_and_budget():
    options = vllm_options("DRAFTER", DDTreeConfig.create(budget=31), "cuda", ["--port", "1"])
    assert option(options, "--worker-cls") == "ddtree_vllm.engine.worker.DDTreeWorker"
    assert option(options, "--attention-backend") == "CUSTOM"
    assert json.loads(option(options, "--speculative-config")) == {
        "method": "dflash",
        "model": "DRAFTER",
        "num_speculative_tokens": 31,
    }
    assert json.loads(option(options, "--additional-config")) == {"ddtree": {"budget": 31}}
    assert "--enforce-eager" not in options
    assert options[-2:] == ["--port", "1"]


def test_cpu_options_are_eager_and_leave_the_attention_backend_alone():
    options = vllm_options("DRAFTER", DDTreeConfig.create(budget=31), "cpu", ["--enforce-eager"])
    assert option(options, "--worker-cls") == "ddtree_vllm.engine.worker.DDTreeCPUWorker"
    assert options.count("--enforce-eager") == 1
    assert "--attention-backend" not in options


def test_without_speculation_the_worker_stays_and_nothing_is_drafted():
    options = vllm_options(None, None, "cpu", [])
    assert option(options, "--worker-cls") == "ddtree_vllm.engine.worker.DDTreeCPUWorker"
    assert "--speculative-config" not in options
    assert "--additional-config" not in options


@pytest.mark.parametrize(
    "given",
    [
        ["--additional-config", '{"gdn_prefill_backend": "triton"}'],
        ['--additional-config={"gdn_prefill_backend": "triton"}'],
        ['--additional_config={"gdn_prefill_backend": "triton"}'],
        ["--additional-config.gdn_prefill_backend", "triton"],
        ["--additional_config.gdn_prefill_backend=triton"],
    ],
)
def test_additional_config_of_the_users_is_merged_in_any_form(given):
    options = vllm_options("D", DDTreeConfig.create(budget=7), "cuda", given)
    assert json.loads(option(options, "--additional-config")) == {
        "gdn_prefill_backend": "triton",
        "ddtree": {"budget": 7},
    }
    assert not [o for o in options if o.startswith("--additional") and o != "--additional-config"]


def test_nested_dotted_options_keep_their_nesting():
    given = ["--additional-config.ddtree.top_k", "4"]
    options = vllm_options("D", DDTreeConfig.create(budget=7), "cuda", given)
    assert json.loads(option(options, "--additional-config")) == {
        "ddtree": {"budget": 7, "top_k": 4}
    }


def test_speculative_settings_of_the_users_are_merged():
    given = ["-sc", '{"num_speculative_tokens": 7, "draft_tensor_parallel_size": 1}']
    options = vllm_options("D", DDTreeConfig.create(budget=7), "cuda", given)
    assert json.loads(option(options, "--speculative-config")) == {
        "method": "dflash",
        "model": "D",
        "num_speculative_tokens": 7,
        "draft_tensor_parallel_size": 1,
    }


def test_vllms_short_speculative_options_are_folded_in():
    given = ["--spec-method", "dflash", "--spec-model=D", "--spec-tokens", "7"]
    options = vllm_options("D", DDTreeConfig.create(budget=7), "cuda", given)
    assert not [o for o in options if o.startswith("--spec-")]
    assert json.loads(option(options, "--speculative-config"))["num_speculative_tokens"] == 7


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_giving_our_own_options_again_changes_nothing(device):
    config = DDTreeConfig.create(budget=7, policy="chain")
    options = vllm_options("D", config, device, ["--seed", "1"])
    assert vllm_options("D", config, device, options) == options


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--worker-cls", "my.Worker"], "--worker-cls my.Worker contradicts"),
        (["--attention-backend=FLASH_ATTN"], "--attention-backend FLASH_ATTN contradicts"),
        (["--speculative-config", '{"method": "eagle"}'], 'method is "eagle" there'),
        (["--spec-tokens", "8"], "num_speculative_tokens is 8 there, but 7 follows"),
        (["--speculative-config.num_speculative_tokens", "8"], "num_speculative_tokens is 8"),
        (["--spec-model", "other"], 'model is "other" there'),
        (["--additional-config", '{"ddtree": {"budget": 8}}'], "budget is 8 there, but 7"),
        (["--additional-config", '{"ddtree": {"nodes": 8}}'], "unknown ddtree setting 'nodes'"),
        (["--additional-config", '{"ddtree": 7}'], "must be a JSON object"),
        (["--additional-config", "[1]"], "--additional-config must be a JSON object"),
        (["--additional-config", "{budget: 7}"], "--additional-config is not valid JSON"),
        (["--additional-config.list+", "1"], "write this list as JSON in --additional-config"),
        (["--worker-cls"], "--worker-cls needs a value"),
    ],
)
def test_a_contradicting_option_is_refused_with_one_sentence(given, sentence):
    with pytest.raises(ValueError) as refusal:
        vllm_options("D", DDTreeConfig.create(budget=7), "cuda", given)
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_graphs_are_refused_on_the_cpu():
    with pytest.raises(ValueError, match="eager"):
        vllm_options("D", DDTreeConfig.create(budget=7), "cpu", ["--no-enforce-eager"])


@pytest.mark.parametrize(
    "given",
    [
        ["--speculative-config", '{"method": "ngram"}'],
        ["--spec-tokens", "3"],
        ["--additional-config", '{"ddtree": {"budget": 3}}'],
    ],
)
def test_drafting_options_are_refused_without_speculation(given):
    with pytest.raises(ValueError):
        vllm_options(None, None, "cpu", given)
