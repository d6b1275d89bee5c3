#!/bin/bash
# Regenerates the declarations of libibverbs: src/provider/verbs/sys.rs. Needed only when the list below changes.
#
#   apt-get install libibverbs-dev libclang-14-dev        # rdma-core's headers, and what bindgen reads them with
#   cargo install bindgen-cli --version 0.70.1 --root /tmp/bindgen
#   BINDGEN=/tmp/bindgen/bin/bindgen tools/bindgen.sh
#
# Only what the provider uses is declared. Functions become members of a struct that is filled at run time, so that
# nothing is linked; the headers' static inline functions are calls of ours, in `calls.rs`.
set -euo pipefail
cd "$(dirname "$0")/.."
out=src/provider/verbs/sys.rs
version=$(dpkg-query -W -f '${Version}' libibverbs-dev)
header=$(mktemp --suffix .h)
trap 'rm -f "$header" "$out.new"' EXIT
echo '#include <infiniband/verbs.h>' >"$header"

functions='ibv_(get_device_list|free_device_list|get_device_name|open_device|close_device|fork_init)'
functions+='|ibv_query_(device|port|gid|qp)|ibv_(alloc|dealloc)_pd|ibv_(reg|dereg)_mr'
functions+='|ibv_(create|destroy)_(comp_channel|cq|qp)|ibv_(get_cq_event|ack_cq_events|modify_qp)'
# Enumerations that the structs hold as plain integers.
types='ibv_(access_flags|qp_attr_mask|send_flags|wc_flags|mtu|port_state|port_attr|qp_state|gid)'

"${BINDGEN:-bindgen}" "$header" \
  --allowlist-function "$functions" --allowlist-type "$types" --allowlist-var 'IBV_LINK_LAYER_.*' \
  --blocklist-type 'pthread_.*|__pthread.*|__atomic_wide_counter.*' --raw-line 'use libc::{pthread_cond_t, pthread_mutex_t};' \
  --opaque-type 'ibv_srq|ibv_flow|_ibv_device_ops|_compat_ibv_port_attr' \
  --dynamic-loading LibIbverbs --dynamic-link-require-all \
  --default-enum-style consts --no-prepend-enum-name --no-doc-comments --use-core --wrap-unsafe-ops \
  --rust-target 1.77 --formatter rustfmt --no-derive-debug >"$out.new"

{
  cat <<TEXT
//! Declarations of libibverbs, made by \`tools/bindgen.sh\` from the headers of rdma-core (libibverbs-dev $version).
//! Do not edit: change the script and run it.
//!
//! rdma-core's headers are under a choice of two licences, GPL-2.0 or the OpenIB.org BSD licence (BSD-2-Clause);
//! the BSD licence is the one chosen here.

TEXT
  sed '/^\/\* automatically generated/d' "$out.new"
} >"$out"
rustfmt --edition 2024 "$out"
