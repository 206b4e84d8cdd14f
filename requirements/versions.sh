#!/bin/sh
# The SGLang versions that are supported, as hcache_backend/sglang/compat.py has them.
# versions.sh newest: prints the newest one, which is installed on machines without a GPU.
# versions.sh unpack PYTHON FOLDER: unpacks the others into FOLDER/VERSION, about 110 MB each. Nothing is
# installed. The version that PYTHON has is left out. If one cannot be had, FOLDER/VERSION.missing says why,
# the tests that want it are skipped with that, and the next run tries again.
set -eu

supported=$(sed -n 's/^SUPPORTED = (\(.*\))$/\1/p' "$(dirname "$0")/../hcache_backend/sglang/compat.py" | tr -d '",')
if [ "$1" = newest ]; then
    echo "${supported##* }"
    exit
fi

python=$2 folder=$3
mkdir -p "$folder"
installed=$("$python" -c 'from importlib.metadata import version; print(version("sglang"))' || true)
for version in $supported; do
    if [ "$version" = "$installed" ] || [ -d "$folder/$version" ]; then
        continue
    fi
    rm -rf "$folder/new"
    if "$python" -m pip --quiet --disable-pip-version-check --no-input download --no-deps \
        --only-binary :all: --dest "$folder/new" "sglang==$version" 2>"$folder/log"; then
        "$python" -m zipfile -e "$folder"/new/*.whl "$folder/new/unpacked"
        mv "$folder/new/unpacked" "$folder/$version"
        rm -f "$folder/$version.missing"
    else
        echo "pip download sglang==$version: $(grep '^ERROR' "$folder/log" | tail -n 1)" >"$folder/$version.missing"
        echo "SGLang $version could not be downloaded; its tests will be skipped" >&2
    fi
done
rm -rf "$folder/new" "$folder/log"
