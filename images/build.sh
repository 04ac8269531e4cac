#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds one image with docker, podman or buildah, whichever is there; writes its SBOM and says how large it is.
#
# Usage: images/build.sh cpu|gpu
#
#   BASE      image to build on, instead of the one that images/*/Containerfile names
#   BUILDER   gpu: image that the wheel is built in
#   WHEELS    folder of wheels that pip looks at before its indexes
#   PIP_CONF  pip's configuration for the build, such as an index; in no layer
#   CA_BUNDLE certificates for the build, where the network has its own authority; in no layer
#   TAG       ddtree-vllm:cpu or ddtree-vllm:gpu; VERSION-cpu is tagged too
#   ARCHIVE   file that the image is saved to, for a host that reaches no registry; its SBOM lies beside it
#   NO_CACHE  1: every layer is built anew
#   ENGINE    docker, podman or buildah
#   ISOLATION of buildah's and podman's RUN steps, such as chroot
set -euo pipefail
cd "$(dirname "$0")/.."
# What the build makes is for every user, whoever builds.
umask 022

say() { printf 'image: %s\n' "$*"; }
die() {
  printf 'image: %s\n' "$*" >&2
  exit 1
}

target=${1:-cpu}
[ -f "images/$target/Containerfile" ] || die "there is no image $target: cpu or gpu"
engine=${ENGINE:-}
if [ -z "$engine" ]; then
  for candidate in docker podman buildah; do
    # A program of that name is not enough: docker needs its daemon.
    if "$candidate" info >/dev/null 2>&1; then
      engine=$candidate
      break
    fi
  done
fi
[ -n "$engine" ] || die "needs docker with its daemon, podman or buildah"
# Of podman-docker, which would leave out the health check.
if [ "$engine" = docker ] && docker --version | grep -qi podman; then
  engine=podman
fi
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' ddtree_vllm/__init__.py)
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
[ -z "$(git status --porcelain 2>/dev/null)" ] || revision=$revision-dirty
# The time of the last commit, not of the build: the same sources give the same image.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}
export SOURCE_DATE_EPOCH
tag=${TAG:-ddtree-vllm:$target}
versioned=ddtree-vllm:$version-$target

arguments=(
  --file "images/$target/Containerfile"
  --tag "$tag" --tag "$versioned"
  --build-arg "SOURCE_DATE_EPOCH=$SOURCE_DATE_EPOCH"
  --build-arg "VERSION=$version" --build-arg "REVISION=$revision"
)
[ -z "${NO_CACHE:-}" ] || arguments+=(--no-cache)
[ -z "${BASE:-}" ] || arguments+=(--build-arg "BASE=$BASE")
[ -z "${BUILDER:-}" ] || arguments+=(--build-arg "BUILDER=$BUILDER")
[ -z "${WHEELS:-}" ] || arguments+=(--build-context "wheels=$WHEELS")
[ -z "${PIP_CONF:-}" ] || arguments+=(--secret "id=pip.conf,src=$PIP_CONF")
[ -z "${CA_BUNDLE:-}" ] || arguments+=(--secret "id=ca-certificates,src=$CA_BUNDLE")

say "building $tag ($version, $revision) with $engine"
case "$engine" in
  docker)
    if ! docker buildx version >/dev/null 2>&1; then
      [ -z "${WHEELS:-}" ] || die "WHEELS needs docker's buildx: install docker-buildx-plugin, or leave WHEELS out"
      # Since 23, docker builds by that plugin alone.
      client=$(docker version --format '{{.Client.Version}}')
      ((${client%%.*} < 23)) ||
        die "docker $client needs its buildx to build: install docker-buildx-plugin, or choose ENGINE=podman or buildah"
      DOCKER_BUILDKIT=1 docker build "${arguments[@]}" .
    elif docker info --format '{{json .DriverStatus}}' | grep -q io.containerd.snapshotter; then
      # Through a file: BuildKit gives files a time on their way out, and refuses to where it unpacks them itself.
      # An attestation would hold the time of the build.
      mkdir -p build/images
      file=$(mktemp build/images/docker.XXXXXX.tar)
      trap 'rm -f "$file"' EXIT
      docker buildx build --provenance=false --output "type=docker,dest=$file,rewrite-timestamp=true" "${arguments[@]}" .
      docker load --quiet --input "$file"
      rm "$file"
    else
      docker buildx build --provenance=false --load "${arguments[@]}" .
    fi
    ;;
  podman | buildah)
    # Newer ones refuse --timestamp beside SOURCE_DATE_EPOCH, and have options of their own for it.
    times=(--timestamp "$SOURCE_DATE_EPOCH")
    if "$engine" build --help 2>&1 | grep -q -e --rewrite-timestamp; then
      times=(--source-date-epoch "$SOURCE_DATE_EPOCH" --rewrite-timestamp)
    fi
    # HEALTHCHECK is of Docker's format. Layers are kept for the next build.
    "$engine" build --format docker --layers "${times[@]}" \
      ${ISOLATION:+--isolation "$ISOLATION"} "${arguments[@]}" .
    ;;
  *) die "ENGINE is docker, podman or buildah, not $engine" ;;
esac

# Runs a program of an image on it as it is, as root and without a network: inside IMAGE PROGRAM WORD...
inside() (
  image=$1 program=$2
  shift 2
  if [ "$engine" = buildah ]; then
    container=$(buildah from --pull-never "$image")
    trap 'buildah rm "$container" >/dev/null' EXIT
    buildah run ${ISOLATION:+--isolation "$ISOLATION"} --user 0 "$container" -- "$program" "$@"
  else
    "$engine" run --rm --interactive --network none --pull never --no-healthcheck --user 0 \
      --entrypoint "$program" "$image" "$@"
  fi
)

# Bytes of an image's files, of its layers with docker and podman; nothing where the image is not here.
bytes_of() {
  if [ "$engine" = buildah ]; then
    inside "$1" /bin/sh -c 'du -sxb --exclude=/proc --exclude=/sys --exclude=/dev --exclude=/run / | cut -f 1'
  else
    "$engine" image inspect --format '{{.Size}}' "$1"
  fi 2>/dev/null </dev/null || true
}

mkdir -p build/images
sbom=build/images/ddtree-vllm-$version-$target.cdx.json
inside "$tag" /usr/bin/python3 -IS - "$versioned" "$SOURCE_DATE_EPOCH" "$revision" <images/sbom.py >"$sbom"
written=$(inside "$tag" /usr/bin/stat --format %Y /opt/ddtree/device </dev/null)
if [ "$written" != "$SOURCE_DATE_EPOCH" ]; then
  say "not repeatable: files carry the time of the build. Docker gives them the commit's with buildx 0.13 and the" \
    "containerd image store (\"features\": {\"containerd-snapshotter\": true} in daemon.json); podman and buildah always do"
fi

base=${BASE:-$(sed -n 's/^ARG BASE=//p' "images/$target/Containerfile")}
bytes=$(bytes_of "$tag")
added=
if [ "$engine" = docker ] && [ "$target" = gpu ]; then
  # Docker keeps no name for the base that it has built on. Ours are the newest layers, one for each instruction.
  ours=$(awk '/^FROM /{n = 0; next} /^[A-Z]+ /{n++} END{print n}' "images/$target/Containerfile")
  added=$(docker history --human=false --format '{{.Size}}' "$tag" | awk -v n="$ours" 'NR <= n{sum += $1} END{print sum + 0}')
else
  below=$(bytes_of "$base")
  [ -z "$below" ] || added=$((bytes - below))
fi
if [ -n "$added" ]; then
  over="$((added / 100000 / 10)).$((added / 100000 % 10)) MB over $base"
else
  over="the size of $base is not known: pull it to compare"
fi
say "$tag: $((bytes / 1000000)) MB, $over; SBOM: $sbom"
# vLLM's image is on the hosts already: what an upgrade of ours moves stays small.
if [ "$target" = gpu ] && [ -n "$added" ] && [ "$added" -gt 100000000 ]; then
  # Nothing that is deployed by these names may be it.
  if [ "$engine" = buildah ]; then
    buildah rmi "$tag" "$versioned" >/dev/null
  else
    "$engine" image rm "$tag" "$versioned" >/dev/null
  fi
  die "the GPU image may add 100 MB to its base, and adds $((added / 1000000))"
fi

if [ -n "${ARCHIVE:-}" ]; then
  mkdir -p "$(dirname "$ARCHIVE")"
  rm -f "$ARCHIVE"
  case "$engine" in
    docker) docker save --output "$ARCHIVE" "$tag" "$versioned" ;;
    # By name: what podman saves is called localhost/..., and Docker would load it as that.
    podman) podman push --quiet "$tag" "docker-archive:$ARCHIVE:$versioned" ;;
    buildah) buildah push --quiet --disable-compression "$tag" "docker-archive:$ARCHIVE:$versioned" ;;
  esac
  cp "$sbom" "${ARCHIVE%.tar}.cdx.json"
  say "$ARCHIVE: $(($(stat -c %s "$ARCHIVE") / 1000000)) MB"
fi
