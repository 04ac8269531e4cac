#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the Debian root file system that every test host starts from.
# Usage: rootfs.sh DIR SSH_PUBLIC_KEY [PACKAGE...]   needs root and mmdebstrap; 20 to 70 s
set -euo pipefail
dir=$1 key=$2
shift 2
here=$(cd "$(dirname "$0")" && pwd)
packages=(
  systemd systemd-sysv dbus openssh-server python3 python3-apt iproute2 ca-certificates procps sudo curl
  # What native mode installs; hosts of the lab reach no mirror.
  python3-venv libnuma1
  "$@"
)
mmdebstrap --variant=minbase --include="$(IFS=,; echo "${packages[*]}")" bookworm "$dir"
install -m 755 "$here/lab-init" "$dir/etc/lab-init"
install -d -m 700 "$dir/root/.ssh"
install -m 600 "$key" "$dir/root/.ssh/authorized_keys"
: >"$dir/etc/resolv.conf"
: >"$dir/etc/machine-id"
