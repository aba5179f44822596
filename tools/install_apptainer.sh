#!/usr/bin/env bash
# Apptainer for the cluster tests, as root. Debian's package where the configured suites have one. Debian 12 has none, and
# unstable's wants a newer C library: then package and library are unpacked from the mirror that apt already uses into a
# folder of their own, where the programs load that library. Nothing else of the system changes.
# Where none is to be had, the reason is written beside the folder, and the tests are skipped with it.
set -euo pipefail
folder=/opt/corral-testbed/apptainer
suite=sid
PATH=$PATH:/usr/sbin:/sbin
if command -v apptainer >/dev/null || "$folder/usr/bin/apptainer" version >/dev/null 2>&1; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "install_apptainer: not root, and Apptainer is missing" >&2
    exit 1
fi
mkdir -p "$(dirname "$folder")"
unavailable() {
    echo "$1" >"$folder.unavailable"
    echo "install_apptainer: $1: its tests will be skipped" >&2
    exit 0
}
command -v apt-get >/dev/null || unavailable "there is no apt-get on this machine"
export DEBIAN_FRONTEND=noninteractive
if apt-cache policy apptainer | grep -q 'Candidate: [0-9]'; then
    exec apt-get install -y -q --no-install-recommends -o DPkg::Lock::Timeout=300 apptainer
fi
# shellcheck disable=SC2016  # apt-get's own variable
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | head -n 1)
[ -n "$mirror" ] || unavailable "apt is configured with no mirror of Debian"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
keys=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$keys] $mirror $suite main" >"$work/sources.list"
cat >"$work/apt.conf" <<CONF
Dir::Etc::sourcelist "$work/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::State::lists "$work/lists";
Dir::State::status "/dev/null";
Dir::Cache "$work/cache";
APT::Sandbox::User "root";
CONF
newer() { APT_CONFIG=$work/apt.conf "$@"; }
newer apt-get update -q || unavailable "apt's mirror of Debian has no suite $suite"
newer apt-cache show apptainer >/dev/null 2>&1 || unavailable "neither the configured suites nor $suite have the package apptainer"
mapfile -t libraries < <(newer apt-cache depends apptainer | sed -n 's/^ *Depends: \(lib[^ ]*\)$/\1/p')
(cd "$work" && newer apt-get download -q apptainer "${libraries[@]}") || unavailable "the packages of $suite could not be downloaded"
apt-get install -y -q --no-install-recommends -o DPkg::Lock::Timeout=300 patchelf squashfs-tools

for package in "$work"/*.deb; do
    dpkg-deb --extract "$package" "$work/root"
done
cd "$work/root"
library=$(dirname usr/lib/*/apptainer)
loader=$(cd "$library" && ls ld-linux*.so.*)
for program in usr/bin/apptainer "$library/apptainer/bin/starter"; do
    patchelf --force-rpath --set-interpreter "$folder/$library/$loader" --set-rpath "$folder/$library" "$program"
done
# away from its usual place it looks for these beside its programs, and its starter one folder higher than theirs
mv etc var usr/
ln -s ../etc ../var usr/lib/
# a virtual machine may deny root a capability, and then asking for all of them fails
sed -i 's/^root default capabilities = .*/root default capabilities = no/' usr/etc/apptainer/apptainer.conf
rm -rf "$folder"
chmod 755 "$work/root"
mv "$work/root" "$folder"
"$folder/usr/bin/apptainer" version >/dev/null || unavailable "the package of $suite does not run here"
rm -f "$folder.unavailable"
