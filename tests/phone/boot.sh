#!/bin/bash
# boot.sh ROOT SOCKET [SIZE]: boot the phone of make.sh until this process is killed.
# Inside namespaces of its own, so that neither the network nor this machine's binfmt sees it:
#   unshare -Urmnpf --kill-child -- boot.sh ROOT SOCKET
# A private adb server listens on the unix socket SOCKET, which is reached from outside with
# ADB_SERVER_SOCKET=localfilesystem:SOCKET. SIZE: of its storage. QEMU_CPU: the CPU it emulates, one
# of cortex-a53, cortex-a76 and the default, everything that qemu has but vectors of any length.
set -eu
root=$1 socket=$2 size=${3:-256m}
export QEMU_CPU=${QEMU_CPU:-max,sve=off,sme=off}
export HOME=$(mktemp -d)
# Runtimes choose kernels by /proc/cpuinfo too, part before features: one of another CPU than the
# emulated has them run instructions that this lacks. Debian 12's qemu shows the host's.
common="fp asimd aes pmull sha1 sha2 crc32" # what each adds is what qemu sets in AT_HWCAP
case $QEMU_CPU in
cortex-a53) id="0x41 0x0 0xd03 4" features="$common cpuid" ;;
cortex-a76) id="0x41 0x4 0xd0b 1" features="$common atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp" ;;
max,sve=off,sme=off)
    id="0x00 0x0 0x051 0"
    features="$common atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3 sm3 sm4 asimddp"
    features="$features sha512 asimdfhm ilrcpc flagm sb paca pacg dcpodp flagm2 frint i8mm bf16 rng bti mte"
    ;;
*) echo "no cpuinfo for QEMU_CPU $QEMU_CPU" >&2 && exit 2 ;;
esac
for cpu in 0 1; do
    # shellcheck disable=SC2086 # id is four words
    printf 'processor\t: %s\nBogoMIPS\t: 100.00\nFeatures\t: %s\nCPU implementer\t: %s\nCPU architecture: 8\nCPU variant\t: %s\nCPU part\t: %s\nCPU revision\t: %s\n\n' \
        "$cpu" "$features" $id
done >"$HOME/cpuinfo"
ip link set lo up
mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
printf '%s' ":qemu-aarch64:M::$magic:$mask:${QEMU:-/usr/bin/qemu-aarch64-static}:FPC" >/proc/sys/fs/binfmt_misc/register
for each in proc dev sys; do mount --rbind "/$each" "$root/$each"; done
mount --bind "$HOME/cpuinfo" "$root/proc/cpuinfo"
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
