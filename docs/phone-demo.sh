#!/bin/sh
# The trained Q-MQA model here and on a phone, without one: `make phone-demo` runs it. The phone is an
# emulator (tests/phone): its row shows that the logits are right there, and no speed.
set -eu
OUT=${OUT:-out}/phone
PHONE=${EDGEQKV_FAKE_PHONE:-/var/tmp/edgeqkv-fake-phone}
show() { printf '\n$ %s\n' "$*"; }
say() { show "$@"; "$@"; }

[ -e "$PHONE/.made" ] || tests/phone/install.sh
rm -rf "$OUT"
mkdir -p "$OUT"
say edgeqkv import checkpoints/kjv-q-mqa.pt -o "$OUT/model" --tokenizer checkpoints/tokenizer.json
say edgeqkv export "$OUT/model" -b onnx,executorch -o "$OUT/q-mqa"

# Boot: its namespaces end with this script, and so does the phone.
sockets=$(mktemp -d)
mkfifo "$sockets/orders"
python -c 'from device_bench.devices.qemu import *; print(cpuinfo(CPUS["max"]))' >"$sockets/cpuinfo"
QEMU_CPU=max,sve=off,sme=off CPUINFO="$sockets/cpuinfo" \
    unshare -Urmnpf --kill-child -- tests/phone/boot.sh "$PHONE" "$sockets/adb" \
    <"$sockets/orders" >"$sockets/said" 2>"$sockets/log" &
boot=$! links=
trap 'kill $boot $links 2>/dev/null || :; rm -rf "$sockets"' EXIT
exec 3>"$sockets/orders"
until grep -q booted "$sockets/said"; do
    kill -0 $boot 2>/dev/null || { cat "$sockets/log"; exit 1; }
    sleep 0.2
done
export ADB_SERVER_SOCKET="localfilesystem:$sockets/adb"
say edgeqkv devices

onnx=$OUT/q-mqa/onnx executorch=$OUT/q-mqa/executorch
bench() {
    set -- "$@" -p 0 -n 0 -pg 64,16 -r 3 --processes 1 -o "$OUT/results.jsonl" --resume
    show edgeqkv bench "$@"
    edgeqkv bench "$@" --json >/dev/null # its own table is a part of the last one here
}
bench "$onnx" "$executorch"
bench "$onnx" "$executorch" --engine native
bench "$onnx" "$executorch" --device adb
# The phone's browser is Chromium here, in the phone's network, where adb reverse leads; so is the bench.
if command -v chromium >/dev/null; then
    tests/phone/open_links.sh "$boot" &
    links=$!
    inside="nsenter --target $boot --user --net --preserve-credentials"
    edgeqkv() { $inside "$(command -v env)" edgeqkv "$@"; }
    bench "$onnx" --device browser:adb -t 1
    unset -f edgeqkv
    kill "$links" 2>/dev/null || :
else
    echo "no row of a browser: apt-get install chromium" >&2
fi

# Three devices and two engines on one machine are what this table is about: its warnings of that, its
# other tables (memory, threads) and the doubts of a busy machine are in the file.
edgeqkv compare "$OUT/results.jsonl" >"$OUT/compare.txt" 2>&1
show edgeqkv compare "$OUT/results.jsonl"
sed '/^pp64/,/^$/!d' "$OUT/compare.txt"
echo "More tables, and every warning: $OUT/compare.txt"
