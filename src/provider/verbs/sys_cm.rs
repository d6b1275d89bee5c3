//! Declarations of librdmacm, made by `tools/bindgen.sh` from the headers of rdma-core (librdmacm-dev
//! 44.0-2). Do not edit: change the script and run it.
//!
//! rdma-core's headers are under a choice of two licences, GPL-2.0 or the OpenIB.org BSD licence (BSD-2-Clause);
//! the BSD licence is the one chosen here.

use super::sys::*;
/// Only pointed to.
#[repr(C)]
pub struct ibv_sa_path_rec([u8; 0]);
use libc::{
    in_addr_t, in_port_t, in6_addr, sa_family_t, sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage,
    socklen_t,
};

pub type __u16 = ::core::ffi::c_ushort;
pub type __be16 = __u16;
pub const RDMA_CM_EVENT_ADDR_RESOLVED: rdma_cm_event_type = 0;
pub const RDMA_CM_EVENT_ADDR_ERROR: rdma_cm_event_type = 1;
pub const RDMA_CM_EVENT_ROUTE_RESOLVED: rdma_cm_event_type = 2;
pub const RDMA_CM_EVENT_ROUTE_ERROR: rdma_cm_event_type = 3;
pub const RDMA_CM_EVENT_CONNECT_REQUEST: rdma_cm_event_type = 4;
pub const RDMA_CM_EVENT_CONNECT_RESPONSE: rdma_cm_event_type = 5;
pub const RDMA_CM_EVENT_CONNECT_ERROR: rdma_cm_event_type = 6;
pub const RDMA_CM_EVENT_UNREACHABLE: rdma_cm_event_type = 7;
pub const RDMA_CM_EVENT_REJECTED: rdma_cm_event_type = 8;
pub const RDMA_CM_EVENT_ESTABLISHED: rdma_cm_event_type = 9;
pub const RDMA_CM_EVENT_DISCONNECTED: rdma_cm_event_type = 10;
pub const RDMA_CM_EVENT_DEVICE_REMOVAL: rdma_cm_event_type = 11;
pub const RDMA_CM_EVENT_MULTICAST_JOIN: rdma_cm_event_type = 12;
pub const RDMA_CM_EVENT_MULTICAST_ERROR: rdma_cm_event_type = 13;
pub const RDMA_CM_EVENT_ADDR_CHANGE: rdma_cm_event_type = 14;
pub const RDMA_CM_EVENT_TIMEWAIT_EXIT: rdma_cm_event_type = 15;
pub type rdma_cm_event_type = ::core::ffi::c_uint;
pub const RDMA_PS_IPOIB: rdma_port_space = 2;
pub const RDMA_PS_TCP: rdma_port_space = 262;
pub const RDMA_PS_UDP: rdma_port_space = 273;
pub const RDMA_PS_IB: rdma_port_space = 319;
pub type rdma_port_space = ::core::ffi::c_uint;
#[repr(C)]
pub struct rdma_ib_addr {
    pub sgid: ibv_gid,
    pub dgid: ibv_gid,
    pub pkey: __be16,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of rdma_ib_addr"][::core::mem::size_of::<rdma_ib_addr>() - 40usize];
    ["Alignment of rdma_ib_addr"][::core::mem::align_of::<rdma_ib_addr>() - 8usize];
    ["Offset of field: rdma_ib_addr::sgid"][::core::mem::offset_of!(rdma_ib_addr, sgid) - 0usize];
    ["Offset of field: rdma_ib_addr::dgid"][::core::mem::offset_of!(rdma_ib_addr, dgid) - 16usize];
    ["Offset of field: rdma_ib_addr::pkey"][::core::mem::offset_of!(rdma_ib_addr, pkey) - 32usize];
};
#[repr(C)]
pub struct rdma_addr {
    pub __bindgen_anon_1: rdma_addr__bindgen_ty_1,
    pub __bindgen_anon_2: rdma_addr__bindgen_ty_2,
    pub addr: rdma_addr__bindgen_ty_3,
}
#[repr(C)]
pub union rdma_addr__bindgen_ty_1 {
    pub src_addr: ::core::mem::ManuallyDrop<sockaddr>,
    pub src_sin: ::core::mem::ManuallyDrop<sockaddr_in>,
    pub src_sin6: ::core::mem::ManuallyDrop<sockaddr_in6>,
    pub src_storage: ::core::mem::ManuallyDrop<sockaddr_storage>,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of rdma_addr__bindgen_ty_1"][::core::mem::size_of::<rdma_addr__bindgen_ty_1>() - 128usize];
    ["Alignment of rdma_addr__bindgen_ty_1"][::core::mem::align_of::<rdma_addr__bindgen_ty_1>() - 8usize];
    ["Offset of field: rdma_addr__bindgen_ty_1::src_addr"]
        [::core::mem::offset_of!(rdma_addr__bindgen_ty_1, src_addr) - 0usize];
    ["Offset of field: rdma_addr__bindgen_ty_1::src_sin"]
        [::core::mem::offset_of!(rdma_addr__bindgen_ty_1, src_sin) - 0usize];
    ["Offset of field: rdma_addr__bindgen_ty_1::src_sin6"]
        [::core::mem::offset_of!(rdma_addr__bindgen_ty_1, src_sin6) - 0usize];
    ["Offset of field: rdma_addr__bindgen_ty_1::src_storage"]
        [::core::mem::offset_of!(rdma_addr__bindgen_ty_1, src_storage) - 0usize];
};
#[repr(C)]
pub union rdma_addr__bindgen_ty_2 {
    pub dst_addr: ::core::mem::ManuallyDrop<sockaddr>,
    pub dst_sin: ::core::mem::ManuallyDrop<sockaddr_in>,
    pub dst_sin6: ::core::mem::ManuallyDrop<sockaddr_in6>,
    pub dst_storage: ::core::mem::ManuallyDrop<sockaddr_storage>,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of rdma_addr__bindgen_ty_2"][::core::mem::size_of::<rdma_addr__bindgen_ty_2>() - 128usize];
    ["Alignment of rdma_addr__bindgen_ty_2"][::core::mem::align_of::<rdma_addr__bindgen_ty_2>() - 8usize];
    ["Offset of field: rdma_addr__bindgen_ty_2::dst_addr"]
        [::core::mem::offset_of!(rdma_addr__bindgen_ty_2, dst_addr) - 0usize];
    ["Offset of field: rdma_addr__bindgen_ty_2::dst_sin"]
        [::core::mem::offset_of!(rdma_addr__bindgen_ty_2, dst_sin) - 0usize];
    ["Offset of field: rdma_addr__bindgen_ty_2::dst_sin6"]
        [::core::mem::offset_of!(rdma_addr__bindgen_ty_2, dst_sin6) - 0usize];
    ["Offset of field: rdma_addr__bindgen_ty_2::dst_storage"]
        [::core::mem::offset_of!(rdma_addr__bindgen_ty_2, dst_storage) - 0usize];
};
#[repr(C)]
pub union rdma_addr__bindgen_ty_3 {
    pub ibaddr: ::core::mem::ManuallyDrop<rdma_ib_addr>,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of rdma_addr__bindgen_ty_3"][::core::mem::size_of::<rdma_addr__bindgen_ty_3>() - 40usize];
    ["Alignment of rdma_addr__bindgen_ty_3"][::core::mem::align_of::<rdma_addr__bindgen_ty_3>() - 8usize];
    ["Offset of field: rdma_addr__bindgen_ty_3::ibaddr"]
        [::core::mem::offset_of!(rdma_addr__bindgen_ty_3, ibaddr) - 0usize];
};
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of rdma_addr"][::core::mem::size_of::<rdma_addr>() - 296usize];
    ["Alignment of rdma_addr"][::core::mem::align_of::<rdma_addr>() - 8usize];
    ["Offset of field: rdma_addr::addr"][::core::mem::offset_of!(rdma_addr, addr) - 256usize];
};
#[repr(C)]
pub struct rdma_route {
    pub addr: rdma_addr,
    pub path_rec: *mut ibv_sa_path_rec,
    pub num_paths: ::core::ffi::c_int,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of rdma_route"][::core::mem::size_of::<rdma_route>() - 312usize];
    ["Alignment of rdma_route"][::core::mem::align_of::<rdma_route>() - 8usize];
    ["Offset of field: rdma_route::addr"][::core::mem::offset_of!(rdma_route, addr) - 0usize];
    ["Offset of field: rdma_route::path_rec"][::core::mem::offset_of!(rdma_route, path_rec) - 296usize];
    ["Offset of field: rdma_route::num_paths"][::core::mem::offset_of!(rdma_route, num_paths) - 304usize];
};
#[repr(C)]
#[derive(Copy, Clone)]
pub struct rdma_event_channel {
    pub fd: ::core::ffi::c_int,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of rdma_event_channel"][::core::mem::size_of::<rdma_event_channel>() - 4usize];
    ["Alignment of rdma_event_channel"][::core::mem::align_of::<rdma_event_channel>() - 4usize];
    ["Offset of field: rdma_event_channel::fd"][::core::mem::offset_of!(rdma_event_channel, fd) - 0usize];
};
#[repr(C)]
pub struct rdma_cm_id {
    pub verbs: *mut ibv_context,
    pub channel: *mut rdma_event_channel,
    pub context: *mut ::core::ffi::c_void,
    pub qp: *mut ibv_qp,
    pub route: rdma_route,
    pub ps: rdma_port_space,
    pub port_num: u8,
    pub event: *mut rdma_cm_event,
    pub send_cq_channel: *mut ibv_comp_channel,
    pub send_cq: *mut ibv_cq,
    pub recv_cq_channel: *mut ibv_comp_channel,
    pub recv_cq: *mut ibv_cq,
    pub srq: *mut ibv_srq,
    pub pd: *mut ibv_pd,
    pub qp_type: ibv_qp_type,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of rdma_cm_id"][::core::mem::size_of::<rdma_cm_id>() - 416usize];
    ["Alignment of rdma_cm_id"][::core::mem::align_of::<rdma_cm_id>() - 8usize];
    ["Offset of field: rdma_cm_id::verbs"][::core::mem::offset_of!(rdma_cm_id, verbs) - 0usize];
    ["Offset of field: rdma_cm_id::channel"][::core::mem::offset_of!(rdma_cm_id, channel) - 8usize];
    ["Offset of field: rdma_cm_id::context"][::core::mem::offset_of!(rdma_cm_id, context) - 16usize];
    ["Offset of field: rdma_cm_id::qp"][::core::mem::offset_of!(rdma_cm_id, qp) - 24usize];
    ["Offset of field: rdma_cm_id::route"][::core::mem::offset_of!(rdma_cm_id, route) - 32usize];
    ["Offset of field: rdma_cm_id::ps"][::core::mem::offset_of!(rdma_cm_id, ps) - 344usize];
    ["Offset of field: rdma_cm_id::port_num"][::core::mem::offset_of!(rdma_cm_id, port_num) - 348usize];
    ["Offset of field: rdma_cm_id::event"][::core::mem::offset_of!(rdma_cm_id, event) - 352usize];
    ["Offset of field: rdma_cm_id::send_cq_channel"]
        [::core::mem::offset_of!(rdma_cm_id, send_cq_channel) - 360usize];
    ["Offset of field: rdma_cm_id::send_cq"][::core::mem::offset_of!(rdma_cm_id, send_cq) - 368usize];
    ["Offset of field: rdma_cm_id::recv_cq_channel"]
        [::core::mem::offset_of!(rdma_cm_id, recv_cq_channel) - 376usize];
    ["Offset of field: rdma_cm_id::recv_cq"][::core::mem::offset_of!(rdma_cm_id, recv_cq) - 384usize];
    ["Offset of field: rdma_cm_id::srq"][::core::mem::offset_of!(rdma_cm_id, srq) - 392usize];
    ["Offset of field: rdma_cm_id::pd"][::core::mem::offset_of!(rdma_cm_id, pd) - 400usize];
    ["Offset of field: rdma_cm_id::qp_type"][::core::mem::offset_of!(rdma_cm_id, qp_type) - 408usize];
};
#[repr(C)]
#[derive(Copy, Clone)]
pub struct rdma_conn_param {
    pub private_data: *const ::core::ffi::c_void,
    pub private_data_len: u8,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub flow_control: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub srq: u8,
    pub qp_num: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of rdma_conn_param"][::core::mem::size_of::<rdma_conn_param>() - 24usize];
    ["Alignment of rdma_conn_param"][::core::mem::align_of::<rdma_conn_param>() - 8usize];
    ["Offset of field: rdma_conn_param::private_data"]
        [::core::mem::offset_of!(rdma_conn_param, private_data) - 0usize];
    ["Offset of field: rdma_conn_param::private_data_len"]
        [::core::mem::offset_of!(rdma_conn_param, private_data_len) - 8usize];
    ["Offset of field: rdma_conn_param::responder_resources"]
        [::core::mem::offset_of!(rdma_conn_param, responder_resources) - 9usize];
    ["Offset of field: rdma_conn_param::initiator_depth"]
        [::core::mem::offset_of!(rdma_conn_param, initiator_depth) - 10usize];
    ["Offset of field: rdma_conn_param::flow_control"]
        [::core::mem::offset_of!(rdma_conn_param, flow_control) - 11usize];
    ["Offset of field: rdma_conn_param::retry_count"]
        [::core::mem::offset_of!(rdma_conn_param, retry_count) - 12usize];
    ["Offset of field: rdma_conn_param::rnr_retry_count"]
        [::core::mem::offset_of!(rdma_conn_param, rnr_retry_count) - 13usize];
    ["Offset of field: rdma_conn_param::srq"][::core::mem::offset_of!(rdma_conn_param, srq) - 14usize];
    ["Offset of field: rdma_conn_param::qp_num"][::core::mem::offset_of!(rdma_conn_param, qp_num) - 16usize];
};
#[repr(C)]
pub struct rdma_ud_param {
    pub private_data: *const ::core::ffi::c_void,
    pub private_data_len: u8,
    pub ah_attr: ibv_ah_attr,
    pub qp_num: u32,
    pub qkey: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of rdma_ud_param"][::core::mem::size_of::<rdma_ud_param>() - 56usize];
    ["Alignment of rdma_ud_param"][::core::mem::align_of::<rdma_ud_param>() - 8usize];
    ["Offset of field: rdma_ud_param::private_data"]
        [::core::mem::offset_of!(rdma_ud_param, private_data) - 0usize];
    ["Offset of field: rdma_ud_param::private_data_len"]
        [::core::mem::offset_of!(rdma_ud_param, private_data_len) - 8usize];
    ["Offset of field: rdma_ud_param::ah_attr"][::core::mem::offset_of!(rdma_ud_param, ah_attr) - 16usize];
    ["Offset of field: rdma_ud_param::qp_num"][::core::mem::offset_of!(rdma_ud_param, qp_num) - 48usize];
    ["Offset of field: rdma_ud_param::qkey"][::core::mem::offset_of!(rdma_ud_param, qkey) - 52usize];
};
#[repr(C)]
pub struct rdma_cm_event {
    pub id: *mut rdma_cm_id,
    pub listen_id: *mut rdma_cm_id,
    pub event: rdma_cm_event_type,
    pub status: ::core::ffi::c_int,
    pub param: rdma_cm_event__bindgen_ty_1,
}
#[repr(C)]
pub union rdma_cm_event__bindgen_ty_1 {
    pub conn: ::core::mem::ManuallyDrop<rdma_conn_param>,
    pub ud: ::core::mem::ManuallyDrop<rdma_ud_param>,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of rdma_cm_event__bindgen_ty_1"][::core::mem::size_of::<rdma_cm_event__bindgen_ty_1>() - 56usize];
    ["Alignment of rdma_cm_event__bindgen_ty_1"]
        [::core::mem::align_of::<rdma_cm_event__bindgen_ty_1>() - 8usize];
    ["Offset of field: rdma_cm_event__bindgen_ty_1::conn"]
        [::core::mem::offset_of!(rdma_cm_event__bindgen_ty_1, conn) - 0usize];
    ["Offset of field: rdma_cm_event__bindgen_ty_1::ud"]
        [::core::mem::offset_of!(rdma_cm_event__bindgen_ty_1, ud) - 0usize];
};
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of rdma_cm_event"][::core::mem::size_of::<rdma_cm_event>() - 80usize];
    ["Alignment of rdma_cm_event"][::core::mem::align_of::<rdma_cm_event>() - 8usize];
    ["Offset of field: rdma_cm_event::id"][::core::mem::offset_of!(rdma_cm_event, id) - 0usize];
    ["Offset of field: rdma_cm_event::listen_id"][::core::mem::offset_of!(rdma_cm_event, listen_id) - 8usize];
    ["Offset of field: rdma_cm_event::event"][::core::mem::offset_of!(rdma_cm_event, event) - 16usize];
    ["Offset of field: rdma_cm_event::status"][::core::mem::offset_of!(rdma_cm_event, status) - 20usize];
    ["Offset of field: rdma_cm_event::param"][::core::mem::offset_of!(rdma_cm_event, param) - 24usize];
};
pub const RDMA_OPTION_ID: _bindgen_ty_25 = 0;
pub const RDMA_OPTION_IB: _bindgen_ty_25 = 1;
pub type _bindgen_ty_25 = ::core::ffi::c_uint;
pub const RDMA_OPTION_ID_TOS: _bindgen_ty_26 = 0;
pub const RDMA_OPTION_ID_REUSEADDR: _bindgen_ty_26 = 1;
pub const RDMA_OPTION_ID_AFONLY: _bindgen_ty_26 = 2;
pub const RDMA_OPTION_ID_ACK_TIMEOUT: _bindgen_ty_26 = 3;
pub type _bindgen_ty_26 = ::core::ffi::c_uint;
pub const RDMA_OPTION_IB_PATH: _bindgen_ty_27 = 1;
pub type _bindgen_ty_27 = ::core::ffi::c_uint;
pub struct LibRdmacm {
    __library: ::libloading::Library,
    pub rdma_create_event_channel: unsafe extern "C" fn() -> *mut rdma_event_channel,
    pub rdma_destroy_event_channel: unsafe extern "C" fn(channel: *mut rdma_event_channel),
    pub rdma_create_id: unsafe extern "C" fn(
        channel: *mut rdma_event_channel,
        id: *mut *mut rdma_cm_id,
        context: *mut ::core::ffi::c_void,
        ps: rdma_port_space,
    ) -> ::core::ffi::c_int,
    pub rdma_destroy_id: unsafe extern "C" fn(id: *mut rdma_cm_id) -> ::core::ffi::c_int,
    pub rdma_bind_addr: unsafe extern "C" fn(id: *mut rdma_cm_id, addr: *mut sockaddr) -> ::core::ffi::c_int,
    pub rdma_resolve_addr: unsafe extern "C" fn(
        id: *mut rdma_cm_id,
        src_addr: *mut sockaddr,
        dst_addr: *mut sockaddr,
        timeout_ms: ::core::ffi::c_int,
    ) -> ::core::ffi::c_int,
    pub rdma_resolve_route:
        unsafe extern "C" fn(id: *mut rdma_cm_id, timeout_ms: ::core::ffi::c_int) -> ::core::ffi::c_int,
    pub rdma_connect:
        unsafe extern "C" fn(id: *mut rdma_cm_id, conn_param: *mut rdma_conn_param) -> ::core::ffi::c_int,
    pub rdma_establish: unsafe extern "C" fn(id: *mut rdma_cm_id) -> ::core::ffi::c_int,
    pub rdma_listen:
        unsafe extern "C" fn(id: *mut rdma_cm_id, backlog: ::core::ffi::c_int) -> ::core::ffi::c_int,
    pub rdma_accept:
        unsafe extern "C" fn(id: *mut rdma_cm_id, conn_param: *mut rdma_conn_param) -> ::core::ffi::c_int,
    pub rdma_reject: unsafe extern "C" fn(
        id: *mut rdma_cm_id,
        private_data: *const ::core::ffi::c_void,
        private_data_len: u8,
    ) -> ::core::ffi::c_int,
    pub rdma_disconnect: unsafe extern "C" fn(id: *mut rdma_cm_id) -> ::core::ffi::c_int,
    pub rdma_get_cm_event: unsafe extern "C" fn(
        channel: *mut rdma_event_channel,
        event: *mut *mut rdma_cm_event,
    ) -> ::core::ffi::c_int,
    pub rdma_ack_cm_event: unsafe extern "C" fn(event: *mut rdma_cm_event) -> ::core::ffi::c_int,
    pub rdma_get_src_port: unsafe extern "C" fn(id: *mut rdma_cm_id) -> __be16,
    pub rdma_event_str: unsafe extern "C" fn(event: rdma_cm_event_type) -> *const ::core::ffi::c_char,
    pub rdma_set_option: unsafe extern "C" fn(
        id: *mut rdma_cm_id,
        level: ::core::ffi::c_int,
        optname: ::core::ffi::c_int,
        optval: *mut ::core::ffi::c_void,
        optlen: usize,
    ) -> ::core::ffi::c_int,
    pub rdma_migrate_id:
        unsafe extern "C" fn(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> ::core::ffi::c_int,
    pub rdma_init_qp_attr: unsafe extern "C" fn(
        id: *mut rdma_cm_id,
        qp_attr: *mut ibv_qp_attr,
        qp_attr_mask: *mut ::core::ffi::c_int,
    ) -> ::core::ffi::c_int,
}
impl LibRdmacm {
    pub unsafe fn new<P>(path: P) -> Result<Self, ::libloading::Error>
    where
        P: AsRef<::std::ffi::OsStr>,
    {
        let library = ::libloading::Library::new(path)?;
        unsafe { Self::from_library(library) }
    }
    pub unsafe fn from_library<L>(library: L) -> Result<Self, ::libloading::Error>
    where
        L: Into<::libloading::Library>,
    {
        let __library = library.into();
        let rdma_create_event_channel =
            unsafe { __library.get(b"rdma_create_event_channel\0") }.map(|sym| *sym)?;
        let rdma_destroy_event_channel =
            unsafe { __library.get(b"rdma_destroy_event_channel\0") }.map(|sym| *sym)?;
        let rdma_create_id = unsafe { __library.get(b"rdma_create_id\0") }.map(|sym| *sym)?;
        let rdma_destroy_id = unsafe { __library.get(b"rdma_destroy_id\0") }.map(|sym| *sym)?;
        let rdma_bind_addr = unsafe { __library.get(b"rdma_bind_addr\0") }.map(|sym| *sym)?;
        let rdma_resolve_addr = unsafe { __library.get(b"rdma_resolve_addr\0") }.map(|sym| *sym)?;
        let rdma_resolve_route = unsafe { __library.get(b"rdma_resolve_route\0") }.map(|sym| *sym)?;
        let rdma_connect = unsafe { __library.get(b"rdma_connect\0") }.map(|sym| *sym)?;
        let rdma_establish = unsafe { __library.get(b"rdma_establish\0") }.map(|sym| *sym)?;
        let rdma_listen = unsafe { __library.get(b"rdma_listen\0") }.map(|sym| *sym)?;
        let rdma_accept = unsafe { __library.get(b"rdma_accept\0") }.map(|sym| *sym)?;
        let rdma_reject = unsafe { __library.get(b"rdma_reject\0") }.map(|sym| *sym)?;
        let rdma_disconnect = unsafe { __library.get(b"rdma_disconnect\0") }.map(|sym| *sym)?;
        let rdma_get_cm_event = unsafe { __library.get(b"rdma_get_cm_event\0") }.map(|sym| *sym)?;
        let rdma_ack_cm_event = unsafe { __library.get(b"rdma_ack_cm_event\0") }.map(|sym| *sym)?;
        let rdma_get_src_port = unsafe { __library.get(b"rdma_get_src_port\0") }.map(|sym| *sym)?;
        let rdma_event_str = unsafe { __library.get(b"rdma_event_str\0") }.map(|sym| *sym)?;
        let rdma_set_option = unsafe { __library.get(b"rdma_set_option\0") }.map(|sym| *sym)?;
        let rdma_migrate_id = unsafe { __library.get(b"rdma_migrate_id\0") }.map(|sym| *sym)?;
        let rdma_init_qp_attr = unsafe { __library.get(b"rdma_init_qp_attr\0") }.map(|sym| *sym)?;
        Ok(LibRdmacm {
            __library,
            rdma_create_event_channel,
            rdma_destroy_event_channel,
            rdma_create_id,
            rdma_destroy_id,
            rdma_bind_addr,
            rdma_resolve_addr,
            rdma_resolve_route,
            rdma_connect,
            rdma_establish,
            rdma_listen,
            rdma_accept,
            rdma_reject,
            rdma_disconnect,
            rdma_get_cm_event,
            rdma_ack_cm_event,
            rdma_get_src_port,
            rdma_event_str,
            rdma_set_option,
            rdma_migrate_id,
            rdma_init_qp_attr,
        })
    }
    pub unsafe fn rdma_create_event_channel(&self) -> *mut rdma_event_channel {
        unsafe { (self.rdma_create_event_channel)() }
    }
    pub unsafe fn rdma_destroy_event_channel(&self, channel: *mut rdma_event_channel) {
        unsafe { (self.rdma_destroy_event_channel)(channel) }
    }
    pub unsafe fn rdma_create_id(
        &self,
        channel: *mut rdma_event_channel,
        id: *mut *mut rdma_cm_id,
        context: *mut ::core::ffi::c_void,
        ps: rdma_port_space,
    ) -> ::core::ffi::c_int {
        unsafe { (self.rdma_create_id)(channel, id, context, ps) }
    }
    pub unsafe fn rdma_destroy_id(&self, id: *mut rdma_cm_id) -> ::core::ffi::c_int {
        unsafe { (self.rdma_destroy_id)(id) }
    }
    pub unsafe fn rdma_bind_addr(&self, id: *mut rdma_cm_id, addr: *mut sockaddr) -> ::core::ffi::c_int {
        unsafe { (self.rdma_bind_addr)(id, addr) }
    }
    pub unsafe fn rdma_resolve_addr(
        &self,
        id: *mut rdma_cm_id,
        src_addr: *mut sockaddr,
        dst_addr: *mut sockaddr,
        timeout_ms: ::core::ffi::c_int,
    ) -> ::core::ffi::c_int {
        unsafe { (self.rdma_resolve_addr)(id, src_addr, dst_addr, timeout_ms) }
    }
    pub unsafe fn rdma_resolve_route(
        &self,
        id: *mut rdma_cm_id,
        timeout_ms: ::core::ffi::c_int,
    ) -> ::core::ffi::c_int {
        unsafe { (self.rdma_resolve_route)(id, timeout_ms) }
    }
    pub unsafe fn rdma_connect(
        &self,
        id: *mut rdma_cm_id,
        conn_param: *mut rdma_conn_param,
    ) -> ::core::ffi::c_int {
        unsafe { (self.rdma_connect)(id, conn_param) }
    }
    pub unsafe fn rdma_establish(&self, id: *mut rdma_cm_id) -> ::core::ffi::c_int {
        unsafe { (self.rdma_establish)(id) }
    }
    pub unsafe fn rdma_listen(&self, id: *mut rdma_cm_id, backlog: ::core::ffi::c_int) -> ::core::ffi::c_int {
        unsafe { (self.rdma_listen)(id, backlog) }
    }
    pub unsafe fn rdma_accept(
        &self,
        id: *mut rdma_cm_id,
        conn_param: *mut rdma_conn_param,
    ) -> ::core::ffi::c_int {
        unsafe { (self.rdma_accept)(id, conn_param) }
    }
    pub unsafe fn rdma_reject(
        &self,
        id: *mut rdma_cm_id,
        private_data: *const ::core::ffi::c_void,
        private_data_len: u8,
    ) -> ::core::ffi::c_int {
        unsafe { (self.rdma_reject)(id, private_data, private_data_len) }
    }
    pub unsafe fn rdma_disconnect(&self, id: *mut rdma_cm_id) -> ::core::ffi::c_int {
        unsafe { (self.rdma_disconnect)(id) }
    }
    pub unsafe fn rdma_get_cm_event(
        &self,
        channel: *mut rdma_event_channel,
        event: *mut *mut rdma_cm_event,
    ) -> ::core::ffi::c_int {
        unsafe { (self.rdma_get_cm_event)(channel, event) }
    }
    pub unsafe fn rdma_ack_cm_event(&self, event: *mut rdma_cm_event) -> ::core::ffi::c_int {
        unsafe { (self.rdma_ack_cm_event)(event) }
    }
    pub unsafe fn rdma_get_src_port(&self, id: *mut rdma_cm_id) -> __be16 {
        unsafe { (self.rdma_get_src_port)(id) }
    }
    pub unsafe fn rdma_event_str(&self, event: rdma_cm_event_type) -> *const ::core::ffi::c_char {
        unsafe { (self.rdma_event_str)(event) }
    }
    pub unsafe fn rdma_set_option(
        &self,
        id: *mut rdma_cm_id,
        level: ::core::ffi::c_int,
        optname: ::core::ffi::c_int,
        optval: *mut ::core::ffi::c_void,
        optlen: usize,
    ) -> ::core::ffi::c_int {
        unsafe { (self.rdma_set_option)(id, level, optname, optval, optlen) }
    }
    pub unsafe fn rdma_migrate_id(
        &self,
        id: *mut rdma_cm_id,
        channel: *mut rdma_event_channel,
    ) -> ::core::ffi::c_int {
        unsafe { (self.rdma_migrate_id)(id, channel) }
    }
    pub unsafe fn rdma_init_qp_attr(
        &self,
        id: *mut rdma_cm_id,
        qp_attr: *mut ibv_qp_attr,
        qp_attr_mask: *mut ::core::ffi::c_int,
    ) -> ::core::ffi::c_int {
        unsafe { (self.rdma_init_qp_attr)(id, qp_attr, qp_attr_mask) }
    }
}
