# SPDX-License-Identifier: Apache-2.0
"""The role nvidia_host's look at CUDA, with stand-ins for the driver's library."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "roles/nvidia_host/files/cuda_init.py"
# As in uninterruptible sleep: SIGKILL is sent, and nothing comes of it.
UNKILLABLE = "import os; os.kill = lambda *_: None; exec(open(FILE).read())"


@pytest.fixture
def initialise(tmp_path):
    """initialise(body of cuInit, seconds) -> what the program says."""

    def run(body, limit_s=30):
        compiler = shutil.which("cc") or shutil.which("tcc")
        assert compiler, "the stand-in of libcuda needs a C compiler: apt-get install tcc"
        source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so.1"
        source.write_text(
            "unsigned sleep(unsigned); void abort(void);\n"
            f"int cuInit(unsigned flags) {{ {body} }}\n"
        )
        build = [compiler, "-shared", "-fPIC", source, "-o", library]
        subprocess.run(build, check=True, timeout=60)
        done = subprocess.run(
            [sys.executable, "-c", UNKILLABLE.replace("FILE", repr(str(PROGRAM))), str(limit_s)],
            env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)

    return run


@pytest.mark.parametrize(
    ("code", "words"), [(0, "CUDA is ready"), (802, "the fabric manager has not finished")]
)
def test_the_answer_of_cuda_is_told_with_what_it_means(initialise, code, words):
    said = initialise(f"return {code};")
    assert said["result"] == code
    assert words in said["sentence"]


def test_an_initialisation_that_hangs_and_cannot_be_killed_is_given_up_on(initialise):
    """The child sleeps longer than the program may take: neither its end nor its output is awaited."""
    said = initialise("sleep(60); return 0;", limit_s=1)
    assert said["result"] is None
    assert said["sentence"].startswith("cuInit did not end within 1 s: the driver hangs")


def test_a_driver_that_ends_the_process_is_told(initialise):
    said = initialise("abort(); return 0;")
    assert said["result"] is None
    assert "the process that initialises CUDA died" in said["sentence"]
