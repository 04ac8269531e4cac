# SPDX-License-Identifier: Apache-2.0
"""What lets Model Runner V2 and its Triton kernels run on a machine without a GPU.

Installed into an environment by the second distribution, `ddtree-vllm-cpu` (packaging/cpu), and so
absent on a GPU machine:

- `triton_backend`: an idle Triton backend named "cpu", found through `triton.backends`. The kernels
  themselves run through Triton's interpreter (`TRITON_INTERPRET=1`), which compiles nothing.
- `hooks`: two import hooks, started by a `.pth` file in every process of the environment.
"""
