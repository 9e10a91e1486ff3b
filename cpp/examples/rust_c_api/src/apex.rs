// SPDX-License-Identifier: BSD-3-Clause
//! Safe types for the functions of `<apex/c_api.h>` that this program calls. A `Group` is the place
//of this ! process in the job. A `Reducer` owns parameters and gradients, and averages the
//gradients.

use std::ffi::{c_int, c_void, CStr};
use std::marker::PhantomData;
use std::{fmt, ptr};

use crate::ffi;

/// The text of `apex_last_error()`: which rank, what happened, what to do.
#[derive(Debug)]
pub struct Error(pub String);

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        out.write_str(&self.0)
    }
}

impl std::error::Error for Error {}

pub type Result<T> = std::result::Result<T, Error>;

fn check(status: c_int) -> Result<()> {
    if status == ffi::APEX_OK {
        return Ok(());
    }
    let message = unsafe { CStr::from_ptr(ffi::apex_last_error()) };
    Err(Error(message.to_string_lossy().into_owned()))
}

/// Leaves the job when it is dropped.
pub struct Group(*mut ffi::ApexGroup);

impl Group {
    /// Joins the job that the launcher's environment variables describe.
    pub fn join(backend: &CStr) -> Result<Group> {
        let mut group = ptr::null_mut();
        check(unsafe { ffi::apex_init(backend.as_ptr(), ptr::null(), -1, -1, 0, &mut group) })?;
        Ok(Group(group))
    }

    pub fn rank(&self) -> usize {
        unsafe { ffi::apex_rank(self.0) as usize }
    }

    pub fn world_size(&self) -> usize {
        unsafe { ffi::apex_world_size(self.0) as usize }
    }

    /// In place. `op`: APEX_SUM, APEX_MIN or APEX_MAX.
    pub fn all_reduce(&self, values: &mut [f64], op: c_int) -> Result<()> {
        self.all_reduce_as(
            values.as_mut_ptr().cast(),
            values.len(),
            ffi::APEX_FLOAT64,
            op,
        )
    }

    /// Whether all ranks have the same bits.
    pub fn ranks_agree(&self, values: &[f64]) -> Result<bool> {
        let bits: Vec<i64> = values.iter().map(|value| value.to_bits() as i64).collect();
        let (mut least, mut most) = (bits.clone(), bits);
        self.all_reduce_as(
            least.as_mut_ptr().cast(),
            least.len(),
            ffi::APEX_INT64,
            ffi::APEX_MIN,
        )?;
        self.all_reduce_as(
            most.as_mut_ptr().cast(),
            most.len(),
            ffi::APEX_INT64,
            ffi::APEX_MAX,
        )?;
        Ok(least == most)
    }

    fn all_reduce_as(
        &self,
        data: *mut c_void,
        count: usize,
        dtype: c_int,
        op: c_int,
    ) -> Result<()> {
        let sizes = [count as i64];
        let tensor = describe(data, &sizes, dtype);
        check(unsafe { ffi::apex_all_reduce(self.0, &tensor, op) })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        unsafe { ffi::apex_shutdown(self.0) }
    }
}

/// Contiguous float64 in memory of this program.
pub struct Tensor {
    pub data: Vec<f64>,
    sizes: Vec<i64>,
}

impl Tensor {
    pub fn zeros(sizes: &[usize]) -> Tensor {
        Tensor {
            data: vec![0.0; sizes.iter().product()],
            sizes: sizes.iter().map(|&size| size as i64).collect(),
        }
    }
}

fn describe(data: *mut c_void, sizes: &[i64], dtype: c_int) -> ffi::ApexTensor {
    ffi::ApexTensor {
        data,
        dim: sizes.len() as i64,
        sizes: sizes.as_ptr(),
        strides: ptr::null(),
        dtype,
        device: -1,
    }
}

/// Its tensors are in memory that the engine reads and writes, so that they cannot leave it.
pub struct Reducer<'group> {
    handle: *mut ffi::ApexReducer,
    parameters: Vec<Tensor>,
    gradients: Vec<Tensor>,
    group: PhantomData<&'group Group>,
}

impl<'group> Reducer<'group> {
    /// Of gradients that are sums over samples. The parameters become rank 0's. `bucket_bytes`: the
    /// size at which a bucket of gradients is closed; 0 for the default.
    pub fn weighted(
        group: &'group Group,
        mut parameters: Vec<Tensor>,
        bucket_bytes: i64,
    ) -> Result<Self> {
        let zeros = |like: &Tensor| Tensor {
            data: vec![0.0; like.data.len()],
            sizes: like.sizes.clone(),
        };
        let mut gradients: Vec<Tensor> = parameters.iter().map(zeros).collect();
        let describe_all = |tensors: &mut [Tensor]| -> Vec<ffi::ApexTensor> {
            let one = |tensor: &mut Tensor| {
                describe(
                    tensor.data.as_mut_ptr().cast(),
                    &tensor.sizes,
                    ffi::APEX_FLOAT64,
                )
            };
            tensors.iter_mut().map(one).collect()
        };
        let (of_parameters, of_gradients) =
            (describe_all(&mut parameters), describe_all(&mut gradients));
        let mut handle = ptr::null_mut();
        check(unsafe {
            ffi::apex_reducer_create_weighted(
                group.0,
                of_parameters.as_ptr(),
                of_gradients.as_ptr(),
                of_parameters.len(),
                bucket_bytes,
                &mut handle,
            )
        })?;
        Ok(Reducer {
            handle,
            parameters,
            gradients,
            group: PhantomData,
        })
    }

    pub fn parameters(&self) -> &[Tensor] {
        &self.parameters
    }

    pub fn gradients(&self) -> &[Tensor] {
        &self.gradients
    }

    /// For the optimizer: each parameter's values, and its gradient.
    pub fn parameters_and_gradients(&mut self) -> impl Iterator<Item = (&mut [f64], &[f64])> {
        let gradients = self.gradients.iter().map(|tensor| tensor.data.as_slice());
        self.parameters
            .iter_mut()
            .map(|tensor| tensor.data.as_mut_slice())
            .zip(gradients)
    }

    /// Before the gradients of each step: how many samples they are sums over.
    pub fn set_weight(&mut self, weight: f64) -> Result<()> {
        check(unsafe { ffi::apex_reducer_set_weight(self.handle, weight) })
    }

    /// Gives one gradient to the engine, which may send it from now on.
    pub fn gradient_ready(&mut self, index: usize, values: &[f64]) -> Result<()> {
        self.gradients[index].data.copy_from_slice(values);
        check(unsafe { ffi::apex_reducer_gradient_ready(self.handle, index) })
    }

    /// The end of backward: all gradients are the mean over the samples of all ranks.
    pub fn synchronize(&mut self) -> Result<()> {
        check(unsafe { ffi::apex_reducer_synchronize(self.handle) })
    }
}

impl Drop for Reducer<'_> {
    fn drop(&mut self) {
        unsafe { ffi::apex_reducer_destroy(self.handle) }
    }
}
