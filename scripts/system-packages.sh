#!/bin/sh
# Installs the system packages that posttrain can use and pip cannot bring: bubblewrap, the sandbox's first choice.
# Never fails: without them the sandbox takes Landlock where the kernel has it, or says what is missing when it is used.
set -u

if command -v bwrap >/dev/null 2>&1; then
    exit 0
fi
if ! command -v apt-get >/dev/null 2>&1; then
    echo "note: bubblewrap (bwrap) is not installed; the sandbox for model-written code prefers it. Install it with your package manager."
    exit 0
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "note: for the sandbox's strongest form run once: sudo apt-get install -y bubblewrap"
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
if apt-get install -y -qq bubblewrap >/dev/null 2>&1 ||
    { apt-get update -qq >/dev/null 2>&1 && apt-get install -y -qq bubblewrap >/dev/null 2>&1; }; then
    echo "installed bubblewrap"
else
    echo "note: bubblewrap could not be installed (no network?); later: apt-get install -y bubblewrap"
fi
exit 0
