#!/bin/sh
# pip.sh PYTHON ARGUMENTS...: pip, saying what it installs; what it says itself goes to a log file.
python=$1
shift
log=$(dirname "$(dirname "$python")")/setup.log
what=
for argument; do
    case $argument in
        */*.txt) what="$what ${argument##*/}" ;;
        torch*) what="$what $argument" ;;
        .) what="$what this package" ;;
    esac
done
echo "setting up:$what" >&2
"$python" -m pip --disable-pip-version-check "$@" >>"$log" 2>&1 || {
    tail -5 "$log" >&2
    echo "pip failed; all it said is in $log" >&2
    exit 1
}
