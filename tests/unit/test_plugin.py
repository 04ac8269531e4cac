# SPDX-License-Identifier: Apache-2.0
"""Loading refuses, with a sentence, everything that the plugin could only serve wrongly."""

from __future__ import annotations

import copy
import importlib.metadata
from types import SimpleNamespace

import pytest

from ddtree_vllm import plugin


@pytest.mark.parametrize("version", ["0.31.9", "0.32.1", "0.33.0"])
def test_another_vllm_version_is_refused_and_the_right_one_named(version, monkeypatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(RuntimeError, match=rf"vLLM 0\.32\.0.*{version} is installed") as refusal:
        plugin.register()
    assert "vllm==0.32.0" in str(refusal.value)


def test_registering_twice_changes_nothing() -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    plugin.register()
    first = dict(ModelRegistry.models)
    plugin.register()
    assert ModelRegistry.models == first
    assert ModelRegistry.models["Qwen3_5ForCausalLM"].module_name == "ddtree_vllm.engine.models"


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory):
    """A real configuration of a real pair, made as vLLM makes it."""
    import os

    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    from vllm.engine.arg_utils import EngineArgs

    from tests.engine.tiny_pair import write_tiny_pair

    target, drafter = write_tiny_pair(tmp_path_factory.mktemp("pair"))
    return EngineArgs(
        model=str(target),
        skip_tokenizer_init=True,
        max_model_len=256,
        dtype="float32",
        speculative_config={
            "method": "dflash",
            "model": str(drafter),
            "num_speculative_tokens": 15,
        },
        additional_config={"ddtree": {"budget": 15}},
    ).create_engine_config()


def test_a_supported_configuration_is_accepted(vllm_config) -> None:
    from ddtree_vllm.engine.requirements import check_supported

    check_supported(vllm_config)


@pytest.mark.parametrize(
    ("part", "field", "value", "named"),
    [
        ("speculative_config", "method", "eagle3", "speculative method 'eagle3'"),
        ("speculative_config", "rejection_sample_method", "block", "rejection_sample_method"),
        ("speculative_config", "draft_sample_method", "probabilistic", "draft_sample_method"),
        ("speculative_config", "num_speculative_tokens", 31, "differs from the budget 15"),
        ("speculative_config", "num_speculative_tokens", 128, "it must be 1 to 127"),
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline parallelism"),
        ("parallel_config", "data_parallel_size", 2, "data parallelism"),
        ("parallel_config", "decode_context_parallel_size", 2, "context parallelism"),
        ("parallel_config", "enable_dbo", True, "dual batch overlap"),
        ("cache_config", "cache_dtype", "fp8", "KV cache dtype 'fp8'"),
        ("cache_config", "mamba_cache_mode", "all", "mamba cache mode 'all'"),
        ("model_config", "logits_processors", ["some.Processor"], "custom logits processors"),
        ("model_config", "enable_sleep_mode", True, "sleep mode"),
        ("model_config", "quantization", "awq", "quantization 'awq'"),
    ],
)
def test_what_trees_cannot_serve_is_refused_by_name(part, field, value, named, vllm_config) -> None:
    from ddtree_vllm.engine.requirements import UnsupportedConfigurationError, check_supported

    changed = copy.copy(vllm_config)
    section = copy.copy(getattr(vllm_config, part))
    object.__setattr__(section, field, value)
    object.__setattr__(changed, part, section)
    with pytest.raises(UnsupportedConfigurationError) as refusal:
        check_supported(changed)
    assert named in str(refusal.value)


@pytest.mark.parametrize("backend", [None, "FLASH_ATTN"])
def test_attention_that_knows_no_tree_is_refused_on_a_stand_in_gpu(
    backend, vllm_config, monkeypatch
) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from ddtree_vllm.engine import requirements

    gpu = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: False)
    monkeypatch.setattr(requirements, "current_platform", gpu)
    changed = copy.copy(vllm_config)
    changed.attention_config = copy.copy(vllm_config.attention_config)
    changed.attention_config.backend = backend and AttentionBackendEnum[backend]
    with pytest.raises(requirements.UnsupportedConfigurationError) as refusal:
        requirements.check_supported(changed)
    assert f"attention backend {backend or 'auto'}" in str(refusal.value)
    changed.attention_config.backend = AttentionBackendEnum.CUSTOM
    requirements.check_supported(changed)


def test_logits_processors_that_vllm_would_load_by_itself_are_refused(
    vllm_config, monkeypatch
) -> None:
    from ddtree_vllm.engine import requirements

    def installed(group: str) -> list:
        return [SimpleNamespace(name="bias_words")] if group == "vllm.logits_processors" else []

    monkeypatch.setattr(requirements, "entry_points", installed)
    with pytest.raises(requirements.UnsupportedConfigurationError, match="bias_words"):
        requirements.check_supported(vllm_config)


def test_runner_v1_is_refused(vllm_config, monkeypatch) -> None:
    from vllm import envs

    from ddtree_vllm.engine.requirements import UnsupportedConfigurationError, check_supported

    monkeypatch.setattr(envs, "VLLM_USE_V2_MODEL_RUNNER", False, raising=False)
    with pytest.raises(UnsupportedConfigurationError, match="VLLM_USE_V2_MODEL_RUNNER=1"):
        check_supported(vllm_config)


def test_without_a_gpu_the_queues_fit_into_a_containers_shared_memory():
    """Two queues of ten chunks, in Docker's 64 MB of /dev/shm, and large messages still get through."""
    from vllm.v1.executor import multiproc_executor

    from ddtree_vllm.cpu.message_queue import fit_message_queues

    before = multiproc_executor.MessageQueue
    try:
        fit_message_queues()
        fit_message_queues()
        queue_class = multiproc_executor.MessageQueue
        small = queue_class(1, 1)
        assert small.buffer.total_bytes_of_buffer < 22 << 20
        assert queue_class(1, 1, max_chunk_bytes=1 << 20).buffer.max_chunk_bytes == 1 << 20
        assert queue_class(1, 1, max_chunk_bytes=1 << 30).buffer.max_chunk_bytes == 2 << 20
        reader = queue_class.create_from_handle(small.export_handle(), 0)
        # Large messages go by publish and subscribe, which loses what is sent before the subscription.
        small.wait_until_ready()
        reader.wait_until_ready()
        message = b"x" * (5 << 20)
        small.enqueue(message, timeout=10)
        assert reader.dequeue(timeout=10) == message
    finally:
        multiproc_executor.MessageQueue = before
