#!/usr/bin/env bash
# What the tests need from the distribution (Debian and its kin), as root. No daemon is started or left running.
# tools/install_testbed.sh [unit] [cluster] [browser]        without a word: all of them
# unit: shellcheck and openssl; cluster: sshd, SLURM with accounting, Docker, Podman, Apptainer, gcc; browser: chromium.
set -euo pipefail
# part:command:packages
wanted=(unit:shellcheck:shellcheck unit:openssl:openssl
    cluster:sshd:openssh-server cluster:ssh:openssh-client cluster:ip:iproute2 cluster:busybox:busybox-static
    cluster:/usr/bin/python3:python3 cluster:cc:gcc+libc6-dev
    cluster:systemd-analyze:systemd cluster:crontab:cron
    cluster:slurmctld:slurm-wlm cluster:slurmd:slurm-wlm cluster:munged:munge
    cluster:mariadbd:mariadb-server cluster:slurmdbd:slurmdbd
    cluster:dockerd:docker.io cluster:docker:docker.io cluster:runc:runc
    cluster:podman:podman cluster:catatonit:catatonit cluster:bindfs:bindfs
    browser:chromium:chromium+fonts-dejavu-core)
[ $# -gt 0 ] || set -- unit cluster browser
PATH=$PATH:/usr/sbin:/sbin
missing=()
for part in "$@"; do
    [[ " ${wanted[*]}" == *" $part:"* ]] || {
        echo "install_testbed: there is no part $part; parts are unit, cluster and browser" >&2
        exit 2
    }
    for entry in "${wanted[@]}"; do
        IFS=: read -r of command packages <<<"$entry"
        [ "$of" != "$part" ] || command -v "$command" >/dev/null || missing+=("${packages//+/ }")
    done
done
[[ " $* " != *" cluster "* ]] || apptainer=${0%/*}/install_apptainer.sh
if [ ${#missing[@]} -eq 0 ]; then
    exec "${apptainer:-true}"
fi
# shellcheck disable=SC2206  # an entry may be two packages
missing=(${missing[*]})
if [ "$(id -u)" -ne 0 ]; then
    echo "install_testbed: not root, and these packages are missing: ${missing[*]}" >&2
    exit 1
fi
if ! command -v apt-get >/dev/null; then
    echo "install_testbed: there is no apt-get here; install what these Debian packages hold: ${missing[*]}" >&2
    exit 1
fi

# invoke-rc.d asks this file; 101 means "start nothing". A policy that was there before comes back afterwards.
policy=/usr/sbin/policy-rc.d
restore() {
    rm -f "$policy"
    [ ! -e "$policy.before-testbed" ] || mv "$policy.before-testbed" "$policy"
}
[ ! -e "$policy" ] || [ -e "$policy.before-testbed" ] || mv "$policy" "$policy.before-testbed"
trap restore EXIT
printf '#!/bin/sh\nexit 101\n' >"$policy"
chmod 755 "$policy"
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
apt-get install -y -q --no-install-recommends -o DPkg::Lock::Timeout=300 "${missing[@]}"
"${apptainer:-true}"
