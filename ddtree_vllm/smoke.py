# SPDX-License-Identifier: Apache-2.0
"""The smoke program: three servers one after another, the same prompts, every token compared.

Starts `ddtree-vllm serve` as a user would, for no speculation, a chain and a tree, sends the same
prompts through the `openai` client, and compares token ids and text: greedy, and sampled with a
seed. Prints a table, writes build/smoke.json, and exits non-zero when anything differs.

    python -m ddtree_vllm.smoke --target demo/target --drafter demo/drafter --budget 31
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddtree_vllm import checkpoints, environment

MODEL_NAME = "smoke"
CHAIN_BUDGET = 15
MAX_MODEL_LEN = 512
STOP_TIMEOUT_S = 60
REQUEST_TIMEOUT_S = 600
POLL_S = 0.5

PROMPTS = (
    "def read_config(path):\n",
    "import os\nimport sys\n\n\ndef main(argv=None):\n",
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self",
    "for name, value in sorted(self.headers.items()):\n    if value is None:\n",
    'def parse(text):\n    """Parse a line of text and return a list of fields.\n\n',
    "try:\n    import threading\nexcept ImportError:\n",
    "    def __repr__(self):\n        return",
    "# Copyright\n\n__all__ = [",
)
SEEDED_PROMPTS = ("def add(a, b):\n", "class Node:\n    def ")
SEEDED_MAX_TOKENS = 16
SEED = 1234


@dataclass(frozen=True)
class Contestant:
    """One engine of the comparison, by the options that set it apart."""

    key: str
    title: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class Completion:
    """What one request gave."""

    token_ids: tuple[int, ...]
    text: str


@dataclass
class Result:
    """What one contestant gave, and how long it took."""

    start_s: float = 0.0
    greedy_s: float = 0.0
    tokens_per_step: float = 1.0
    greedy: list[Completion] = field(default_factory=list)
    seeded: list[Completion] = field(default_factory=list)


class SmokeError(Exception):
    """The smoke test cannot go on; the message says why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison; returns 0 when all engines agree and the tree beats the chain."""
    args = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args.output.mkdir(parents=True, exist_ok=True)
    report_path = args.output / "smoke.json"
    report_path.unlink(missing_ok=True)
    started = time.monotonic()
    try:
        report, results = _compare(args)
    except SmokeError as error:
        print(f"\nsmoke: {error}", file=sys.stderr)
        return 1
    report_path.write_text(json.dumps(report, indent=2) + "\n")
    print(_table(_contestants(args), results))
    print(f"\n{report_path} written; {time.monotonic() - started:.0f} s in all")
    complaints = _complaints(_contestants(args), results)
    for complaint in complaints:
        print(f"smoke: {complaint}", file=sys.stderr)
    if not complaints:
        print("smoke: passed, every token the same")
    return 1 if complaints else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ddtree_vllm.smoke", description=__doc__.split("\n")[0])
    parser.add_argument("--target", default="demo/target")
    parser.add_argument("--drafter", default="demo/drafter")
    parser.add_argument("--budget", type=int, default=31, help="nodes of the tree (default 31)")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each greedy completion")
    parser.add_argument("--dtype", help="default: float32 on the CPU, auto on a GPU")
    parser.add_argument("--output", type=Path, default=Path("build"), help="reports and logs")
    parser.add_argument("--ready-timeout", type=float, default=300, metavar="SECONDS")
    return parser


def _contestants(args: argparse.Namespace) -> tuple[Contestant, ...]:
    drafter = ("--drafter", args.drafter)
    return (
        Contestant("ar", "no speculation", ("--no-speculation",)),
        Contestant(
            "chain",
            f"chain of {CHAIN_BUDGET}",
            (*drafter, "--policy", "chain", "--budget", str(CHAIN_BUDGET)),
        ),
        Contestant("ddtree", f"tree of {args.budget}", (*drafter, "--budget", str(args.budget))),
    )


def _compare(args: argparse.Namespace) -> tuple[dict, dict[str, Result]]:
    for role, path in (("target", args.target), ("drafter", args.drafter)):
        try:
            checkpoints.open_checkpoint(role, path)
        except ValueError as error:
            raise SmokeError(str(error)) from None
    installed = environment.installed_vllm()
    if len(installed) != 1:
        raise SmokeError("needs exactly one vLLM; `ddtree-vllm doctor` says what is installed")
    vllm = installed[0]
    dtype = args.dtype or ("float32" if vllm.device == "cpu" else "auto")
    results = {}
    for contestant in _contestants(args):
        results[contestant.key] = _run(contestant, args, dtype)
    report = {
        "vllm": vllm.version,
        "device": vllm.device,
        "prompts": len(PROMPTS),
        "identical_greedy": _identical(results, "greedy"),
        "identical_seeded": _identical(results, "seeded"),
        "ar": {"tokens_per_step": 1.0},
        "chain": {"tokens_per_step": round(results["chain"].tokens_per_step, 4)},
        "ddtree": {
            "budget": args.budget,
            "tokens_per_step": round(results["ddtree"].tokens_per_step, 4),
        },
    }
    return report, results


def _run(contestant: Contestant, args: argparse.Namespace, dtype: str) -> Result:
    """Serves one contestant, sends it all prompts, stops it."""
    result = Result()
    log = args.output / f"smoke-{contestant.key}.log"
    command = [
        *_serve_command(args.target),
        *contestant.options,
        *("--served-model-name", MODEL_NAME),
        *("--dtype", dtype),
        *("--max-model-len", str(MAX_MODEL_LEN)),
        *("--max-num-seqs", str(len(PROMPTS))),
    ]
    with _Progress(contestant.title) as progress:
        began = time.monotonic()
        with _server(command, log) as server:
            server.wait_until_ready(args.ready_timeout, progress)
            result.start_s = time.monotonic() - began
            progress.say(f"{len(PROMPTS)} prompts at once, greedy")
            began = time.monotonic()
            result.greedy = server.complete(PROMPTS, max_tokens=args.max_tokens, temperature=0.0)
            result.greedy_s = time.monotonic() - began
            if contestant.key != "ar":
                result.tokens_per_step = server.tokens_per_step()
            progress.say(f"{len(SEEDED_PROMPTS)} prompts, sampled with a seed")
            result.seeded = server.complete(
                SEEDED_PROMPTS, max_tokens=SEEDED_MAX_TOKENS, temperature=1.0, seed=SEED
            )
            progress.say("stopping")
        progress.say(
            f"ready after {result.start_s:.0f} s, greedy part {result.greedy_s:.1f} s, "
            f"{result.tokens_per_step:.2f} tokens a step"
        )
    return result


def _serve_command(target: str) -> list[str]:
    script = Path(sys.executable).with_name("ddtree-vllm")
    if script.exists():
        return [str(script), "serve", target]
    return [sys.executable, "-m", "ddtree_vllm.cli", "serve", target]


# ---- the server


class _Server:
    def __init__(self, process: subprocess.Popen, port: int, log: Path) -> None:
        self.process = process
        self.log = log
        self.url = f"http://127.0.0.1:{port}"

    def wait_until_ready(self, timeout: float, progress: _Progress) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            code = self.process.poll()
            if code is not None:
                raise SmokeError(f"the server ended with exit code {code}; {self._log_tail()}")
            with contextlib.suppress(urllib.error.URLError, OSError):
                if self._get("/health") is not None:
                    return
            progress.say("starting the server")
            time.sleep(POLL_S)
        raise SmokeError(f"the server was not ready after {timeout:.0f} s; {self._log_tail()}")

    def complete(
        self,
        prompts: Sequence[str],
        *,
        max_tokens: int,
        temperature: float,
        seed: int | None = None,
    ) -> list[Completion]:
        """Sends all prompts at once; returns their completions in order."""
        import openai

        async def send() -> list[Completion]:
            async with openai.AsyncOpenAI(
                base_url=f"{self.url}/v1",
                api_key="none",
                timeout=REQUEST_TIMEOUT_S,
                max_retries=0,
            ) as client:
                answers = await asyncio.gather(
                    *(
                        client.completions.create(
                            model=MODEL_NAME,
                            prompt=prompt,
                            max_tokens=max_tokens,
                            temperature=temperature,
                            seed=seed,
                            extra_body={"return_token_ids": True},
                        )
                        for prompt in prompts
                    )
                )
            completions = []
            for answer in answers:
                choice = answer.choices[0]
                ids = (choice.model_extra or {}).get("token_ids")
                if not ids:
                    raise SmokeError(f"an answer has no token ids: {choice}")
                completions.append(Completion(tuple(ids), choice.text))
            return completions

        try:
            return asyncio.run(send())
        except openai.OpenAIError as error:
            raise SmokeError(f"a request failed: {error}; {self._log_tail()}") from None

    def tokens_per_step(self) -> float:
        """Tokens per verification step so far: the accepted drafts, and one token on top."""
        metrics = (self._get("/metrics") or b"").decode()
        drafts = _counter(metrics, "vllm:spec_decode_num_drafts_total")
        accepted = _counter(metrics, "vllm:spec_decode_num_accepted_tokens_total")
        if not drafts:
            raise SmokeError(f"the server counted no drafts; {self._log_tail()}")
        return 1 + accepted / drafts

    def _get(self, path: str) -> bytes | None:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return answer.read() if answer.status == 200 else None

    def _log_tail(self, lines: int = 40) -> str:
        with self.log.open(errors="replace") as file:
            tail = "".join(deque(file, lines))
        return f"the end of {self.log}:\n{tail}"


@contextlib.contextmanager
def _server(command: list[str], log: Path) -> Iterator[_Server]:
    """A server on a free port, its output in `log`; stopped by its process id at the end."""
    port = _free_port()
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**quiet, **os.environ},
        )
        try:
            yield _Server(process, port, log)
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _counter(metrics: str, name: str) -> float:
    """Sum of a Prometheus counter over its labels."""
    pattern = rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$"
    return sum(float(value) for value in re.findall(pattern, metrics, re.MULTILINE))


# ---- what a person sees


class _Progress:
    """One line per contestant: rewritten in place on a terminal, printed now and then elsewhere."""

    EVERY_S = 15.0

    def __init__(self, title: str) -> None:
        self.title = title
        self.live = sys.stdout.isatty()
        self.began = time.monotonic()
        self.last = ""
        self.printed_at = 0.0

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            print()

    def say(self, what: str) -> None:
        now = time.monotonic()
        line = f"[{now - self.began:4.0f} s] {self.title}: {what}"
        if self.live:
            print(f"\r\033[K{line}", end="", flush=True)
        elif what != self.last or now - self.printed_at > self.EVERY_S:
            print(line, flush=True)
            self.printed_at = now
        self.last = what


def _table(contestants: Sequence[Contestant], results: dict[str, Result]) -> str:
    rows = [("engine", "ready", "greedy part", "tokens/step", "greedy", "seeded")]
    for contestant in contestants:
        result = results[contestant.key]
        if contestant.key == "ar":
            verdicts = ("reference", "reference")
        else:
            key = contestant.key
            verdicts = (_verdict(results, key, "greedy"), _verdict(results, key, "seeded"))
        rows.append(
            (
                contestant.title,
                f"{result.start_s:.0f} s",
                f"{result.greedy_s:.1f} s",
                f"{result.tokens_per_step:.2f}",
                *verdicts,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n" + "\n".join(line.rstrip() for line in lines)


def _verdict(results: dict[str, Result], key: str, part: str) -> str:
    same = getattr(results[key], part) == getattr(results["ar"], part)
    return "identical" if same else "DIFFERS"


def _identical(results: dict[str, Result], part: str) -> bool:
    return all(_verdict(results, key, part) == "identical" for key in results)


def _complaints(contestants: Sequence[Contestant], results: dict[str, Result]) -> list[str]:
    """What is wrong with the results, a sentence each."""
    complaints = []
    for contestant in contestants:
        for part, prompts in (("greedy", PROMPTS), ("seeded", SEEDED_PROMPTS)):
            expected, got = getattr(results["ar"], part), getattr(results[contestant.key], part)
            for prompt, a, b in zip(prompts, expected, got, strict=True):
                if a != b:
                    complaints.append(_difference(contestant.title, part, prompt, a, b))
    chain, tree = results["chain"].tokens_per_step, results["ddtree"].tokens_per_step
    if tree < 0.99 * chain:
        complaints.append(f"the tree makes {tree:.2f} tokens a step, the chain {chain:.2f}")
    return complaints


def _difference(title: str, part: str, prompt: str, a: Completion, b: Completion) -> str:
    at = next(
        (i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)) if x != y),
        min(len(a.token_ids), len(b.token_ids)),
    )
    return (
        f"{title}, {part}, prompt {prompt!r}: token {at} is {b.token_ids[at : at + 3]}, without "
        f"speculation {a.token_ids[at : at + 3]}"
    )


if __name__ == "__main__":
    sys.exit(main())
