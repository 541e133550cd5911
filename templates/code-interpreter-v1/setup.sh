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

# scipy depends on a compiler for numerical code (pythran) and that on Boost's headers and on a
# static BLAS: 200 MB that nothing here needs. `apt-get install --reinstall` brings them back.
rm -rf /usr/include/boost
rm -f /usr/lib/x86_64-linux-gnu/openblas-pthread/*.a /usr/lib/*/lib*san.a
# The libraries' own tests.
find /usr/lib/python3/dist-packages -type d -name tests -not -path '*/numpy/*' \
  -not -path '*/sklearn/*' -prune -exec rm -rf {} +
rm -rf /usr/lib/python3/dist-packages/sympy/integrals/rubi
find /usr/lib/python3*/config-* -name '*.a' -delete

rm -rf /var/cache/apt/*.bin /var/lib/apt/lists/* /var/cache/debconf/*-old /var/log/*.log /tmp/*
