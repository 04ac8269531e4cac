# SPDX-License-Identifier: Apache-2.0
"""Advancing the committed Gated DeltaNet state along the path that the walk accepted.

One launch for all layers. The recurrent state moves by a rank-m update from the stash,

    S' = exp(G_last) S + sum over j on the path of exp(G_last - G_j) k_j u_j^T,

and the convolution window to its last W - 1 raw inputs. A request with an empty path is left as it
is, bit for bit. The state is read once and written once, which is what a commit costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ddtree_vllm.gdn.launch import commit_tiles, default_precision, native_bf16
from ddtree_vllm.gdn.stash import Stash


@dataclass(frozen=True)
class StateTable:
    """Where each layer's caches are, so that one launch reaches all of them.

    The caches are separate tensors with equal shapes, types and strides. They must stay where they
    are for the life of the table, which keeps them alive.

    Attributes (L layers):
        ssm: the layers' recurrent states, each [slots, Hv, V, K].
        conv: the layers' convolution windows, each [slots, >= W - 1, C].
        ssm_address, conv_address: int64 [L], byte addresses.
        group: int32 [L], KV-cache group of each layer: the row of the slot tensors it uses.
        num_groups: number of groups.
    """

    ssm: tuple[torch.Tensor, ...]
    conv: tuple[torch.Tensor, ...]
    ssm_address: torch.Tensor
    conv_address: torch.Tensor
    group: torch.Tensor
    num_groups: int

    @classmethod
    def build(
        cls,
        caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
        groups: Sequence[int] | None = None,
    ) -> StateTable:
        """Builds the table.

        Args:
            caches: (conv, ssm) of each layer, in the order of the stash's layers.
            groups: KV-cache group of each layer; None: one group.

        Raises:
            ValueError: no layers, or layers that are not laid out alike.
        """
        if not caches:
            raise ValueError("a state table needs at least one layer")
        conv = tuple(layer[0] for layer in caches)
        ssm = tuple(layer[1] for layer in caches)
        for kind, tensors in (("conv", conv), ("ssm", ssm)):
            layouts = {(t.shape[1:], t.stride(), t.dtype, t.device) for t in tensors}
            if len(layouts) > 1:
                raise ValueError(f"the layers' {kind} states are not laid out alike: {layouts}")
            # The kernels read 16 bytes at a time.
            strides = tensors[0].stride()[:-1]
            if any(t.data_ptr() % 16 for t in tensors) or tensors[0].stride(-1) != 1:
                raise ValueError(f"{kind} states must be contiguous and aligned to 16 bytes")
            if any(s * tensors[0].itemsize % 16 for s in strides):
                raise ValueError(f"{kind} state strides {strides} are not multiples of 16 bytes")
        if not ssm[0][:1].is_contiguous():
            raise ValueError(f"a slot of recurrent state must be contiguous: {ssm[0].stride()}")
        if groups is None:
            groups = [0] * len(caches)
        device = ssm[0].device
        return cls(
            ssm=ssm,
            conv=conv,
            ssm_address=_addresses(ssm, device),
            conv_address=_addresses(conv, device),
            group=torch.tensor(list(groups), dtype=torch.int32, device=device),
            num_groups=max(groups) + 1,
        )

    @property
    def num_layers(self) -> int:
        return len(self.ssm)


def _addresses(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=device)


def commit_paths(
    table: StateTable,
    stash: Stash,
    path: torch.Tensor,
    path_len: torch.Tensor,
    stash_start: torch.Tensor,
    src_slots: torch.Tensor,
    max_path: int,
    conv_width: int,
    dst_slots: torch.Tensor | None = None,
    cut_len: torch.Tensor | None = None,
    cut_slots: torch.Tensor | None = None,
    null_slot: int = -1,
    precision: str | None = None,
) -> None:
    """Commits the accepted path of every request in every layer.

    A request with `path_len` 0, or whose source slot is not above `null_slot`, writes nothing.
    Every source is read before anything of that request is written, so slots of one request may
    coincide; slots of different requests must not. `cut_slots` may equal the destination only
    where the cut is the whole path.

    Args:
        table: the layers' caches.
        stash: what this step's verification left.
        path: int32 [R, >= max_path], local rows of the path, root first.
        path_len: int32 [R], rows to commit.
        stash_start: int32 [R], the request's first row in the stash.
        src_slots: int32 or int64 [R], or [groups, R], slot of the committed state.
        max_path: the longest a path can be, the tree's depth + 1.
        conv_width: W, taps of the convolution.
        dst_slots: like `src_slots`, where the advanced state goes; None: in place.
        cut_len: int32 [R], and
        cut_slots: like `src_slots`: the state after the first `cut_len` rows of the path, also
            from the committed state, goes to `cut_slots`. None, a slot not above `null_slot`, or a
            length outside 1..path_len: no cut. For prefix caching, which keeps the state at block
            boundaries.
        precision: of products of two float32 factors, see `launch.default_precision`.
    """
    num_reqs = path_len.shape[0]
    if num_reqs == 0:
        return
    num_layers, _, num_v_heads, head_v_dim = stash.u.shape
    num_k_heads, head_k_dim = stash.k.shape[2:]
    num_channels = stash.conv.shape[2]
    if num_layers != table.num_layers:
        raise ValueError(f"the stash has {num_layers} layers, the caches {table.num_layers}")
    if (cut_len is None) != (cut_slots is None):
        raise ValueError("cut_len and cut_slots come together")
    slots = [s for s in (src_slots, dst_slots, cut_slots) if s is not None]
    per_group = table.num_groups > 1
    for tensor in slots:
        if per_group and (tensor.dim() != 2 or tensor.shape[0] < table.num_groups):
            raise ValueError(f"{table.num_groups} cache groups need slots [groups, requests]")
    src_slots, dst_slots, cut_slots = (
        s if s is None or s.dim() == 2 else s[None] for s in (src_slots, dst_slots, cut_slots)
    )
    assert src_slots is not None
    if dst_slots is None:
        dst_slots = src_slots
    tiles = commit_tiles(head_v_dim, num_v_heads // num_k_heads, num_channels)
    ssm_programs = num_v_heads * head_v_dim // tiles.block_v
    conv_programs = triton.cdiv(num_channels, tiles.block_channels)
    grid = (table.num_layers * (ssm_programs + conv_programs), num_reqs)
    _commit_kernel[grid](
        table.ssm[0],
        table.ssm_address,
        table.ssm[0].stride(0),
        table.conv[0],
        table.conv_address,
        table.conv[0].stride(0),
        table.conv[0].stride(1),
        table.group,
        stash.k,
        stash.k.stride(0),
        stash.u,
        stash.u.stride(0),
        stash.log_decay,
        stash.log_decay.stride(0),
        stash.conv,
        stash.conv.stride(0),
        path,
        path.stride(0),
        path.shape[1],
        path_len,
        stash_start,
        src_slots,
        src_slots.stride(0),
        dst_slots,
        dst_slots.stride(0),
        cut_len,
        cut_slots,
        0 if cut_slots is None else cut_slots.stride(0),
        null_slot,
        HK=num_k_heads,
        HV=num_v_heads,
        K=head_k_dim,
        V=head_v_dim,
        NUM_CHANNELS=num_channels,
        WIDTH=conv_width,
        PER_GROUP=per_group,
        HAS_CUT=cut_slots is not None,
        SSM_PROGRAMS=ssm_programs,
        CONV_PROGRAMS=conv_programs,
        BLOCK_V=tiles.block_v,
        BLOCK_CHANNELS=tiles.block_channels,
        MAX_PATH=max(16, triton.next_power_of_2(max_path)),
        PRECISION=precision or default_precision(),
        BF16=native_bf16(stash.k.dtype),
        num_warps=4,
        # Six or eight programs to a multiprocessor: what is bound by memory wants many in flight.
        maxnreg=64 if cut_slots is None else 80,
    )


# The stride of slots without groups is the number of requests.
@triton.jit(do_not_specialize=["src_stride", "dst_stride", "cut_slots_stride"])
def _commit_kernel(
    ssm_ptr,  # the first layer's [slots, HV, V, K]: gives the type
    ssm_address_ptr,  # [L] int64
    ssm_stride,
    conv_ptr,  # the first layer's [slots, >= W - 1, C]
    conv_address_ptr,  # [L] int64
    conv_stride_slot,
    conv_stride_w,
    group_ptr,  # [L]
    stash_k_ptr,  # [L, max_rows, HK, K]
    stash_k_stride,
    stash_u_ptr,  # [L, max_rows, HV, V]
    stash_u_stride,
    stash_decay_ptr,  # [L, max_rows, HV] float64
    stash_decay_stride,
    stash_conv_ptr,  # [L, max_rows, C]
    stash_conv_stride,
    path_ptr,  # [R, path_width]
    path_stride,
    path_width,
    path_len_ptr,  # [R]
    stash_start_ptr,  # [R]
    src_ptr,  # [groups, R]
    src_stride,
    dst_ptr,  # [groups, R]
    dst_stride,
    cut_len_ptr,  # [R]
    cut_slots_ptr,  # [groups, R]
    cut_slots_stride,
    null_slot,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PER_GROUP: tl.constexpr,
    HAS_CUT: tl.constexpr,
    SSM_PROGRAMS: tl.constexpr,
    CONV_PROGRAMS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    MAX_PATH: tl.constexpr,
    PRECISION: tl.constexpr,
    BF16: tl.constexpr,
):
    # What a program reads depends on what it read before, and each of these reads takes as long as
    # moving its share of the state. So all that can go out together does, ahead of the first branch.
    req = tl.program_id(1)
    programs: tl.constexpr = SSM_PROGRAMS + CONV_PROGRAMS
    layer = (tl.program_id(0) // programs).to(tl.int64)
    part = tl.program_id(0) % programs
    length = tl.load(path_len_ptr + req)
    stash_start = tl.load(stash_start_ptr + req).to(tl.int64)
    path = path_ptr + req.to(tl.int64) * path_stride
    j = tl.arange(0, MAX_PATH)
    path_row = tl.load(path + j, mask=j < path_width, other=0)
    state_address = tl.load(ssm_address_ptr + layer)
    group = 0
    if PER_GROUP:
        group = tl.load(group_ptr + layer)
    src = tl.load(src_ptr + group * src_stride + req).to(tl.int64)
    dst = tl.load(dst_ptr + group * dst_stride + req).to(tl.int32)
    cut = dst
    cut_length = length
    has_cut = length < 0
    if HAS_CUT:
        cut = tl.load(cut_slots_ptr + group * cut_slots_stride + req).to(tl.int32)
        cut_length = tl.load(cut_len_ptr + req)
        has_cut = (cut > null_slot) & (cut_length > 0) & (cut_length <= length)
    last_row = tl.load(path + length - 1, mask=length > 0, other=0)
    cut_row = last_row
    if HAS_CUT:
        cut_row = tl.load(path + cut_length - 1, mask=has_cut, other=0)
    if (length <= 0) | (src <= null_slot):
        return

    if part < SSM_PROGRAMS:
        # The value rows of the heads that share a key head lie together: a tile takes some of them.
        group_rows: tl.constexpr = HV // HK * V
        splits: tl.constexpr = group_rows // BLOCK_V
        k_head = (part // splits).to(tl.int64)
        v_row = (part % splits).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
        k_channel = tl.arange(0, K)
        # The hint stands for what the cast hides: StateTable checked the alignment.
        state_base = tl.multiple_of(state_address.to(ssm_ptr.dtype), 16)
        v_row = k_head * group_rows + v_row
        tile = (v_row * K)[:, None] + k_channel[None, :]
        s = tl.load(state_base + src * ssm_stride + tile).to(tl.float32)

        on_path = j < length
        row = stash_start + path_row
        # [1 or BLOCK_V, 1]: a tile within one head has one decay.
        if BLOCK_V <= V:
            head = tl.full(
                [1, 1], k_head * (HV // HK) + (part % splits) // (V // BLOCK_V), tl.int64
            )
        else:
            head = (v_row // V)[:, None]
        decays = stash_decay_ptr + layer * stash_decay_stride + head
        path_mask = on_path[None, :]
        decay = tl.load(decays + (row * HV)[None, :], mask=path_mask, other=0.0)
        k_at = stash_k_ptr + layer * stash_k_stride + k_head * K
        k_at = k_at + (row * (HK * K))[:, None] + k_channel[None, :]
        k = tl.load(k_at, mask=on_path[:, None], other=0.0)
        u_at = stash_u_ptr + layer * stash_u_stride
        u_at = u_at + v_row[:, None] + (row * (HV * V))[None, :]
        u_t = tl.load(u_at, mask=path_mask, other=0.0)
        # One body for both, at run time: unrolled, the second would cost every program registers.
        for which in range(1 + has_cut.to(tl.int32)):
            whole = which == 0
            rows = tl.where(whole, length, cut_length)
            last = tl.where(whole, last_row, cut_row)
            to = tl.where(whole, dst, cut).to(tl.int64)
            if to > null_slot:
                total = tl.load(decays + (stash_start + last) * HV)
                # Masked before exp: a row after the cut has the smaller sum, exp could overflow.
                gap = tl.where((j < rows)[None, :], total - decay, -float("inf"))
                weighted = u_t * tl.exp(gap.to(tl.float32))
                if BF16:
                    high = weighted.to(tl.bfloat16)
                    rest = weighted - high.to(tl.float32)
                    middle = rest.to(tl.bfloat16)
                    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
                    update = tl.dot(low, k)
                    update = tl.dot(middle, k, update)
                    update = tl.dot(high, k, update)
                else:
                    update = tl.dot(weighted, k.to(tl.float32), input_precision=PRECISION)
                moved = tl.exp(total.to(tl.float32)) * s + update
                tl.store(state_base + to * ssm_stride + tile, moved.to(ssm_ptr.dtype.element_ty))
    else:
        channel = (part - SSM_PROGRAMS).to(tl.int64) * BLOCK_CHANNELS
        channel = channel + tl.arange(0, BLOCK_CHANNELS)
        in_channels = (channel < NUM_CHANNELS)[None, :]
        conv_base = tl.load(conv_address_ptr + layer).to(conv_ptr.dtype)
        conv_base = tl.multiple_of(conv_base, 16)
        window_type = conv_ptr.dtype.element_ty
        window = conv_base + channel[None, :]
        raw = stash_conv_ptr + layer * stash_conv_stride + channel[None, :]
        # Row w of the window after m rows is row m + w of the old window followed by the path.
        w = tl.arange(0, 4).to(tl.int64)
        kept = w < WIDTH - 1
        w_offset = (w * conv_stride_w)[:, None]
        for which in tl.static_range(2 if HAS_CUT else 1):
            if which == 0:
                source = length + w
                needed = kept
            else:
                source = cut_length + w
                needed = kept & has_cut
            from_path = source >= WIDTH - 1
            fresh_mask = needed & from_path
            fresh_row = tl.load(path + source - (WIDTH - 1), mask=fresh_mask, other=0)
            raw_at = raw + ((stash_start + fresh_row) * NUM_CHANNELS)[:, None]
            fresh = tl.load(raw_at, mask=fresh_mask[:, None] & in_channels, other=0.0)
            stale_mask = (needed & (source < WIDTH - 1))[:, None] & in_channels
            stale_at = window + (src * conv_stride_slot + source * conv_stride_w)[:, None]
            stale = tl.load(stale_at, mask=stale_mask, other=0.0)
            if which == 0:
                at_end = tl.where(from_path[:, None], fresh.to(window_type), stale)
            else:
                at_cut = tl.where(from_path[:, None], fresh.to(window_type), stale)
        # A row of the window moves up into another one: all reads before the first write.
        tl.debug_barrier()
        store_mask = kept[:, None] & in_channels
        end_to = window + dst.to(tl.int64) * conv_stride_slot + w_offset
        tl.store(end_to, at_end, mask=store_mask & (dst > null_slot))
        if HAS_CUT:
            cut_to = window + cut.to(tl.int64) * conv_stride_slot + w_offset
            tl.store(cut_to, at_cut, mask=store_mask & has_cut)
