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
#   ARCHIVE   file that the image is saved to, for a host that reaches no registry
#   ENGINE    docker, podman or buildah
set -euo pipefail
cd "$(dirname "$0")/.."

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
[ -z "${BASE:-}" ] || arguments+=(--build-arg "BASE=$BASE")
[ -z "${BUILDER:-}" ] || arguments+=(--build-arg "BUILDER=$BUILDER")
[ -z "${WHEELS:-}" ] || arguments+=(--build-context "wheels=$WHEELS")
[ -z "${PIP_CONF:-}" ] || arguments+=(--secret "id=pip.conf,src=$PIP_CONF")
[ -z "${CA_BUNDLE:-}" ] || arguments+=(--secret "id=ca-certificates,src=$CA_BUNDLE")

say "building $tag ($version, $revision) with $engine"
case "$engine" in
  docker) DOCKER_BUILDKIT=1 docker build "${arguments[@]}" . ;;
  podman | buildah)
    # HEALTHCHECK is of Docker's format. Layers are kept for the next build.
    "$engine" build --format docker --layers --timestamp "$SOURCE_DATE_EPOCH" \
      ${ISOLATION:+--isolation "$ISOLATION"} "${arguments[@]}" .
    ;;
  *) die "ENGINE is docker, podman or buildah, not $engine" ;;
esac

mkdir -p build/images
sbom=build/images/ddtree-vllm-$version-$target.cdx.json
if [ "$engine" = buildah ]; then
  container=$(buildah from --pull-never "$tag")
  trap 'buildah rm "$container" >/dev/null' EXIT
  buildah run ${ISOLATION:+--isolation "$ISOLATION"} --user 0 "$container" -- \
    python3 -IS - "$versioned" "$SOURCE_DATE_EPOCH" <images/sbom.py >"$sbom"
  bytes=$(buildah inspect --type image --format '{{.Docker.Size}}' "$tag" 2>/dev/null || echo 0)
  [ "$bytes" != 0 ] || bytes=$(buildah images --json "$tag" | sed -n 's/.*"size": "\(.*\)".*/\1/p' | head -1)
else
  "$engine" run --rm --interactive --network none --user 0 --entrypoint /usr/bin/python3 "$tag" \
    -IS - "$versioned" "$SOURCE_DATE_EPOCH" <images/sbom.py >"$sbom"
  bytes=$("$engine" image inspect --format '{{.Size}}' "$tag")
fi
[[ $bytes =~ ^[0-9]+$ ]] && bytes="$((bytes / 1000000)) MB"
say "$tag: $bytes; SBOM: $sbom"

if [ -n "${ARCHIVE:-}" ]; then
  mkdir -p "$(dirname "$ARCHIVE")"
  rm -f "$ARCHIVE"
  case "$engine" in
    docker) docker save --output "$ARCHIVE" "$tag" "$versioned" ;;
    podman) podman save --multi-image-archive --output "$ARCHIVE" "$tag" "$versioned" ;;
    buildah) buildah push --quiet --disable-compression "$tag" "docker-archive:$ARCHIVE:$versioned" ;;
  esac
  say "$ARCHIVE: $(($(stat -c %s "$ARCHIVE") / 1000000)) MB"
fi
