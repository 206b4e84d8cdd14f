#!/bin/sh
# Unpacks the SGLang versions of requirements/versions.txt into FOLDER/VERSION, about 110 MB each.
# Nothing is installed. The version that PYTHON has is left out. Where one cannot be had, FOLDER/VERSION.missing
# says why, the tests that want it are skipped with that, and the next run tries again.
# Usage: versions.sh PYTHON FOLDER
set -eu

python=$1 folder=$2
mkdir -p "$folder"
installed=$("$python" -c 'from importlib.metadata import version; print(version("sglang"))' || true)
for pin in $(grep '^sglang==' "$(dirname "$0")/versions.txt"); do
    version=${pin#sglang==}
    if [ "$version" = "$installed" ] || [ -d "$folder/$version" ]; then
        continue
    fi
    rm -rf "$folder/new"
    if "$python" -m pip --quiet --disable-pip-version-check --no-input download --no-deps \
        --only-binary :all: --dest "$folder/new" "$pin" 2>"$folder/log"; then
        "$python" -m zipfile -e "$folder"/new/*.whl "$folder/new/unpacked"
        mv "$folder/new/unpacked" "$folder/$version"
        rm -f "$folder/$version.missing"
    else
        echo "pip download $pin: $(grep '^ERROR' "$folder/log" | tail -n 1)" >"$folder/$version.missing"
        echo "SGLang $version could not be downloaded; its tests will be skipped" >&2
    fi
done
rm -rf "$folder/new" "$folder/log"
