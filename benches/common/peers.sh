# For the scripts of the benches, which source it: bench programs, a network of their own, NIXL beside them. No output of its own
# but for errors; what is missing is a remark.

remarks=()

# The path of each bench program that is named, in `program[NAME]`.
declare -A program
build_benches() { # NAME…
  local name built flags=()
  for name in "$@"; do flags+=(--bench "$name"); done
  if ! built=$(cargo bench "${flags[@]}" --no-run 2>&1); then
    printf '%s\n' "$built" >&2
    exit 1
  fi
  for name in "$@"; do
    program[$name]=$PWD/$(sed -n "s/^ *Executable .*(\(.*\/$name-[0-9a-f]*\))$/\1/p" <<<"$built" | tail -n 1)
    if [ ! -x "${program[$name]}" ]; then
      echo "${0##*/}: cargo did not say where the program $name is" >&2
      exit 1
    fi
  done
}

# The directory that the lines of each round are kept in, in `raw`: RAW, or one that goes with the script.
keep_rounds() {
  raw=${RAW:-}
  if [ -z "$raw" ]; then
    raw=$(mktemp -d) || exit 1
    trap 'rm -rf "$raw"' EXIT
  fi
  mkdir -p "$raw" || exit 1
  rm -f "$raw"/*round-*.txt
}

# A namespace that has only loopback, as the peers' script makes for itself.
isolated() {
  if unshare -n true 2>/dev/null; then
    unshare -n bash -c 'ip link set lo up && exec "$@"' _ "$@"
  else
    unshare -rn bash -c 'ip link set lo up && exec "$@"' _ "$@"
  fi
}
isolate() {
  if ! isolated true 2>/dev/null; then
    remarks+=("No network namespace here (it takes unshare, ip and the right to use them): our figures are from the host's loopback.")
    isolated() { "$@"; }
  fi
}

# What can be compared with: PEERS, if it can be used, and nothing else.
peers= cache=
find_peers() {
  peers=${PEERS:-}
  if [ -z "$peers" ]; then
    remarks+=("No peers: set PEERS to their script (run.sh).")
  elif ! peers=$(realpath -e -- "$peers" 2>/dev/null) || [ ! -x "$peers" ]; then
    remarks+=("No peers: PEERS=$PEERS is not an executable file.")
    peers=
  else
    cache=${PEERS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/peers}
    if ! "$cache/venv/bin/python" -c 'import numpy, nixl_cu12' 2>/dev/null; then
      remarks+=("No peers: NIXL is not installed in $cache; run: $PEERS setup")
      peers=
    elif [ ! -e "$cache/cc_preload.so" ]; then
      remarks+=("No peers: $cache/cc_preload.so is missing, which sets their congestion control; run: $PEERS setup")
      peers=
    fi
  fi
}

# As the peers' script calls the setting of UCX that we compare with.
nixl_label() { # tcp or shm
  if [ "$1" = tcp ]; then echo tcp-best; else echo sm; fi
}

# NIXL with the settings of the peers' script, on some sizes only.
nixl() { # tcp or shm, OPTIONS of nixl_bench.py
  [ -n "$peers" ] || return 0
  local transport=$1 settings options
  shift
  options=("$(nixl_label "$transport")" "$@")
  if [ "$transport" = tcp ]; then
    settings=(UCX_TLS=tcp UCX_NET_DEVICES=lo UCX_TCP_TX_SEG_SIZE=256k UCX_TCP_RX_SEG_SIZE=1m PEER_CC=reno
      LD_PRELOAD="$cache/cc_preload.so")
  else
    # NIXL starts on shared memory alone only with UCX's error handling off.
    settings=(UCX_TLS=sm,self UCX_NET_DEVICES=lo)
    options+=(--noerr)
  fi
  isolated env NIXL_LOG_LEVEL=WARN "${settings[@]}" \
    timeout 120 "$cache/venv/bin/python" "$(dirname "$peers")/nixl_bench.py" "${options[@]}"
}

# The line that says what was measured, and the remarks.
heading() { # WORDS…
  local changes=''
  git diff --quiet HEAD 2>/dev/null || changes=' with changes'
  echo "$(uname -srm), $(nproc) cpus, commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)$changes, $(date -u +%F), $*"
  local remark
  for remark in ${remarks[@]+"${remarks[@]}"}; do printf '\n%s\n' "$remark"; done
}
