#!/usr/bin/env bash
# Runs every benchmark on the GPU of this machine and writes docs/benchmarks/NAME.json and its plots.
#
# Usage: benchmarks/run.sh NAME
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:?usage: benchmarks/run.sh NAME}
python=${PYTHON:-.venv/bin/python}
out=build/benchmarks
mkdir -p "$out"

# Held-out prompts, from the library of the Python that the demo pair was trained on, unless they are
# there already (benchmarks/acceptance.py says how they get to a machine without it).
if [[ ! -f $out/acceptance-prompts.json && ! -f build/demo-pair/tokens.safetensors ]]; then
  "$python" tools/build_corpus.py
  "$python" tools/train_demo_pair.py prepare
fi
"$python" benchmarks/acceptance.py --logs "$out" --prompts "$out/acceptance-prompts.json" \
  --out "$out/acceptance.json"

# Three rounds, since all contestants do not fit on one GPU; vLLM's chain plays in each of them, and
# has room for 16 requests. Longer contexts at smaller batches.
rounds=("vllm-chain15,tree63,chain15" "vllm-chain15,tree15,ar" "vllm-chain15,tree31,tree127")
cells=(--cells "1000:1,2,4,8,16,32" "8000:1,4" "32000:1" --profile "1000:1,4,16"
  --max-num-seqs "16,chain15=32,tree15=32,ar=32,tree127=8"
  --cache-gib "10,vllm-chain15=43,chain15=12,tree15=12")
"$python" benchmarks/kernels.py --out "$out/kernels.json"
steps=()
for contestants in "${rounds[@]}"; do
  steps+=("$out/steps-$((${#steps[@]} + 1)).json")
  "$python" benchmarks/step_time.py --contestants "$contestants" "${cells[@]}" --logs "$out" \
    --out "${steps[-1]}"
done
"$python" - "$out" "${cells[*]}" <<'PYTHON'
import json, pathlib, platform, subprocess, sys
import torch, triton, vllm

out = pathlib.Path(sys.argv[1])
driver = subprocess.run(
    ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
    capture_output=True, text=True, check=True,
).stdout.splitlines()[0].split(", ")
commit = subprocess.run(
    ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
).stdout.strip()
(out / "provenance.json").write_text(json.dumps({
    "commit": commit, "gpu": driver[0], "driver": driver[1],
    "versions": {"vllm": vllm.__version__, "torch": torch.__version__,
                 "triton": triton.__version__, "python": platform.python_version()},
    "commands": ["make bench-gpu", f"benchmarks/step_time.py {sys.argv[2]}"],
}))
PYTHON
"$python" benchmarks/report.py --steps "${steps[@]}" --kernels "$out/kernels.json" \
  --acceptance "$out/acceptance.json" \
  --provenance "$out/provenance.json" --name "$name"
