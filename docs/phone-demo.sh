#!/bin/sh
# The trained Q-MQA model here and on a phone, without one: `make phone-demo` runs it. The phone is an
# emulator (tests/phone): its row shows that the logits are right there, and no speed.
set -eu
OUT=${OUT:-out}/phone
PHONE=${EDGEQKV_FAKE_PHONE:-/var/tmp/edgeqkv-fake-phone}
say() { printf '\n$ %s\n' "$*"; "$@"; }

[ -e "$PHONE/.made" ] || tests/phone/install.sh
rm -rf "$OUT"
mkdir -p "$OUT"
say edgeqkv import checkpoints/kjv-q-mqa.pt -o "$OUT/model" --tokenizer checkpoints/tokenizer.json
say edgeqkv export "$OUT/model" -b onnx -o "$OUT/q-mqa"

# Boot: its namespaces end with this script, and so does the phone.
sockets=$(mktemp -d)
mkfifo "$sockets/orders"
unshare -Urmnpf --kill-child -- tests/phone/boot.sh "$PHONE" "$sockets/adb" \
    <"$sockets/orders" >"$sockets/said" 2>"$sockets/log" &
boot=$!
trap 'kill $boot 2>/dev/null; rm -rf "$sockets"' EXIT
exec 3>"$sockets/orders"
for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
    grep -q booted "$sockets/said" && break
    kill -0 $boot 2>/dev/null || { cat "$sockets/log"; exit 1; }
    sleep 0.5
done
export ADB_SERVER_SOCKET="localfilesystem:$sockets/adb"
say edgeqkv devices

bench() { say edgeqkv bench "$OUT/q-mqa/onnx" -p 0 -n 0 -pg 64,16 -r 3 --processes 1 -o "$OUT/results.jsonl" --resume "$@" --json >/dev/null; }
: >"$OUT/results.jsonl"
bench
bench --device local --engine native
bench --device adb
# The browser row goes here, over `adb reverse`: bench --device browser ...

say edgeqkv compare "$OUT/results.jsonl"
