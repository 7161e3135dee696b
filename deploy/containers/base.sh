#!/bin/sh
# A base for both images where no registry can be reached: Debian's packages, by debootstrap, as a local image of buildah.
#   sh base.sh NAME [OPTIONS OF debootstrap]
set -eu
name=$1
shift
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv "$@" bookworm "$root"
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
container=$(buildah from scratch)
buildah add -q "$container" "$root" /
buildah commit -q --rm "$container" "$name"
