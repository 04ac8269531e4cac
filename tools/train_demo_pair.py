#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains the demo pair: a small hybrid target and its DFlash drafter.

Phases, in order (name one or several):
  prepare   tokenizer and tokens from the corpus; any machine
  target    trains the target; a GPU
  drafter   samples the target, trains the drafter on that, measures acceptance; a GPU
  describe  writes OUT/PROVENANCE.md from OUT/provenance.json; any machine

`prepare` writes to --work, the others to --out (target/, drafter/, provenance.json). A phase reads
what an earlier run left, so `drafter` can run on another machine with --target and --provenance.
"""

import argparse
import hashlib
import json
import platform
import shutil
import sys
import time
from pathlib import Path

import safetensors
import tokenizers
import torch
import transformers
from demo_pair import acceptance, data, drafter, provenance, target, tokenizer, training

BUDGETS = (1, 7, 15, 31, 63, 127)


def main() -> int:
    args = _arguments()
    if "prepare" in args.phases:
        print(json.dumps(data.prepare(args.corpus, args.work, seed=args.seed), indent=2))
    if "target" in args.phases:
        _train_target(args)
    if "drafter" in args.phases:
        _train_drafter(args)
    if "describe" in args.phases:
        record = json.loads((args.out / "provenance.json").read_text())
        (args.out / "PROVENANCE.md").write_text(provenance.page(record))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("phases", nargs="+", choices=("prepare", "target", "drafter", "describe"))
    add = parser.add_argument
    add("--corpus", type=Path, default=Path("build/corpus/stdlib.jsonl.xz"))
    add("--work", type=Path, default=Path("build/demo-pair"), help="where `prepare` writes")
    add("--out", type=Path, default=Path("demo"))
    add("--target", type=Path, help="trained target for `drafter` (default: OUT/target)")
    add("--provenance", type=Path, help="provenance.json to extend (default: OUT/provenance.json)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--seed", type=int, default=20)
    add("--target-minutes", type=float, default=3.0)
    add("--target-steps", type=int, help="stop after so many steps instead: repeatable")
    add("--target-batch", type=int, default=64)
    add("--target-rate", type=float, default=3e-3)
    add("--dropout", type=float, default=0.1)
    add("--length", type=int, default=512, help="tokens per training sequence")
    add("--drafter-minutes", type=float, default=4.0)
    add("--drafter-steps", type=int)
    add("--drafter-batch", type=int, default=64)
    add("--drafter-rate", type=float, default=1.5e-3)
    add("--anchors", type=int, default=32, help="blocks drafted per training sequence")
    add("--sequences", type=int, default=49152, help="target outputs the drafter learns from")
    add("--generate-batch", type=int, default=8192)
    add("--gamma", type=float, default=7.0, help="decay of the loss over block positions")
    add("--measure-prompts", type=int, default=128, help="held-out prompts; 0 skips measuring")
    add("--measure-tokens", type=int, default=128)
    return parser.parse_args()


def _train_target(args) -> None:
    summary, train, heldout, bpe = data.load(args.work)
    settings = target.config(
        vocab_size=bpe.get_vocab_size(),
        end_of_text=bpe.token_to_id(tokenizer.END_OF_TEXT),
        turn_end=bpe.token_to_id(tokenizer.TURN_END),
    )
    model = target.build(settings, seed=args.seed).to(args.device)
    result = training.train_target(
        model,
        train.to(args.device),
        heldout.to(args.device),
        minutes=args.target_minutes,
        max_steps=args.target_steps,
        batch=args.target_batch,
        length=args.length,
        peak_rate=args.target_rate,
        dropout=args.dropout,
        seed=args.seed,
    )
    result["parameters"] = sum(p.numel() for p in model.parameters())
    folder = args.out / "target"
    target.save(model, settings, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(args.work / name, folder / name)
    _show_samples(model, heldout, bpe)
    _record(args, {"data": summary, "target": result})


def _train_drafter(args) -> None:
    _, train, heldout, bpe = data.load(args.work)
    folder = args.target or args.out / "target"
    model = target.load(folder, args.device)
    target_settings = json.loads((folder / "config.json").read_text())
    started = time.perf_counter()
    outputs = training.own_outputs(
        model,
        train.to(args.device),
        count=args.sequences,
        length=args.length,
        batch=args.generate_batch,
        seed=args.seed,
    )
    made_in = time.perf_counter() - started
    print(f"{args.sequences} sequences of {args.length} tokens from the target: {made_in:.0f} s")
    settings = drafter.config(target_settings, mask=bpe.token_to_id(tokenizer.MASK))
    torch.manual_seed(args.seed)
    draft_model = drafter.DFlashDrafter(settings).to(args.device)
    result = training.train_drafter(
        draft_model,
        model,
        outputs,
        minutes=args.drafter_minutes,
        max_steps=args.drafter_steps,
        batch=args.drafter_batch,
        anchors=args.anchors,
        peak_rate=args.drafter_rate,
        gamma=args.gamma,
        seed=args.seed,
    )
    result["parameters"] = sum(p.numel() for p in draft_model.parameters())
    drafter.save(draft_model, settings, args.out / "drafter")
    if args.measure_prompts:
        del outputs
        prompts = heldout_prompts(heldout, args.measure_prompts, seed=args.seed)
        ends = {target_settings["eos_token_id"], target_settings["pad_token_id"]}
        result["acceptance"] = []
        for temperature in (0.0, 1.0):
            entry = acceptance.measure(
                model,
                draft_model,
                prompts,
                temperature=temperature,
                new_tokens=args.measure_tokens,
                budgets=BUDGETS,
                end_tokens=ends,
                seed=args.seed,
            )
            print(json.dumps(entry), flush=True)
            result["acceptance"].append(entry)
    _record(args, {"drafter": result})


def heldout_prompts(heldout: data.TokenSet, count: int, *, seed: int) -> list[list[int]]:
    """Prompts from files neither model has seen: half chat prompts, half raw source."""
    generator = torch.Generator().manual_seed(seed)
    source = data.TokenSet(heldout.stream.cpu(), heldout.chats)
    lengths = torch.randint(16, 129, (count,), generator=generator).tolist()
    raw = source.windows(count, 128, generator).tolist()
    chats = torch.randint(len(source.chats), (count,), generator=generator).tolist()
    return [source.chats[chats[i]] if i % 2 else raw[i][: lengths[i]] for i in range(count)]


def _show_samples(model, heldout, bpe) -> None:
    prompts = heldout_prompts(heldout, 4, seed=1)
    length = max(map(len, prompts)) + 96
    made = target.generate(model, prompts, length, torch.tensor([0.0, 0.0, 1.0, 1.0]))
    for prompt, row in zip(prompts, made.tolist(), strict=True):
        print("-" * 80)
        print(bpe.decode(prompt, skip_special_tokens=False))
        print("=" * 20)
        print(bpe.decode(row[len(prompt) : len(prompt) + 96], skip_special_tokens=False))


def _record(args, sections: dict) -> None:
    """Extends provenance.json with the sections, the command, versions and the files' digests."""
    path = args.out / "provenance.json"
    before = args.provenance or path
    record = json.loads(before.read_text()) if before.is_file() else {}
    record |= sections
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.machine()
    shown = ["OUT" if a == str(args.out) else a for a in sys.argv[1:]]
    run = {
        "command": "python3 tools/train_demo_pair.py " + " ".join(shown),
        "seed": args.seed,
        "device": device,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
            "safetensors": safetensors.__version__,
        },
    }
    record["runs"] = record.get("runs", {}) | dict.fromkeys(sections.keys() - {"data"}, run)
    files = record.setdefault("files", {})
    for file in sorted(args.out.glob("*/*")):
        if file.parent.name in ("target", "drafter"):
            content = file.read_bytes()
            files[f"{file.parent.name}/{file.name}"] = {
                "bytes": len(content),
                "sha256": hashlib.sha256(content).hexdigest(),
            }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
