# SPDX-License-Identifier: Apache-2.0
"""``ddtree::gated_delta_net``, the operator by which a compiled model calls a Gated DeltaNet layer's core.

vLLM's own is declared to write one of the gates, wants both contiguous and its output zeroed: in a
compiled model that is one more kernel a layer, 2.4 us of it on an H200 at 256 rows. This one reads
views of the projections and writes its output alone.
"""

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import CompilationConfig
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name, direct_register_custom_op

_NAMESPACE, _NAME = "ddtree", "gated_delta_net"
_VLLMS = "vllm::qwen_gdn_attention_core"
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")


def split_graphs_at_operator(compilation_config: CompilationConfig) -> None:
    """Have piecewise graphs break at the operator wherever they would at vLLM's own.

    Before the model is compiled. A list of the user's is extended too: without the operator in it, a
    graph would be captured that runs one step's trees for ever.
    """
    operators = compilation_config.splitting_ops
    name = f"{_NAMESPACE}::{_NAME}"
    if operators and _VLLMS in operators and name not in operators:
        operators.append(name)


# No postponed annotations in this module: the operator's schema is made from them.
@eager_break_during_capture
def _gated_delta_net(
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    out: torch.Tensor,
    layer_name: LayerNameType,
) -> None:
    layer = get_forward_context().no_compile_layers[_resolve_layer_name(layer_name)]
    layer.run_core(mixed_qkv, b, a, out)


direct_register_custom_op(
    op_name=_NAME,
    op_func=_gated_delta_net,
    mutates_args=["out"],
    target_lib=_library,
)
gated_delta_net = torch.ops.ddtree.gated_delta_net
