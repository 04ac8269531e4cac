# SPDX-License-Identifier: Apache-2.0
"""What ddtree-vllm-cpu adds to an environment without a GPU, looked at from fresh processes."""

import os
import subprocess
import sys

import pytest

from ddtree_vllm import environment

pytestmark = pytest.mark.skipif(
    [v.distribution for v in environment.installed_vllm()] != ["vllm-cpu"],
    reason="for environments with vllm-cpu",
)


def python(code, **variables):
    """Output of a fresh interpreter, where only the .pth file can have installed the hooks."""
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_vllms_metadata_is_vllm_cpus_and_says_cpu():
    code = (
        "from importlib.metadata import metadata, version\n"
        "print(version('vllm'), metadata('vllm')['Name'], version('vllm-cpu'))"
    )
    assert python(code) == "0.32.0+cpu vllm 0.32.0"


def test_the_alias_is_no_second_distribution():
    code = (
        "from importlib.metadata import distributions\n"
        "names = [d.metadata['Name'] for d in distributions()]\n"
        "print(names.count('vllm'), names.count('vllm-cpu'))"
    )
    assert python(code) == "0 1"


def test_a_real_vllm_distribution_answers_for_itself(tmp_path):
    info = tmp_path / "vllm-9.9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.9.9\n")
    code = "from importlib.metadata import version; print(version('vllm'))"
    assert python(code, PYTHONPATH=str(tmp_path)) == "9.9.9"


def test_torchvision_imports_beside_torchs_cpu_build_and_its_operators_still_raise():
    code = (
        "import torch, torchvision\n"
        "try:\n"
        "    torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)\n"
        "except (RuntimeError, NotImplementedError) as error:\n"
        "    print('raises')\n"
    )
    assert python(code) == "raises"


def test_transformers_and_the_targets_module_import():
    code = "import transformers.audio_utils, torchvision; print('imports')"
    assert python(code) == "imports"


def test_triton_has_one_active_backend_and_it_is_the_cpu():
    code = (
        "import triton\n"
        "from triton.backends import backends\n"
        "print([n for n, b in backends.items() if b.driver.is_active()])\n"
        "print(triton.runtime.driver.active.get_current_target().backend)\n"
        "print(triton.runtime.driver.active.get_active_torch_device())"
    )
    assert python(code, TRITON_INTERPRET="1").split("\n") == ["['cpu']", "cpu", "cpu"]


def test_a_kernel_without_the_interpreter_says_what_to_set(tmp_path):
    module = tmp_path / "kernel.py"
    module.write_text(
        "import torch, triton, triton.language as tl\n"
        "@triton.jit\n"
        "def store(x):\n"
        "    tl.store(x, 1)\n"
        "x = torch.zeros(1)\n"
        "try:\n"
        "    store[(1,)](x)\n"
        "except Exception as error:\n"
        "    print(error)\n"
        "else:\n"
        "    print('ran', x.item())\n"
    )
    code = f"import runpy; runpy.run_path({str(module)!r})"
    assert "set TRITON_INTERPRET=1" in python(code)
    assert python(code, TRITON_INTERPRET="1") == "ran 1.0"
