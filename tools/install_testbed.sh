#!/usr/bin/env bash
# What the cluster tests need from the distribution: sshd, SLURM, Docker, busybox. No daemon is started or left running.
# tools/install_testbed.sh [--with-accounting]    (also MariaDB and slurmdbd, for sacct and accounts)
set -euo pipefail
# command:package
wanted=(sshd:openssh-server ssh:openssh-client ip:iproute2 slurmctld:slurm-wlm slurmd:slurm-wlm munged:munge
    dockerd:docker.io docker:docker.io runc:runc busybox:busybox-static)
case "${1:-}" in
    "") ;;
    --with-accounting) wanted+=(mariadbd:mariadb-server slurmdbd:slurmdbd) ;;
    *)
        echo "install_testbed: unknown option $1; the only one is --with-accounting" >&2
        exit 2
        ;;
esac
PATH=$PATH:/usr/sbin:/sbin
missing=()
for pair in "${wanted[@]}"; do
    command -v "${pair%%:*}" >/dev/null || [[ " ${missing[*]} " == *" ${pair#*:} "* ]] || missing+=("${pair#*:}")
done
[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" -ne 0 ]; then
    echo "install_testbed: not root, and these packages are missing: ${missing[*]}" >&2
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
apt-get install -y -q --no-install-recommends "${missing[@]}"
