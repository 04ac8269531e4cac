# SPDX-License-Identifier: Apache-2.0
"""Tokens per step of a drafter against its target, without an engine.

The walk keeps a drafted token exactly when it is the token the target emits there. So one run of
the target without speculation fixes the output, and every drafter, policy and budget is judged
against that same output.
"""

import heapq
from collections import Counter

import torch

from demo_pair import target as target_model

CANDIDATES = 32


def best_first(log_probs: list[list[float]], budget: int) -> dict[tuple[int, ...], int]:
    """The DDTree (arXiv 2604.12989) of `budget` nodes over [depth][rank] log-probabilities.

    Returns each node (a tuple of ranks) with its place in pop order. A tree of a smaller budget is
    the nodes whose place is below it.
    """
    heap: list[tuple[float, tuple[int, ...]]] = [(-log_probs[0][0], (0,))]
    order: dict[tuple[int, ...], int] = {}
    while heap and len(order) < budget:
        cost, node = heapq.heappop(heap)
        order[node] = len(order)
        depth, rank = len(node), node[-1]
        row = log_probs[depth - 1]
        if rank + 1 < len(row):
            sibling = cost + row[rank] - row[rank + 1]
            heapq.heappush(heap, (sibling, (*node[:-1], rank + 1)))
        if depth < len(log_probs):
            heapq.heappush(heap, (cost - log_probs[depth][0], (*node, 0)))
    return order


@torch.no_grad()
def _drafts(model, drafter, tokens, first: int, last: int):
    """Top candidates of every block whose anchor is in [first, last): two lists [A][15][k]."""
    _, streams = target_model.forward(model, tokens[None])
    embed = model.model.embed_tokens.weight
    log_probs, ids = [], []
    for start in range(first, last, 64):
        anchors = torch.arange(start, min(start + 64, last), device=tokens.device)[None]
        hidden = drafter(streams, anchors, embed[tokens[anchors]], embed[drafter.mask_token_id])
        scores = model.lm_head(hidden[0]).float().log_softmax(-1)
        top = scores.topk(CANDIDATES, dim=-1)
        log_probs += top.values.tolist()
        ids += top.indices.tolist()
    return log_probs, ids


def measure(
    model, drafter, prompts, *, temperature, new_tokens, budgets, end_tokens, seed=0
) -> dict:
    """Tokens per step of the chain and of the DDTree at each budget.

    Args:
        prompts: token lists. All are decoded together.
        temperature: 0 is greedy.
        new_tokens: tokens generated for each prompt; an end token cuts them short.

    Returns:
        {"tokens", "chain", "chain_accuracy_by_position", "ddtree": {budget: tokens per step}}.
    """
    device = model.lm_head.weight.device
    budgets = sorted(budgets)
    length = max(map(len, prompts)) + new_tokens
    output = target_model.generate(
        model, prompts, length, torch.full((len(prompts),), float(temperature)), seed=seed
    )
    steps: Counter = Counter()
    emitted: Counter = Counter()
    hits: Counter = Counter()
    tries: Counter = Counter()
    total = 0
    for row, prompt in zip(output.tolist(), prompts, strict=True):
        stop = len(prompt) + new_tokens
        ended = [i for i in range(len(prompt), stop) if row[i] in end_tokens]
        tokens = row[: ended[0] + 1] if ended else row[:stop]
        total += len(tokens) - len(prompt)
        first, last = len(prompt), len(tokens) - 1
        if last <= first:
            continue
        on_device = torch.tensor(tokens, device=device)
        log_probs, ids = _drafts(model, drafter, on_device, first, last)
        trees: dict[int, dict] = {}
        for contestant in ("chain", *budgets):
            p = first
            # Without an end token a block that reaches past the last token cannot be judged.
            while p < last and (ended or p + len(ids[0]) < len(tokens)):
                truth = tokens[p + 1 : p + 1 + len(ids[0])]
                candidates = ids[p - first]
                if contestant == "chain":
                    agreed = 0
                    while agreed < len(truth) and candidates[agreed][0] == truth[agreed]:
                        agreed += 1
                    for i in range(min(agreed + 1, len(truth))):
                        tries[i] += 1
                        hits[i] += i < agreed
                else:
                    if p not in trees:
                        trees[p] = best_first(log_probs[p - first], budgets[-1])
                    node: tuple[int, ...] = ()
                    for here, token in zip(candidates, truth, strict=False):
                        if token not in here:
                            break
                        child = (*node, here.index(token))
                        if trees[p].get(child, budgets[-1]) >= contestant:
                            break
                        node = child
                    agreed = len(node)
                steps[contestant] += 1
                emitted[contestant] += agreed + 1
                p += agreed + 1
    per_step = {c: round(emitted[c] / steps[c], 3) for c in steps}
    return {
        "temperature": temperature,
        "prompts": len(prompts),
        "tokens": total,
        "chain": per_step.get("chain"),
        "chain_accuracy_by_position": [round(hits[i] / tries[i], 3) for i in sorted(tries)],
        "ddtree": {str(b): per_step.get(b) for b in budgets},
    }
