#!/bin/bash
# get_debs.sh SUITE ARCH OUTDIR PACKAGE...: unpack packages (no dependencies) of another Debian suite or
# architecture into OUTDIR, with an apt state of its own and the mirror that this machine uses already.
set -eu
suite=$1 arch=$2 out=$3
shift 3
state=$(mktemp -d)
trap 'rm -rf "$state"' EXIT
mkdir -p "$state/lists/partial" "$state/cache/archives/partial" "$state/debs" "$out"
touch "$state/status"
mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' | grep -E '/debian/?$' | sort -u | head -1)
keys=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [arch=$arch signed-by=$keys] $mirror $suite main" >"$state/sources.list"
options=(-oAPT::Sandbox::User=root -oAPT::Architecture="$arch" -oAPT::Architectures="$arch"
    -oDir::Etc::SourceList="$state/sources.list" -oDir::Etc::SourceParts=/dev/null
    -oDir::State::Lists="$state/lists" -oDir::State::status="$state/status" -oDir::Cache="$state/cache")
apt-get -qq "${options[@]}" update
(cd "$state/debs" && apt-get -qq "${options[@]}" download "$@")
for deb in "$state"/debs/*.deb; do dpkg-deb -x "$deb" "$out"; done
