// SPDX-License-Identifier: BSD-3-Clause
//! `<apex/c_api.h>` in Rust: every function, with the types that C has. The header describes them.
//! For tch: `Tensor::as_ptr()` is what `apex_reducer_create_torch` takes.
#![allow(dead_code)]

use std::ffi::{c_char, c_int, c_void};

pub const APEX_OK: c_int = 0;

pub const APEX_INT64: c_int = 2;
pub const APEX_FLOAT32: c_int = 5;
pub const APEX_FLOAT64: c_int = 6;

pub const APEX_SUM: c_int = 0;
pub const APEX_MIN: c_int = 1;
pub const APEX_MAX: c_int = 2;

#[repr(C)]
pub struct ApexTensor {
    pub data: *mut c_void,
    pub dim: i64,
    pub sizes: *const i64,
    pub strides: *const i64,
    pub dtype: c_int,
    pub device: i32,
}

#[repr(C)]
pub struct ApexGroup {
    _private: [u8; 0],
}

#[repr(C)]
pub struct ApexReducer {
    _private: [u8; 0],
}

extern "C" {
    pub fn apex_last_error() -> *const c_char;
    pub fn apex_version() -> *const c_char;
    pub fn apex_init(
        backend: *const c_char,
        init_method: *const c_char,
        rank: c_int,
        world_size: c_int,
        timeout_ms: i64,
        group: *mut *mut ApexGroup,
    ) -> c_int;
    pub fn apex_shutdown(group: *mut ApexGroup);
    pub fn apex_rank(group: *const ApexGroup) -> c_int;
    pub fn apex_world_size(group: *const ApexGroup) -> c_int;
    pub fn apex_all_reduce(group: *mut ApexGroup, tensor: *const ApexTensor, op: c_int) -> c_int;
    pub fn apex_broadcast(group: *mut ApexGroup, tensor: *const ApexTensor, root: c_int) -> c_int;
    pub fn apex_barrier(group: *mut ApexGroup) -> c_int;
    pub fn apex_reducer_create(
        group: *mut ApexGroup,
        parameters: *const ApexTensor,
        gradients: *const ApexTensor,
        count: usize,
        bucket_bytes: i64,
        reducer: *mut *mut ApexReducer,
    ) -> c_int;
    pub fn apex_reducer_create_weighted(
        group: *mut ApexGroup,
        parameters: *const ApexTensor,
        gradients: *const ApexTensor,
        count: usize,
        bucket_bytes: i64,
        reducer: *mut *mut ApexReducer,
    ) -> c_int;
    pub fn apex_reducer_set_weight(reducer: *mut ApexReducer, weight: f64) -> c_int;
    pub fn apex_reducer_gradient_ready(reducer: *mut ApexReducer, index: usize) -> c_int;
    pub fn apex_reducer_synchronize(reducer: *mut ApexReducer) -> c_int;
    pub fn apex_reducer_create_torch(
        group: *mut ApexGroup,
        parameters: *const *mut c_void,
        names: *const *const c_char,
        count: usize,
        bucket_bytes: i64,
        reducer: *mut *mut ApexReducer,
    ) -> c_int;
    pub fn apex_reducer_create_torch_weighted(
        group: *mut ApexGroup,
        parameters: *const *mut c_void,
        names: *const *const c_char,
        count: usize,
        bucket_bytes: i64,
        reducer: *mut *mut ApexReducer,
    ) -> c_int;
    pub fn apex_reducer_prepare_forward(reducer: *mut ApexReducer) -> c_int;
    pub fn apex_reducer_set_synchronizing(reducer: *mut ApexReducer, on: c_int) -> c_int;
    pub fn apex_reducer_destroy(reducer: *mut ApexReducer);
}
