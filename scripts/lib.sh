# shellcheck shell=bash disable=SC2034
# Shared by the commands in this folder; sourced, never run. Callers have `set -euo pipefail` on.
#
# Set-up rule: what is missing is installed with apt when we are root on Debian or Ubuntu; otherwise the command stops
# and says exactly what to install.

FLARE_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# The oldest JDK whose javac and launcher know every flag that the build uses; the jar itself runs on Java 22.
FLARE_MIN_JDK=24
FLARE_LOGS=$FLARE_ROOT/build/logs

note() { printf '%s\n' "flare: $*" >&2; }

die() {
    printf '%s\n' "flare: error: $1" >&2
    shift
    local line
    for line in "$@"; do
        printf '%s\n' "       $line" >&2
    done
    exit 2
}

have() { command -v "$1" >/dev/null 2>&1; }

cores() { nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2; }

can_apt() { [ "$(id -u)" = 0 ] && have apt-get; }

# with_lock NAME COMMAND...: one process at a time in this checkout; a second one waits, then usually finds the work done.
with_lock() {
    local name=$1
    shift
    mkdir -p "$FLARE_ROOT/build"
    if ! have flock; then
        "$@"
        return
    fi
    (
        if ! flock -n 9; then
            note "waiting for another flare command that holds build/.lock-$name"
            flock 9
        fi
        "$@"
    ) 9>"$FLARE_ROOT/build/.lock-$name"
}

# step LABEL COMMAND...: runs the command with its output in build/logs; prints the label, a line every 20 seconds with
# the time and the newest line of output, and on failure the end of the log.
step() {
    local label=$1 log start ticker rc=0
    shift
    mkdir -p "$FLARE_LOGS"
    # One log a process: two commands at once must not write into each other's.
    log=$FLARE_LOGS/$(printf '%s' "$label" | tr -c 'A-Za-z0-9._\n' '-')-$$.log
    start=$(date +%s)
    note "$label ..."
    # The ticker asks for its parent, since an interrupt ends the command and this shell, not a background job. Its
    # sleep must hold neither the terminal nor the lock (descriptor 9).
    (
        while sleep 20 >/dev/null 2>&1 9>&- && kill -0 $$ 2>/dev/null; do
            note "  $(($(date +%s) - start)) s: $(tail -n 1 "$log" | tr -d '\r' | cut -c1-100)"
        done
    ) 9>&- &
    ticker=$!
    "$@" >"$log" 2>&1 </dev/null 9>&- || rc=$?
    kill "$ticker" 2>/dev/null || true
    wait "$ticker" 2>/dev/null || true
    if [ "$rc" != 0 ]; then
        note "$label: failed with status $rc; the end of $log:"
        tail -n "${FLARE_LOG_LINES:-60}" "$log" | cut -c1-300 >&2
        return "$rc"
    fi
    note "$label: $(($(date +%s) - start)) s"
    rm -f "$log"
}

apt_install() {
    export DEBIAN_FRONTEND=noninteractive
    local options=(-y -q --no-install-recommends -o DPkg::Lock::Timeout=600)
    # The package lists are often there and fresh enough: refresh them only when the first try fails.
    if ! apt-get install "${options[@]}" "$@"; then
        apt-get update -q -o DPkg::Lock::Timeout=600
        apt-get install "${options[@]}" "$@"
    fi
}

# need COMMAND=PACKAGE...: makes sure that each command is there.
need() {
    local pair missing=() commands=()
    for pair in "$@"; do
        if ! have "${pair%%=*}"; then
            commands+=("${pair%%=*}")
            missing+=("${pair#*=}")
        fi
    done
    [ "${#missing[@]}" = 0 ] && return 0
    if ! can_apt; then
        die "not found on PATH: ${commands[*]}" \
            "On Debian or Ubuntu:  sudo apt-get update && sudo apt-get install -y --no-install-recommends ${missing[*]}" \
            "then run this command again."
    fi
    step "installing ${missing[*]}" apt_install "${missing[@]}"
    hash -r
    for pair in "$@"; do
        have "${pair%%=*}" || die "${pair%%=*} is still missing after installing ${pair#*=}"
    done
}

# jdk_major DIR: the feature release of the JDK in DIR, or 0 where there is none with a compiler.
jdk_major() {
    local version=0
    if [ -x "$1/bin/javac" ] && [ -x "$1/bin/java" ] && [ -r "$1/release" ]; then
        version=$(sed -n 's/^JAVA_VERSION="\([0-9]*\).*/\1/p' "$1/release" | head -n 1)
    fi
    printf '%s' "${version:-0}"
}

# Prints the home of a JDK that is new enough: JAVA_HOME, then java on PATH, then the newest under the usual folders.
find_jdk() {
    local dir major best='' best_major=0 on_path
    if [ -n "${JAVA_HOME:-}" ] && [ "$(jdk_major "$JAVA_HOME")" -ge "$FLARE_MIN_JDK" ]; then
        printf '%s' "$JAVA_HOME"
        return 0
    fi
    if on_path=$(command -v javac 2>/dev/null); then
        on_path=$(dirname "$(dirname "$(readlink -f "$on_path")")")
        if [ "$(jdk_major "$on_path")" -ge "$FLARE_MIN_JDK" ]; then
            printf '%s' "$on_path"
            return 0
        fi
    fi
    for dir in /usr/lib/jvm/* /usr/java/* /opt/java/* /opt/jdk* "$HOME"/.sdkman/candidates/java/* "$HOME"/.jdks/*; do
        major=$(jdk_major "$dir")
        if [ "$major" -ge "$FLARE_MIN_JDK" ] && [ "$major" -gt "$best_major" ]; then
            best=$dir
            best_major=$major
        fi
    done
    [ -n "$best" ] && printf '%s' "$best"
}

apt_jdk() {
    local major
    for major in 25 26 27 24; do
        if apt-cache show "openjdk-$major-jdk-headless" >/dev/null 2>&1; then
            apt_install "openjdk-$major-jdk-headless"
            return 0
        fi
    done
    return 1
}

# Puts a new enough JDK into JAVA_HOME and in front of PATH.
need_jdk() {
    local home
    if ! home=$(find_jdk); then
        if can_apt; then
            step "installing a JDK" apt_jdk || step "refreshing the package lists" apt-get update -q || true
            find_jdk >/dev/null || step "installing a JDK" apt_jdk || true
        fi
        home=$(find_jdk) || die "no JDK $FLARE_MIN_JDK or newer found" \
            "Looked at JAVA_HOME (${JAVA_HOME:-not set}), javac on PATH, /usr/lib/jvm, /usr/java, /opt, ~/.sdkman, ~/.jdks." \
            "Install one (JDK 25 is what flare is tested with): package openjdk-25-jdk-headless where the distribution has" \
            "it, else temurin-25-jdk of Eclipse Adoptium; or unpack one anywhere and set JAVA_HOME to its folder."
    fi
    export JAVA_HOME=$home
    export PATH=$home/bin:$PATH
}

# newer_than FILE PATH...: true when FILE is missing or one of the paths holds something newer (an edit, or a removal,
# which touches the folder).
newer_than() {
    local file=$1
    shift
    [ -e "$file" ] || return 0
    [ -n "$(find "$@" -newer "$file" -print -quit 2>/dev/null)" ]
}

# True where an NVIDIA driver has made its device files (or Windows' one for WSL).
have_gpu() { [ -e /dev/nvidiactl ] || [ -e /dev/dxg ]; }

find_nvcc() {
    local dir
    if have nvcc; then
        command -v nvcc
        return 0
    fi
    for dir in "${CUDA_HOME:-/nonexistent}" "${CUDA_PATH:-/nonexistent}" /usr/local/cuda /usr/local/cuda-*; do
        if [ -x "$dir/bin/nvcc" ]; then
            printf '%s' "$dir/bin/nvcc"
            return 0
        fi
    done
    return 1
}

# native_library cpu|cuda: builds what is missing or stale, prints the library's path. Commands that need the CPU alone
# take a full build when a fresh one is there.
native_library() {
    local full=$FLARE_ROOT/build/native/libflare.so
    if [ "$1" = cpu ]; then
        if [ ! -e "$FLARE_ROOT/build/native/.cpu-only" ] && ! newer_than "$full" "$FLARE_ROOT/cuda"; then
            printf '%s' "$full"
            return 0
        fi
        "$FLARE_ROOT/scripts/build-native" --if-stale --cpu-only
    else
        "$FLARE_ROOT/scripts/build-native" --if-stale
    fi
}

FLARE_CLI=$FLARE_ROOT/build/cli

# Maven under the JDK found, without colours, questions or download lines. Maven 3.8's own libraries use sun.misc.Unsafe,
# of which newer JDKs warn.
maven() {
    (cd "$FLARE_ROOT" && MAVEN_OPTS="${MAVEN_OPTS:-} --sun-misc-unsafe-memory-access=allow" \
        mvn -B -ntp -Dstyle.color=never "$@")
}

package_jar() {
    # Asked again under the lock: the process that held it may have done the work.
    jar_is_stale || return 0
    step "building the jar" maven package dependency:copy-dependencies -Dmaven.test.skip=true -Djacoco.skip=true \
        -DincludeScope=runtime -DoutputDirectory=target/lib
    publish_jar
}

# Commands run from copies, each put in place by a rename: a build does not pull the jar from under a running one.
publish_jar() {
    local jar
    mkdir -p "$FLARE_CLI"
    for jar in "$FLARE_ROOT"/target/lib/*.jar; do
        if ! cmp -s "$jar" "$FLARE_CLI/$(basename "$jar")"; then
            cp "$jar" "$FLARE_CLI/.new.$$" && mv "$FLARE_CLI/.new.$$" "$FLARE_CLI/$(basename "$jar")"
        fi
    done
    jar=$(find "$FLARE_ROOT/target" -maxdepth 1 -name 'flare-*.jar' ! -name '*-tests.jar' ! -name '*-sources.jar' \
        ! -name '*-javadoc.jar' | head -n 1)
    cp "$jar" "$FLARE_CLI/.new.$$" && mv "$FLARE_CLI/.new.$$" "$FLARE_CLI/flare.jar"
    touch "$FLARE_CLI/flare.jar"
}

jar_is_stale() {
    newer_than "$FLARE_CLI/flare.jar" "$FLARE_ROOT/src/main" "$FLARE_ROOT/generated" "$FLARE_ROOT/pom.xml"
}

# Makes sure of an up-to-date jar; sets CLASS_PATH.
need_jar() {
    need_jdk
    if jar_is_stale; then
        need mvn=maven
        with_lock maven package_jar
    fi
    CLASS_PATH=$FLARE_CLI/flare.jar:$FLARE_CLI/'*'
}
