#!/bin/sh
# HiCache compiles its page hash at first use: that takes g++, ninja and the OpenSSL headers.
# With CPU_SETUP=1 also what the wheel of requirements/mooncake.txt loads.
# Installs what is missing when root on a Debian-like system, else says in one line what to install.
set -eu

missing=
command -v g++ >/dev/null || missing="$missing g++"
command -v ninja >/dev/null || missing="$missing ninja-build"
command -v make >/dev/null || missing="$missing make"
echo '#include <openssl/evp.h>' | cpp -E - >/dev/null 2>&1 || missing="$missing libssl-dev"
if [ -n "${CPU_SETUP:-}" ]; then
    PATH="$PATH:/sbin:/usr/sbin" ldconfig -p | grep -q 'libibverbs\.so\.1 ' || missing="$missing libibverbs1"
fi
for python in "$@"; do
    "$python" -c 'import ensurepip' 2>/dev/null || missing="$missing python3-venv"
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq </dev/null
    # shellcheck disable=SC2086  # a list of packages
    DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends $missing </dev/null
else
    echo "install these system packages, then try again:$missing" >&2
    exit 1
fi
