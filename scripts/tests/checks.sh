# shellcheck shell=bash
# For the scripts in this folder: checks that print one line each, "ok NAME", "not ok NAME" or "skip NAME: why", which
# scripts/test counts. Sourced after lib.sh.

CHECK_FAILED=0
CHECK_OUTPUT=$(mktemp)
trap 'rm -f "$CHECK_OUTPUT"' EXIT

ok() { printf 'ok %s\n' "$1"; }

not_ok() {
    CHECK_FAILED=1
    printf 'not ok %s\n' "$1"
    shift
    [ "$#" = 0 ] || printf '%s\n' "$@" | sed 's/^/    /'
}

skip() { printf 'skip %s: %s\n' "$1" "$2"; }

# check NAME COMMAND...: ok when the command succeeds; else its output is shown.
check() {
    local name=$1
    shift
    if "$@" >"$CHECK_OUTPUT" 2>&1; then
        ok "$name"
    else
        not_ok "$name" "$(tail -n 40 "$CHECK_OUTPUT")"
    fi
}

# expect NAME STATUS PATTERN COMMAND...: ok when the command ends with that status and its output, standard error
# included, holds a line that the extended regular expression matches.
expect() {
    local name=$1 want=$2 pattern=$3 rc=0
    shift 3
    "$@" >"$CHECK_OUTPUT" 2>&1 </dev/null || rc=$?
    if [ "$rc" != "$want" ]; then
        not_ok "$name" "status $rc, want $want; output:" "$(tail -n 20 "$CHECK_OUTPUT")"
    elif ! grep -Eq -e "$pattern" "$CHECK_OUTPUT"; then
        not_ok "$name" "no line matches: $pattern; output:" "$(tail -n 20 "$CHECK_OUTPUT")"
    else
        ok "$name"
    fi
}

checks_done() { exit "$CHECK_FAILED"; }
