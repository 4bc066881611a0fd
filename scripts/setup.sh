#!/usr/bin/env bash
# Makes the environment the Makefile's commands run in, or finds it made.
#
#   - The dependencies: a virtual environment outside the tree, keyed by requirements.lock and the Python version,
#     shared by all checkouts and reused while the lock is unchanged.
#   - This checkout: build/env, put before them by PYTHONPATH. It holds the project's metadata (SGLang finds the
#     plugin by its entry point), the `d3d` command, and `activate`, the file to source.
#
# D3D_HOME   where environments and models lie (default: ~/.cache/d3d-sglang)
# D3D_PYTHON the Python to build with (default: the first of python3.11, python3.12, python3 that fits)
# D3D_VENV   use this virtual environment as it is, and build none
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

checkout=$PWD
overlay=$checkout/build/env
home=${D3D_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/d3d-sglang}

say() { echo "[setup] $*"; }

# One build at a time. The lock is inherited by pip, so it lasts as long as anything writes to the environment.
take_lock() {
    exec 9>"$1"
    if ! flock --nonblock 9; then
        say "waiting for another setup to finish"
        flock 9
    fi
}

show_progress() { # $1: pid of pip, $2: its log, $3: the environment
    local total fetched installed started=$SECONDS
    total=$(grep -c '==' requirements.lock)
    while kill -0 "$1" 2>/dev/null; do
        for _ in {1..10}; do
            sleep 1
            kill -0 "$1" 2>/dev/null || return 0
        done
        fetched=$(grep -cE '^(Collecting|Processing) ' "$2" || true)
        installed=$(find "$3/lib" -maxdepth 3 -name '*.dist-info' | wc -l)
        say "$((SECONDS - started)) s: $fetched of $total packages fetched, $installed installed"
    done
}

build_venv() { # $1: Python, $2: where
    local log=$2/install.log pip_pid
    say "building $2 (a few minutes and 11 GB, once)"
    rm -rf "$2"
    "$1" -m venv "$2"
    # Wheels are unpacked from inside the environment: /tmp is often a small file system in memory.
    mkdir "$2/tmp"
    # The lock is complete, so pip has nothing to resolve. DeepSpeed comes as source and compiles what it needs at use.
    DS_BUILD_OPS=0 TMPDIR=$2/tmp "$2/bin/python" -m pip install --no-cache-dir --no-deps --disable-pip-version-check \
        --no-input --progress-bar off -r requirements.lock >"$log" 2>&1 &
    pip_pid=$!
    # A shell's background job ignores Ctrl-C.
    trap 'kill "$pip_pid" 2>/dev/null || true' EXIT
    show_progress "$pip_pid" "$log" "$2"
    if ! wait "$pip_pid"; then
        tail -n 15 "$log" >&2
        say "pip failed; its log is $log. Check the network and the disk, then run the same command again." >&2
        exit 1
    fi
    trap - EXIT
    rm -rf "$2/tmp"
    touch "$2/.complete"
    say "environment ready: $(du -sh "$2" | cut -f1) in $2"
}

find_or_build_venv() { # sets $venv
    local prefix python
    prefix=venv-$(sha256sum requirements.lock | cut -c1-12)-py
    python=$(scripts/preflight.sh "$home" "$prefix")
    venv=$home/$prefix$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if [[ ! -e $venv/.complete ]]; then
        take_lock "$home/setup.lock"
        [[ -e $venv/.complete ]] || build_venv "$python" "$venv"
        exec 9>&-
    fi
}

write_overlay() {
    mkdir -p "$overlay/bin" "$overlay/site"
    take_lock "$overlay/lock"
    if [[ ! $overlay/site/d3d_sglang.egg-info/entry_points.txt -nt pyproject.toml ]]; then
        "$venv/bin/python" -c 'import setuptools; setuptools.setup()' -q egg_info --egg-base "$overlay/site"
    fi
    cat >"$overlay/activate.new" <<END
# Made by scripts/setup.sh. Source it to run the project's commands by hand.
export VIRTUAL_ENV=$(printf %q "$venv")
export PATH=$(printf %q "$overlay/bin:$venv/bin"):\$PATH
export PYTHONPATH=$(printf %q "$overlay/site:$checkout")
END
    cat >"$overlay/bin/d3d.new" <<END
#!/bin/sh
. $(printf %q "$overlay/activate")
exec python -m d3d_sglang.cli.main "\$@"
END
    chmod +x "$overlay/bin/d3d.new"
    mv "$overlay/activate.new" "$overlay/activate"
    mv "$overlay/bin/d3d.new" "$overlay/bin/d3d"
    exec 9>&-
}

if [[ -n ${D3D_VENV:-} ]]; then
    venv=$D3D_VENV
    [[ -x $venv/bin/python ]] || { say "D3D_VENV=$venv is not a virtual environment" >&2; exit 1; }
else
    find_or_build_venv
fi
write_overlay
