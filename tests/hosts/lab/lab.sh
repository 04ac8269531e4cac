#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Real systemd hosts on one machine: systemd-nspawn containers, each in its own network namespace.
#
# Usage: lab.sh up N | wait N | down | run COMMAND...          needs root, systemd-container, iproute2
#
#   LAB           work folder, of this lab alone
#   ROOTFS        what rootfs.sh built; stays unchanged, every host writes to an overlay
#   KEY           ssh private key whose public half rootfs.sh was given
#   LAB_NAME      of its network namespaces and control groups; two labs need two names
#   NSPAWN_EXTRA  more flags for systemd-nspawn, such as binds
#
# Host i is node<i>, 10.78.0.<10+i>; this side is 10.78.0.1 in the namespace LAB_NAME. Nothing
# routes outside. Steps back to nothing with `down`, also after a half-finished `up`.
set -u
: "${LAB:?}"
readonly NET=${LAB_NAME:-ddtree-lab} SUBNET=10.78.0
export SYSTEMD_NSPAWN_API_VFS_WRITABLE=network

# A control group of the host's own in every hierarchy.
make_cgroups() { # name list-file
  local id controllers path mount group
  : >"$2"
  while IFS=: read -r id controllers path; do
    mount=/sys/fs/cgroup/${controllers#name=}
    if [ "$id" = 0 ]; then
      mount=/sys/fs/cgroup/unified
      [ -d "$mount" ] || mount=/sys/fs/cgroup
    fi
    group=$mount${path%/}/$1
    mkdir -p "$group"
    if [ "$controllers" = cpuset ]; then
      cat "$mount$path/cpuset.cpus" >"$group/cpuset.cpus"
      cat "$mount$path/cpuset.mems" >"$group/cpuset.mems"
      echo 1 >"$group/cgroup.clone_children"
    fi
    echo "$group" >>"$2"
  done </proc/self/cgroup
}

boot() { # number
  local host=node$1 d=$LAB/hosts/node$1
  mkdir -p "$d"/{up,work,root,docker}
  mount -t overlay "$NET-$host" -o "lowerdir=$ROOTFS,upperdir=$d/up,workdir=$d/work" "$d/root"
  echo "$host" >"$d/root/etc/hostname"
  # Empty: a resolver that does not answer costs 10 to 20 s a run.
  : >"$d/root/etc/resolv.conf"
  cp "$LAB/names" "$d/root/etc/hosts"
  ip netns add "$NET-$1"
  ip -n "$NET-$1" link add eth0 type veth peer name "v-ddtree-$1" netns "$NET"
  ip -n "$NET" link set "v-ddtree-$1" master br0 up
  ip -n "$NET-$1" addr add "$SUBNET.$((10 + $1))/24" dev eth0
  ip -n "$NET-$1" link set eth0 up
  ip -n "$NET-$1" link set lo up
  ip -n "$NET-$1" route add default via "$SUBNET.1"
  make_cgroups "$NET-$host" "$d/cgroups"
  (
    while read -r group; do echo "$BASHPID" >"$group/cgroup.procs"; done <"$d/cgroups"
    while :; do # exit status 133: the host asked for a reboot
      # shellcheck disable=SC2086 # NSPAWN_EXTRA is several words
      setsid -w systemd-nspawn -q --register=no --keep-unit -M "$NET-$host" -D "$d/root" \
        --hostname="$host" --kill-signal=SIGRTMIN+3 --console=pipe \
        --network-namespace-path="/run/netns/$NET-$1" --capability=all \
        --system-call-filter="add_key keyctl request_key bpf" \
        --bind="$d/docker:/var/lib/docker" ${NSPAWN_EXTRA:-} /etc/lab-init \
        </dev/null >>"$d/console.log" 2>&1
      [ $? = 133 ] || break
    done
  ) &
  echo $! >"$d/pid"
}

up() { # count
  : "${ROOTFS:?}"
  mkdir -p "$LAB"
  ip netns add "$NET" || {
    echo "lab.sh: a lab is up already; down ends it" >&2
    return 1
  }
  ip -n "$NET" link set lo up
  ip -n "$NET" link add br0 type bridge
  ip -n "$NET" addr add "$SUBNET.1/24" dev br0
  ip -n "$NET" link set br0 up
  {
    echo "127.0.0.1 localhost"
    for i in $(seq 1 "$1"); do echo "$SUBNET.$((10 + i)) node$i"; done
  } >"$LAB/names"
  for i in $(seq 1 "$1"); do boot "$i"; done
}

run() { ip netns exec "$NET" "$@"; }

host_ssh() { # number command...
  local number=$1
  shift
  run ssh -i "$KEY" -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null \
    -o LogLevel=ERROR -o ConnectTimeout=2 "root@$SUBNET.$((10 + number))" "$@"
}

wait_for() { # count
  local i state failed=0
  for i in $(seq 1 "$1"); do
    state=silent
    for _ in $(seq 1 600); do
      state=$(host_ssh "$i" 'systemctl is-system-running --wait' 2>/dev/null) && break
      [ "$state" = degraded ] && break
      sleep 0.1
    done
    echo "node$i ${state:-silent}"
    [ "$state" = running ] || failed=1
  done
  return $failed
}

# The PID of the host's systemd: the child of systemd-nspawn, which setsid has become.
init_of() { # shell's pid
  local nspawn
  nspawn=$(pgrep -P "$1" -x systemd-nspawn)
  [ -n "$nspawn" ] && pgrep -P "$nspawn" | head -1
}

# Processes in the control groups of a host.
host_pids() { # list-file
  xargs -a "$1" -I{} find {} -name cgroup.procs -exec cat {} + 2>/dev/null | sort -un
}

down() {
  local d pid init host left
  for d in "$LAB"/hosts/node*; do
    [ -e "$d/pid" ] || continue
    init=$(init_of "$(cat "$d/pid")")
    [ -n "$init" ] && kill -s RTMIN+4 "$init"
  done
  for d in "$LAB"/hosts/node*; do
    [ -d "$d" ] || continue
    host=$(basename "$d")
    if [ -e "$d/pid" ]; then
      pid=$(cat "$d/pid")
      for _ in $(seq 1 300); do
        kill -0 "$pid" 2>/dev/null || break
        sleep 0.1
      done
    fi
    # What did not end, or lost the shell that started it: all of it is in the host's own groups.
    if [ -e "$d/cgroups" ]; then
      for _ in 1 2 3; do
        left=$(host_pids "$d/cgroups")
        [ -z "$left" ] && break
        # shellcheck disable=SC2086 # several words
        kill -9 $left 2>/dev/null
        sleep 0.2
      done
    fi
    umount "$d/root" 2>/dev/null || umount -l "$d/root"
    ip netns del "$NET-${host#node}"
    [ -e "$d/cgroups" ] &&
      xargs -a "$d/cgroups" -I{} find {} -depth -type d -exec rmdir {} + 2>/dev/null
    mountpoint -q "$d/root" || rm -rf --one-file-system "$d"
  done
  ip netns del "$NET"
}

command=${1:?up, wait, down, ssh or run}
shift
case "$command" in
  up | down | run) "$command" "$@" ;;
  ssh) host_ssh "$@" ;;
  wait) wait_for "$@" ;;
  *)
    echo "lab.sh: no command $command" >&2
    exit 2
    ;;
esac
