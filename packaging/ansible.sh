#!/usr/bin/env bash
# Makes .venv-ansible, the controller's environment: ansible-core and ansible-lint from
# constraints/ansible.txt. Quick and silent when nothing changed.
#
# Usage: packaging/ansible.sh          ANSIBLE_PYTHON=python3.12 chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'ansible: %s\n' "$*"; }
die() {
  printf 'ansible: %s\n' "$*" >&2
  exit 1
}

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

find_python() {
  local candidate
  for candidate in ${ANSIBLE_PYTHON:-python3 python3.11 python3.12 python3.13}; do
    case "$(version_of "$candidate")" in
      3.11 | 3.12 | 3.13)
        printf '%s' "$candidate"
        return
        ;;
    esac
  done
  die "needs Python 3.11 to 3.13; ${ANSIBLE_PYTHON:-python3} is not one (ANSIBLE_PYTHON=/path/to/python3.12 chooses another)"
}

venv=.venv-ansible pins=constraints/ansible.txt
# An existing environment keeps its Python unless ANSIBLE_PYTHON asks for another.
have=$(version_of $venv/bin/python || true)
if [ -n "${ANSIBLE_PYTHON:-}" ] || [[ ! $have =~ ^3\.1[123]$ ]]; then
  python=$(find_python)
  want=$(version_of "$python")
  if [ "$want" != "$have" ]; then
    say "making $venv with Python $want"
    "$python" -m venv --clear $venv ||
      die "$python -m venv failed; on Debian: apt-get install python3-venv"
    have=$want
  fi
fi

stamp=$venv/ddtree-ansible
key=$({
  echo "$have $PWD"
  cat "$pins" packaging/ansible.sh
} | sha256sum | cut -d' ' -f1)
[ "$(cat "$stamp" 2>/dev/null)" = "$key" ] && exit 0

pip() { $venv/bin/python -m pip --disable-pip-version-check --no-input "$@"; }
say "installing $(grep -c '^[^#].*==' "$pins") packages of $pins"
pip install -qq --no-deps -r "$pins"
pip check >/dev/null || {
  pip check >&2 || true
  die "the pinned packages do not fit together"
}
echo "$key" >"$stamp"
say "ready: $venv, Python $have, ansible-core $(pip show ansible-core 2>/dev/null | sed -n 's/^Version: //p')"
