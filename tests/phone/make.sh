#!/bin/bash
# make.sh DIR: build the folder that boot.sh boots as an arm64 phone: a busybox userland of that
# machine, Android's getprop and dumpsys as shims, and Debian's adbd beside it. Needs apt and qemu.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$1
[ ! -e "$root/.made" ] || exit 0
mkdir -p "$root"/{bin,etc,proc,dev,sys,tmp,opt,system/bin,data/local/tmp}
arm=$(mktemp -d)
trap 'rm -rf "$arm"' EXIT
"$here/get_debs.sh" bookworm arm64 "$arm" busybox-static
cp "$arm/bin/busybox" "$root/bin/busybox"
"$here/get_debs.sh" trixie amd64 "$root/opt/adbd_root" adbd android-libbase android-libboringssl \
    android-libcutils android-liblog libbrotli1 libc6 libgcc-s1 liblz4-1 libprotobuf32t64 libstdc++6 \
    libsystemd0 libzstd1 zlib1g libcap2 libxxhash0
for applet in $(qemu-aarch64-static "$root/bin/busybox" --list); do
    [ "$applet" = busybox ] || ln -sf busybox "$root/bin/$applet"
done
ln -sf /bin/sh "$root/system/bin/sh"
cat >"$root/bin/getprop" <<'SH'
#!/bin/sh
case "$1" in
ro.product.model) echo "Fake Phone" ;;
ro.product.cpu.abi) cat /data/local/tmp/.abi 2>/dev/null || echo arm64-v8a ;;
ro.build.version.release) echo 14 ;;
ro.soc.model) echo qemu-user ;;
*) echo ;;
esac
SH
cat >"$root/bin/dumpsys" <<'SH'
#!/bin/sh
case "$1" in
battery) printf 'Current Battery Service state:\n  AC powered: false\n  USB powered: true\n  level: 83\n  scale: 100\n  temperature: 271\n' ;;
thermalservice) printf 'IsStatusOverride: false\nThermal Status: 1\nCurrent temperatures from HAL:\n\tTemperature{mValue=36.5, mType=0, mName=CPU0, mStatus=0}\n\tTemperature{mValue=41.2, mType=0, mName=CPU1, mStatus=1}\n\tTemperature{mValue=30.0, mType=2, mName=battery, mStatus=0}\n' ;;
*) exit 1 ;;
esac
SH
# Opening a link is left to the test, which reads here what was asked.
printf '#!/bin/sh\necho "$*" >/data/local/tmp/.am\n' >"$root/bin/am"
chmod +x "$root/bin/getprop" "$root/bin/dumpsys" "$root/bin/am"
touch "$root/.made"
