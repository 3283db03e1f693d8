#!/bin/sh
# System packages for `make`: `system.sh blas` and `system.sh browser`. Never fails: what cannot be installed
# is named, and the caller goes on without it.

try_apt() { # package, what it is for, what to do elsewhere
    if command -v apt-get >/dev/null; then
        if [ "$(id -u)" = 0 ]; then root=""; elif sudo -n true 2>/dev/null; then root="sudo -n"; else root=none; fi
        if [ "$root" != none ]; then
            export DEBIAN_FRONTEND=noninteractive
            options="-y -qq --no-install-recommends -o DPkg::Lock::Timeout=120"
            $root apt-get install $options "$1" >/dev/null 2>&1 && return
            $root apt-get update -qq >/dev/null 2>&1
            $root apt-get install $options "$1" >/dev/null 2>&1 && return
            echo "note: apt-get could not install $1 ($2)" >&2
            return
        fi
    fi
    echo "note: $2: $3" >&2
}

case "$1" in
blas)
    [ "$(uname -s)" = Linux ] || exit 0
    ls /usr/lib/*/openblas-*/libopenblas.so.0 /usr/lib64/libopenblas*.so* /usr/lib/libopenblas.so* 2>/dev/null | grep -q . && exit 0
    try_apt libopenblas0-pthread "mlx is 2 to 40 times faster on a CPU with OpenBLAS" "sudo apt-get install libopenblas0-pthread, or your system's openblas; \`mlxd doctor\` says more"
    ;;
browser)
    command -v chromium >/dev/null && exit 0
    try_apt chromium "the tests of the page need Chromium" "install it, or set CHROMIUM=/path/to/it"
    ;;
*)
    echo "usage: system.sh blas|browser" >&2
    exit 2
    ;;
esac
exit 0
