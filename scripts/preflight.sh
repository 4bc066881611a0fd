#!/usr/bin/env bash
# Names everything this machine lacks, with how to get it; prints the path of a usable Python on success.
# Usage: preflight.sh DIRECTORY_OF_ENVIRONMENTS NAME_PREFIX_OF_THE_ENVIRONMENT
set -euo pipefail

home=$1
prefix=$2
need_gb=16
problems=()

# Tried by running them: version managers leave commands of this name that only print an error.
find_python() {
    local candidate
    for candidate in ${D3D_PYTHON:-python3.11 python3.12 python3}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

if [[ "$(uname -s) $(uname -m)" != "Linux x86_64" ]]; then
    problems+=("Linux on x86_64: this is $(uname -s) on $(uname -m), for which the pinned wheels do not exist.")
fi

if python=$(find_python); then
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        problems+=("Python's venv module for $python: sudo apt-get install python3-venv")
    fi
else
    problems+=("Python 3.11 or 3.12 (tried ${D3D_PYTHON:-python3.11, python3.12, python3}; sglang 0.5.23 cannot be \
installed on 3.13): sudo apt-get install python3 python3-venv, or set D3D_PYTHON to one")
fi

if ! command -v g++ >/dev/null; then
    problems+=("A C++ compiler: sudo apt-get install g++")
fi

if ! command -v flock >/dev/null; then
    problems+=("The flock command: sudo apt-get install util-linux")
fi

# Space is needed only to build an environment; what an interrupted build left behind will be removed first.
mkdir -p "$home"
if ! compgen -G "$home/$prefix*/.complete" >/dev/null; then
    free_kb=$(df -Pk "$home" | awk 'NR == 2 {print $4}')
    for leftover in "$home/$prefix"*/; do
        [[ -d $leftover ]] && free_kb=$((free_kb + $(du -sk "$leftover" | cut -f1)))
    done
    if ((free_kb < need_gb * 1000 * 1000)); then
        problems+=("$need_gb GB of free disk at $home: there are $((free_kb / 1000 / 1000)) GB. Make room, or set \
D3D_HOME to a folder on a larger disk")
    fi
fi

if ((${#problems[@]})); then
    echo "This machine lacks:" >&2
    printf '  - %s\n' "${problems[@]}" >&2
    exit 1
fi
echo "$python"
