#!/bin/bash
# install.sh: what the fake phone needs, on Debian as root, and the phone itself (see make.sh).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
packages=(adb qemu-user-static gcc-aarch64-linux-gnu g++-aarch64-linux-gnu iproute2 util-linux)
if ! dpkg-query -W "${packages[@]}" >/dev/null 2>&1; then
    apt-get -qq update
    apt-get -qq install -y --no-install-recommends "${packages[@]}" >/dev/null
fi
"$here/make.sh" "${EDGEQKV_FAKE_PHONE:-/var/tmp/edgeqkv-fake-phone}"
