#!/bin/bash
# open_links.sh BOOT_PID: when the fake phone is asked to show a link, show it in this machine's Chromium,
# inside the phone's network (BOOT_PID is the `unshare ... boot.sh` process), until this script is killed.
# ADB_SERVER_SOCKET names the phone's adb server.
set -eu
boot=$1 phone=127.0.0.1:5600
profile=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; wait; rm -rf "$profile"' EXIT
trap exit TERM INT
adb -s $phone shell rm -f /data/local/tmp/.am
while sleep 0.5; do
    link=$(adb -s $phone shell 'cat /data/local/tmp/.am 2>/dev/null && rm /data/local/tmp/.am' | sed -n 's/.* -d \(http[^ ]*\)$/\1/p')
    if [ -n "$link" ]; then
        nsenter --target "$boot" --user --net --preserve-credentials \
            chromium --headless=new --no-sandbox --disable-dev-shm-usage --no-first-run \
            --window-size=390,844 --user-data-dir="$profile" "$link" >/dev/null 2>&1 &
    fi
done
