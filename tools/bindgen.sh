#!/bin/bash
# Regenerates the declarations of libibverbs and librdmacm: src/provider/verbs/sys.rs and sys_cm.rs. Needed only when
# the lists below change.
#
#   apt-get install libibverbs-dev librdmacm-dev libclang-14-dev    # rdma-core's headers, and what bindgen reads with
#   cargo install bindgen-cli --version 0.70.1 --root /tmp/bindgen
#   BINDGEN=/tmp/bindgen/bin/bindgen tools/bindgen.sh
#
# Only what the provider uses is declared. Functions become members of a struct that is filled at run time, so that
# nothing is linked; the headers' static inline functions are calls of ours, in `calls.rs`.
set -euo pipefail
cd "$(dirname "$0")/../src/provider/verbs"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# generate OUT HEADER PACKAGE LIBRARY STRUCT BINDGEN-OPTIONS…
generate() {
  local out=$1 header=$2 package=$3 library=$4 struct=$5
  shift 5
  echo "#include <$header>" >"$work/$package.h"
  "${BINDGEN:-bindgen}" "$work/$package.h" "$@" \
    --dynamic-loading "$struct" --dynamic-link-require-all \
    --default-enum-style consts --no-prepend-enum-name --no-derive-debug \
    --no-doc-comments --use-core --wrap-unsafe-ops --rust-target 1.77 --formatter rustfmt >"$work/$out"
  {
    cat <<TEXT
//! Declarations of $library, made by \`tools/bindgen.sh\` from the headers of rdma-core ($package
//! $(dpkg-query -W -f '${Version}' "$package")). Do not edit: change the script and run it.
//!
//! rdma-core's headers are under a choice of two licences, GPL-2.0 or the OpenIB.org BSD licence (BSD-2-Clause);
//! the BSD licence is the one chosen here.

TEXT
    sed '/^\/\* automatically generated/d' "$work/$out"
  } >"$out"
  rustfmt --edition 2024 --config-path ../../../rustfmt.toml "$out"
}

functions='ibv_(get_device_list|free_device_list|get_device_name|open_device|close_device|fork_init)'
functions+='|ibv_query_(device|port|gid|qp)|ibv_(alloc|dealloc)_pd|ibv_(reg|dereg)_mr'
functions+='|ibv_(create|destroy)_(comp_channel|cq|qp|srq)|ibv_(get_cq_event|ack_cq_events|modify_qp)'
functions+='|ibv_(get|ack)_async_event'
# Enumerations that the structs hold as plain integers, and a struct behind an older type.
types='ibv_(access_flags|qp_attr_mask|send_flags|wc_flags|mtu|port_state|port_attr|qp_state|gid)'
generate sys.rs infiniband/verbs.h libibverbs-dev libibverbs LibIbverbs \
  --allowlist-function "$functions" --allowlist-type "$types" --allowlist-var 'IBV_LINK_LAYER_.*' \
  --blocklist-type 'pthread_.*|__pthread.*|__atomic_wide_counter.*' \
  --raw-line 'use libc::{pthread_cond_t, pthread_mutex_t};' \
  --opaque-type 'ibv_flow|_ibv_device_ops|_compat_ibv_port_attr'

functions='rdma_(create|destroy)_(event_channel|id)|rdma_(bind_addr|resolve_addr|resolve_route|init_qp_attr)'
functions+='|rdma_(listen|connect|establish|accept|reject|disconnect|migrate_id|set_option|get_src_port)'
functions+='|rdma_(get_cm_event|ack_cm_event|event_str)'
types='rdma_(cm_event_type|port_space)'
generate sys_cm.rs rdma/rdma_cma.h librdmacm-dev librdmacm LibRdmacm \
  --allowlist-function "$functions" --allowlist-type "$types" --allowlist-var 'RDMA_OPTION_.*' \
  --blocklist-type '_?ibv_.*|_compat_.*|pthread_.*|__pthread.*|__atomic_.*|sockaddr.*|sa_family_t|in_.*|in6_.*|__be(32|64)|__u(32|64)|u?int.*_t|__u?int.*|socklen_t|__socklen_t' \
  --default-non-copy-union-style manually_drop --raw-line 'use super::sys::*;' \
  --raw-line '/// Only pointed to.' --raw-line '#[repr(C)]' --raw-line 'pub struct ibv_sa_path_rec([u8; 0]);' \
  --raw-line 'use libc::{in6_addr, in_addr_t, in_port_t, sa_family_t, sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage, socklen_t};'
