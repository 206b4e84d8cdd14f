#!/usr/bin/env bash
# `python -m bench.compare` on a GPU, with the shapes of Llama-2-7B, Llama-2-13B and OLMo-2-7B.
usage="bench/gpu/serve.sh [--models 'Llama-2-7B ...'] [--results FOLDER] [--dry-run] [-- OPTIONS]

Needs hcache-backend, aiohttp, matplotlib and SGLang in the Python of \$PYTHON (default: python), and nothing from
the network: weights are random (--load-format dummy), and there is no tokenizer.

  --models   which, in one argument (default: all)
  --results  where compare-MODEL.json, .md and pictures go (default: out/DEVICE)
  --dry-run  tiny models of the same architectures, on the CPU engine where there is no GPU: one
             short history by two methods. Its times mean nothing; kept only where --results says
  --         what follows is given to python -m bench.compare, as --part restore"
set -euo pipefail

fail() {
    echo "bench/gpu/serve.sh: $*" >&2
    exit 2
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=$(command -v "${PYTHON:-python}") || fail "PYTHON=${PYTHON:-python}: there is no such program"
models="" results="" dry_run=""
while (($#)); do
    case $1 in
        --models | --results)
            [[ ${2:---} != --* ]] || fail "$1: a value is missing"
            printf -v "${1#--}" %s "$2"
            shift 2
            ;;
        --dry-run) dry_run=yes && shift ;;
        -h | --help) echo "$usage" && exit ;;
        --) shift && break ;;
        *) fail "$1: there is no such option; --help tells which there are" ;;
    esac
done

serve_models() { PYTHONPATH=$root "$python" -m bench.gpu.serve_models "$@"; }
known=$(serve_models --list)
for model in $models; do
    grep -qxF -- "$model" <<<"$known" || fail "--models $model: must be of ${known//$'\n'/, }"
done
scratch=$(mktemp -d "${TMPDIR:-/tmp}/hcache-XXXXXX")
trap 'rm -rf "$scratch"' EXIT
export TMPDIR=$scratch # servers leave sockets behind
if [[ $dry_run ]]; then
    results=${results:-$scratch/results}
    set -- --part restore --tokens 256 --rounds 1 --methods hcache-hidden,file "$@"
else
    device=$(PYTHONPATH=$root "$python" -m bench.gpu.program) || fail "no CUDA device; --dry-run does without"
    results=${results:-$device}
    set -- --vocabulary 32000 "$@"
fi

results=$(realpath -m -- "$results") python=$(realpath -s -- "$python")
cd "$root"
failed=()
for model in ${models:-$known}; do
    serve_models "$model" "$scratch/$model" ${dry_run:+--tiny}
    echo "== $model"
    "$python" -m bench.compare \
        --model-path "$scratch/$model" --server-args "--load-format dummy" \
        --scratch-dir "$scratch" --out "$results/compare-${model,,}.json" "$@" || failed+=("$model")
done
((${#failed[@]} == 0)) || {
    echo "bench/gpu/serve.sh: failed: ${failed[*]}" >&2
    exit 1
}
