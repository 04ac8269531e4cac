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


OPERANDS = """
import numpy as np, sys, torch, triton, triton.language as tl

if sys.argv[1] == "quick":
    from ddtree_vllm.cpu.interpreter import quicken
    quicken()

@triton.jit
def combine(ints, longs, floats, bytes_, out, n, scale, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    i = tl.load(ints + at, mask=at < n, other=-7)
    l = tl.load(longs + at)
    f = tl.load(floats + at)
    b = tl.load(bytes_ + at)
    first = tl.load(ints)
    row = i[:, None] * f[None, :] + l[None, :]
    tl.store(out + at, i + l)
    tl.store(out + SIZE + at, i * 3 - 2147483647)
    tl.store(out + 2 * SIZE + at, f * 2 + 0.1)
    tl.store(out + 3 * SIZE + at, (f > 0.5) & (i >= first))
    tl.store(out + 4 * SIZE + at, tl.where(b > 3, l, i))
    tl.store(out + 5 * SIZE + at, l // 3 + i % 5 + (b << 1))
    tl.store(out + 6 * SIZE + at, tl.sum(row, 1))
    tl.store(out + 7 * SIZE + at, tl.cumsum(tl.maximum(f, 0), 0) / scale)
    tl.store(out + first + 8 * SIZE + at, tl.exp(f).to(tl.float16) * i)
    tl.store(out + 9 * SIZE + at + 1, first * scale - f)

g = torch.Generator().manual_seed(3)
ints = torch.randint(0, 9, (16,), generator=g, dtype=torch.int32)
ints[0] = 1
longs = torch.randint(-2**40, 2**40, (16,), generator=g)
floats = torch.randn(16, generator=g)
small = torch.randint(0, 8, (16,), generator=g, dtype=torch.uint8)
out = torch.zeros(200, dtype=torch.float64)
combine[(1,)](ints, longs, floats, small, out, 11, 0.3, SIZE=16)
print(out.view(torch.int64).tolist())
"""


def test_a_quick_interpreter_computes_the_same(tmp_path):
    """Every kind of operand pair: widths, pointers, plain numbers, blocks beside scalars."""
    (tmp_path / "kernel.py").write_text(OPERANDS)
    code = f"import runpy, sys; runpy.run_path({str(tmp_path / 'kernel.py')!r})"
    plain, quick = (
        python(f"import sys; sys.argv = ['', {how!r}]; {code}", TRITON_INTERPRET="1")
        for how in ("plain", "quick")
    )
    assert len(set(plain.split(", "))) > 100
    assert plain == quick
