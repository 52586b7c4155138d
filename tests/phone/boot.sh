#!/bin/bash
# boot.sh ROOT SOCKET [SIZE]: boot the phone of make.sh until this process is killed.
# Inside namespaces of its own, so that neither the network nor this machine's binfmt sees it:
#   unshare -Urmnpf --kill-child -- boot.sh ROOT SOCKET
# A private adb server listens on the unix socket SOCKET, which is reached from outside with
# ADB_SERVER_SOCKET=localfilesystem:SOCKET. SIZE: of its storage. QEMU_CPU: qemu's name of the CPU that
# it emulates; CPUINFO: the file that is its /proc/cpuinfo, by which runtimes choose kernels too (one of
# another CPU has them run instructions that this lacks).
set -eu
root=$1 socket=$2 size=${3:-256m}
export HOME=$(mktemp -d)
ip link set lo up
mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
printf '%s' ":qemu-aarch64:M::$magic:$mask:${QEMU:-/usr/bin/qemu-aarch64-static}:FPC" >/proc/sys/fs/binfmt_misc/register
for each in proc dev sys; do mount --rbind "/$each" "$root/$each"; done
mount --bind "$CPUINFO" "$root/proc/cpuinfo"
mount -t tmpfs -o "size=$size" none "$root/data/local/tmp"
libraries=/opt/adbd_root/usr/lib/x86_64-linux-gnu
env -i PATH=/bin ADBD_PORT=5600 QEMU_CPU="$QEMU_CPU" HOME=/data/local/tmp \
    "$(command -v chroot)" "$root" "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries:$libraries/android" \
    /opt/adbd_root/usr/lib/android-sdk/platform-tools/adbd >/dev/null 2>&1 &
for _ in $(seq 100); do
    grep -q ':15E0 ' /proc/net/tcp /proc/net/tcp6 2>/dev/null && break # 5600
    sleep 0.05
done
export ADB_SERVER_SOCKET="localfilesystem:$socket"
adb connect 127.0.0.1:5600 >/dev/null # starts the server
echo booted
# "unplug" and "plug" on stdin; the end of it ends the phone.
while read -r order; do
    case $order in
    unplug) adb disconnect 127.0.0.1:5600 ;;
    plug) adb connect 127.0.0.1:5600 ;;
    esac
done
adb kill-server
