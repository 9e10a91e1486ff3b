// SPDX-License-Identifier: BSD-3-Clause
#ifndef APEX_C_API_H
#define APEX_C_API_H

#include <stddef.h>
#include <stdint.h>

#include <apex/export.h>

/* Data-parallel training from C, and from languages that call C.
 *
 * Every function returns a status. After a status other than APEX_OK, apex_last_error() returns
 * the message on the same thread: which rank, what happened, and the remedy. No C++ exception
 * leaves a function. Outputs are written on success only. Strings are UTF-8 and are copied.
 *
 * There are two ways to average gradients:
 *
 *   - The caller computes gradients in its own memory and announces each one:
 *     apex_reducer_create(), apex_reducer_gradient_ready(), apex_reducer_synchronize(). Gradients
 *     are sent in buckets while the caller computes the next ones.
 *   - The caller uses libtorch's autograd (tch, JavaCPP): apex_reducer_create_torch() takes
 *     pointers to at::Tensor. Gradients are averaged when backward() returns.
 *
 * Unless stated otherwise, functions with a group or a reducer are collective: every rank calls
 * them in the same order. They block the caller; on CUDA the current stream. Handles are not
 * thread safe.
 */

#ifdef __cplusplus
extern "C" {
#endif

/* In C++ the enum type is fixed, so that a number without a name here can be read and refused. */
#ifdef __cplusplus
#define APEX_ENUM_TYPE : int
#else
#define APEX_ENUM_TYPE
#endif

typedef enum apex_status APEX_ENUM_TYPE {
  APEX_OK = 0,
  APEX_ERROR = 1,            /* see the message */
  APEX_INVALID_ARGUMENT = 2, /* nothing was changed or sent */
  APEX_RANK_MISMATCH = 3,    /* the ranks do different things; on every rank */
  APEX_COMMUNICATION = 4     /* another rank is lost; begin again with a new group */
} apex_status;

typedef enum apex_dtype APEX_ENUM_TYPE {
  APEX_UINT8 = 0,
  APEX_INT32 = 1,
  APEX_INT64 = 2,
  APEX_FLOAT16 = 3,
  APEX_BFLOAT16 = 4,
  APEX_FLOAT32 = 5,
  APEX_FLOAT64 = 6
} apex_dtype;

typedef enum apex_reduce_op APEX_ENUM_TYPE {
  APEX_SUM = 0,
  APEX_MIN = 1,
  APEX_MAX = 2
} apex_reduce_op;

/* A tensor in the caller's memory, which has to stay valid while a call or a reducer uses it. */
typedef struct apex_tensor {
  void* data;             /* the first element; NULL only without elements */
  int64_t dim;            /* number of dimensions; 0: one element */
  const int64_t* sizes;   /* [dim]; not read after the call */
  const int64_t* strides; /* [dim] in elements, not negative; NULL: contiguous */
  apex_dtype dtype;
  int32_t device; /* -1: CPU; otherwise the index of a CUDA device */
} apex_tensor;

typedef struct apex_group apex_group;
typedef struct apex_reducer apex_reducer;

/* The message of the last failure on this thread; "" if none. Valid until the next failure. */
APEX_API const char* apex_last_error(void);

/* "0.1.0" */
APEX_API const char* apex_version(void);

/* Joins the job: apex::distributed::init_process_group(). `backend`: "gloo" (CPU), "nccl" (CUDA)
 * or "cpu:gloo,cuda:nccl". `init_method`: NULL for the launcher's environment variables
 * (torchrun, srun, mpirun), "tcp://host:port" or "file:///path". `rank` and `world_size`: -1 for
 * the launcher's. `timeout_ms`: 0 for the default. At most one group per process at a time. */
APEX_API apex_status apex_init(const char* backend, const char* init_method, int rank,
                               int world_size, int64_t timeout_ms, apex_group** group);
/* Leaves the job and frees the group. Destroy its reducers first. Does not block. Ignores NULL. */
APEX_API void apex_shutdown(apex_group* group);

/* Not collective. Return -1 for NULL. */
APEX_API int apex_rank(const apex_group* group);
APEX_API int apex_world_size(const apex_group* group);

/* In place, on contiguous tensors of the same shape and dtype on every rank. */
APEX_API apex_status apex_all_reduce(apex_group* group, const apex_tensor* tensor,
                                     apex_reduce_op op);
APEX_API apex_status apex_broadcast(apex_group* group, const apex_tensor* tensor, int root);
APEX_API apex_status apex_barrier(apex_group* group);

/* Averages gradients in the caller's memory. All ranks have to pass the same parameters: shapes,
 * strides and dtypes are compared (APEX_RANK_MISMATCH), and rank 0's parameters are broadcast.
 *
 * `parameters`, `gradients`: [count]; gradients[i] has the shape and dtype of parameters[i],
 * float32 or another floating dtype. The memory belongs to the caller and must not move. Elements
 * of gradients must not share memory, within a gradient or between two. Only a stride of 0 is
 * refused; with any other overlap the averages are wrong.
 * `bucket_bytes`: size at which a bucket is closed; 0 for the default. The first step records
 * the order in which gradients are announced and reduces at its end. All ranks use rank 0's
 * order. From the second step on, buckets are launched as they fill. A reducer has its own
 * connections if the backend supports it (gloo), so several reducers of a group do not
 * interfere. */
APEX_API apex_status apex_reducer_create(apex_group* group, const apex_tensor* parameters,
                                         const apex_tensor* gradients, size_t count,
                                         int64_t bucket_bytes, apex_reducer** reducer);

/* The same for sums of gradients over samples: divides them by the sum of all ranks' weights
 * (apex_reducer_set_weight()). The result is the gradient of the mean over all samples, however
 * they are split over the ranks. */
APEX_API apex_status apex_reducer_create_weighted(apex_group* group, const apex_tensor* parameters,
                                                  const apex_tensor* gradients, size_t count,
                                                  int64_t bucket_bytes, apex_reducer** reducer);

/* Sets the weight, such as the number of samples, of the next gradients of a weighted reducer. A
 * reducer of apex_reducer_create_weighted() needs it in every step, before the first gradient. A
 * reducer of apex_reducer_create_torch_weighted() needs it before each backward on new samples;
 * weights add up while it does not synchronize. Not negative; if the weights sum to 0, gradients
 * become zero. If a weight is missing or refused, the end of the step fails on every rank. Not
 * collective. */
APEX_API apex_status apex_reducer_set_weight(apex_reducer* reducer, double weight);

/* Announces that gradients[index] is computed and will not change before
 * apex_reducer_synchronize(). After the first step, launches the gradient's bucket if it is full
 * and all earlier buckets are launched. Does not wait for other ranks. In any order, once per
 * gradient and step; APEX_INVALID_ARGUMENT otherwise. */
APEX_API apex_status apex_reducer_gradient_ready(apex_reducer* reducer, size_t index);

/* Ends the step: launches the remaining buckets, waits, and writes the average over the ranks to
 * every gradient. A gradient that this rank did not announce counts as zero; one that no rank
 * announced becomes zero. */
APEX_API apex_status apex_reducer_synchronize(apex_reducer* reducer);

/* apex::parallel::Reducer for libtorch parameters. parameters[i] points to an at::Tensor (tch:
 * Tensor::as_ptr(), JavaCPP: Tensor.address()), which the reducer shares. `names`: [count], for
 * messages, or NULL. `bucket_bytes`: like bucket_cap_mb in C++ and Python, so that ranks in
 * these languages can be in the same job; the first bucket has at most 1 MiB. Every backward
 * averages the gradients of parameters that require them, until the reducer is destroyed. Errors
 * leave backward() as C++ exceptions. */
APEX_API apex_status apex_reducer_create_torch(apex_group* group, void* const* parameters,
                                               const char* const* names, size_t count,
                                               int64_t bucket_bytes, apex_reducer** reducer);

APEX_API apex_status apex_reducer_create_torch_weighted(apex_group* group, void* const* parameters,
                                                        const char* const* names, size_t count,
                                                        int64_t bucket_bytes,
                                                        apex_reducer** reducer);

/* Call before each forward, for apex_reducer_create_torch(). Not collective. */
APEX_API apex_status apex_reducer_prepare_forward(apex_reducer* reducer);

/* For apex_reducer_create_torch(): 0 makes backward accumulate gradients without communication,
 * until it is set to 1. Not collective, but has to be the same on every rank. */
APEX_API apex_status apex_reducer_set_synchronizing(apex_reducer* reducer, int on);

/* Not collective. Ignores NULL. */
APEX_API void apex_reducer_destroy(apex_reducer* reducer);

#ifdef __cplusplus
}
#endif

#endif
