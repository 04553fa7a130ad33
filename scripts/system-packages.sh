#!/bin/sh
# Installs the system packages that posttrain can use and pip cannot bring: bubblewrap, the sandbox's first choice. With
# the word `chromium` that browser instead, in which the tests of the documentation open its pages.
# Never fails: without bubblewrap the sandbox takes Landlock where the kernel has it, or says what is missing when it is
# used. Tests that need a missing program are skipped with its name, and fail under CI (tests/needed.py).
set -u

package="${1:-bubblewrap}"
case "$package" in
bubblewrap) program=bwrap why="the sandbox for model-written code prefers it" ;;
*) program="$package" why="the tests of the documentation open pages in it" ;;
esac
if command -v "$program" >/dev/null 2>&1; then
    exit 0
fi
if ! command -v apt-get >/dev/null 2>&1; then
    echo "note: $package is not installed; $why. Install it with your package manager."
    exit 0
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "note: $why; run once: sudo apt-get install -y $package"
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
if apt-get install -y -qq "$package" >/dev/null 2>&1 ||
    { apt-get update -qq >/dev/null 2>&1 && apt-get install -y -qq "$package" >/dev/null 2>&1; }; then
    echo "installed $package"
else
    echo "note: $package could not be installed (no network?); later: apt-get install -y $package"
fi
exit 0
