#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures a demo pair on held-out text: the target's loss, and tokens per step of chain and trees.

Runs in plain PyTorch, without an engine, on what `train_demo_pair.py prepare` wrote.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import torch
from demo_pair import acceptance, data, drafter, target, training
from train_demo_pair import BUDGETS, heldout_prompts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--pair", type=Path, default=Path("demo"), help="holds target/ and drafter/")
    add("--work", type=Path, default=Path("build/demo-pair"))
    add("--out", type=Path, default=Path("build/acceptance.json"))
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--prompts", type=int, default=32)
    add("--tokens", type=int, default=128, help="tokens generated for each prompt")
    add("--windows", type=int, default=32, help="windows of 512 tokens for the held-out loss")
    add("--seed", type=int, default=20)
    args = parser.parse_args()

    model = target.load(args.pair / "target", args.device)
    draft_model = drafter.load(args.pair / "drafter", args.device)
    summary, _, heldout, _ = data.load(args.work)
    loss = training.heldout_loss(model, heldout.to(args.device), windows=args.windows, length=512)
    metrics = {
        "heldout_loss": round(loss, 4),
        "heldout_perplexity": round(math.exp(loss), 3),
        "heldout_bits_per_byte": round(
            loss / math.log(2) / summary["heldout"]["bytes_per_token"], 4
        ),
        "acceptance": [],
    }
    print(f"held-out loss {loss:.4f} nats/token, perplexity {math.exp(loss):.3f}")
    prompts = heldout_prompts(heldout, args.prompts, seed=args.seed)
    ends = {model.config.eos_token_id, model.config.pad_token_id}
    for temperature in (0.0, 1.0):
        entry = acceptance.measure(
            model,
            draft_model,
            prompts,
            temperature=temperature,
            new_tokens=args.tokens,
            budgets=BUDGETS,
            end_tokens=ends,
            seed=args.seed,
        )
        metrics["acceptance"].append(entry)
        trees = "  ".join(f"{b}: {v}" for b, v in entry["ddtree"].items())
        print(f"T={temperature:g}  tokens/step  chain {entry['chain']}   DDTree  {trees}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(metrics, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
