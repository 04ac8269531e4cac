# SPDX-License-Identifier: Apache-2.0
"""The page a reader sees beside the weights, made from provenance.json."""


def page(record: dict) -> str:
    """Markdown: what the pair was trained on, how, how well, and the digests of its files."""
    corpus, target, drafter = record["data"]["corpus"], record["target"], record["drafter"]
    train, heldout = record["data"]["train"], record["data"]["heldout"]
    lines = [
        "# Where these weights come from",
        "",
        "Written by `tools/train_demo_pair.py describe` from `provenance.json`.",
        "",
        "## Data",
        f"{corpus['source']}, licence {corpus['licence']}: {corpus['files']} files, "
        f"{corpus['characters']:,} characters, {corpus['heldout_files']} files held out by a hash "
        "of their path.",
        f"Chat turns are made from the functions of the same files. {train['tokens']:,} training "
        f"tokens and {heldout['tokens']:,} held out, {train['bytes_per_token']} bytes a token.",
        f"Corpus SHA-256: `{corpus['sha256']}`.",
        "",
        "## Target",
        f"{target['parameters']:,} parameters, {target['steps']:,} steps of {target['batch']} x "
        f"{target['length']} tokens ({target['epochs']} epochs) in {target['seconds']:.0f} s.",
        f"Held-out loss {target['heldout_loss']} nats a token (perplexity "
        f"{target['heldout_perplexity']}), with the stored bfloat16 weights in float32 arithmetic.",
        "",
        "## Drafter",
        f"{drafter['parameters']:,} parameters, {drafter['steps']:,} steps of {drafter['batch']} "
        f"sequences x {drafter['anchors']} blocks in {drafter['seconds']:.0f} s, on "
        f"{drafter['sequences']:,} sequences of {drafter['sequence_length']} tokens that the "
        "target wrote.",
        "",
        "Tokens per step on held-out prompts:",
        "",
        *_acceptance_table(drafter["acceptance"]),
        "",
        "## Runs",
    ]
    for part in ("target", "drafter"):
        run = record["runs"][part]
        versions = ", ".join(f"{k} {v}" for k, v in run["versions"].items())
        lines += [f"- {part}: `{run['command']}`, seed {run['seed']}, {run['device']}; {versions}."]
    lines += ["", "## Files", "", "| file | bytes | SHA-256 |", "| --- | --- | --- |"]
    for name, file in sorted(record["files"].items()):
        lines.append(f"| {name} | {file['bytes']:,} | `{file['sha256']}` |")
    return "\n".join(lines) + "\n"


def _acceptance_table(entries: list[dict]) -> list[str]:
    budgets = list(entries[0]["ddtree"])
    rows = [
        "| temperature | chain of 15 | " + " | ".join(f"tree of {b}" for b in budgets) + " |",
        "| --- " * (len(budgets) + 2) + "|",
    ]
    for e in entries:
        trees = " | ".join(f"{e['ddtree'][b]:.2f}" for b in budgets)
        rows.append(f"| {e['temperature']:g} | {e['chain']:.2f} | {trees} |")
    return rows
