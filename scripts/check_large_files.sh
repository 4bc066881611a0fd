#!/usr/bin/env bash
# Fails if one of the files named is over 512 KB: weights and data do not belong in the repository.
set -euo pipefail
large=$(find "$@" -maxdepth 0 -type f -size +512k)
if [[ -n $large ]]; then
    echo "over 512 KB:" >&2
    echo "$large" >&2
    exit 1
fi
