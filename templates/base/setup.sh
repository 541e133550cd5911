#!/bin/sh
# Runs inside the new root, without a network, after the packages and the overlay are in place.
set -eu

useradd --create-home --shell /bin/bash --uid 1000 user
install -d -m 0755 /etc/sudoers.d
echo 'user ALL=(ALL) NOPASSWD:ALL' > /etc/sudoers.d/user
chmod 0440 /etc/sudoers.d/user

# An agent's first `pip install` has to work: the sandbox is its own to change.
rm -f /usr/lib/python3*/EXTERNALLY-MANAGED

# Every copy gets its own at the start; one that is baked in would be shared.
: > /etc/machine-id
rm -f /var/lib/dbus/machine-id /etc/ssh/ssh_host_*

echo 'LANG=C.UTF-8' > /etc/default/locale
rm -rf /var/cache/apt/*.bin /var/lib/apt/lists/* /var/cache/debconf/*-old /var/log/*.log /tmp/*
