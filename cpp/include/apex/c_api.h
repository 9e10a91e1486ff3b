// SPDX-License-Identifier: BSD-3-Clause
#ifndef APEX_C_API_H
#define APEX_C_API_H

#include <stddef.h>
#include <stdint.h>

#include <apex/export.h>

/* Data-parallel training from C, and from languages that call C.
 *
 * Every function returns a status; apex_last_error() has the message of the last one that was not
 * APEX_OK on this thread: which rank, what happened, what to do. No C++ exception leaves a
 * function. Outputs are written on success only. Strings are UTF-8 and are copied.
 *
 * Two ways to average gradients:
 *
 *   - The caller computes gradients in memory of its own and tells when each is there:
 *     apex_reducer_create(), apex_reducer_gradient_ready(), apex_reducer_synchronize(). Gradients
 *     travel in buckets while the caller computes the next ones.
 *   - The caller uses libtorch's autograd (tch, JavaCPP): apex_reducer_create_torch() takes
 * pointers to at::Tensor. Gradients are then averaged when backward() returns.
 *
 * Functions that name a group or a reducer are collective: every rank calls them, in the same
 * order, except where they say otherwise. They block the caller; on CUDA the current stream.
 * Handles are not thread safe.
 */

#ifdef __cplusplus
extern "C" {
#endif

/* In C++ the type is fixed: a number that has no name here can be read, and is refused. */
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

/* A tensor in memory that the caller owns, and keeps while a call or a reducer uses it. */
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

/* The message of the last failure on this thread; "" before one. Valid until the next failure. */
APEX_API const char* apex_last_error(void);

/* "0.1.0" */
APEX_API const char* apex_version(void);

/* Joins the job: apex::distributed::init_process_group(). `backend`: "gloo" (CPU), "nccl" (CUDA) or
 * "cpu:gloo,cuda:nccl". `init_method`: NULL for the launcher's environment variables (torchrun,
 * srun, mpirun), "tcp://host:port" or "file:///path". `rank` and `world_size`: -1 for the
 * launcher's. `timeout_ms`: 0 for the default. Once in a process at a time. */
APEX_API apex_status apex_init(const char* backend, const char* init_method, int rank,
                               int world_size, int64_t timeout_ms, apex_group** group);
/* Leaves the job and frees the group; reducers of it have to be destroyed before. Does not block.
 * NULL: nothing. */
APEX_API void apex_shutdown(apex_group* group);

/* Not collective. -1 for NULL. */
APEX_API int apex_rank(const apex_group* group);
APEX_API int apex_world_size(const apex_group* group);

/* In place, of contiguous tensors of the same shape and dtype on every rank. */
APEX_API apex_status apex_all_reduce(apex_group* group, const apex_tensor* tensor,
                                     apex_reduce_op op);
APEX_API apex_status apex_broadcast(apex_group* group, const apex_tensor* tensor, int root);
APEX_API apex_status apex_barrier(apex_group* group);

/* Averages gradients in the caller's memory. All ranks have to give the same parameters: shapes,
 * strides and dtypes are compared (APEX_RANK_MISMATCH), and the parameters become rank 0's.
 *
 * `parameters`, `gradients`: [count]; gradients[i] has the shape and dtype of parameters[i],
 * float32 or another floating dtype. The memory stays where it is, and belongs to the caller.
 * `bucket_bytes`: size at which a bucket is closed; 0 for the default. The first step records the
 * order in which gradients are announced, rank 0's for all, and sends them at its end; from the
 * second step on, buckets in that order are sent as they fill. A reducer has connections of its
 * own, where the backend has them (gloo): several of a group are not mixed up. */
APEX_API apex_status apex_reducer_create(apex_group* group, const apex_tensor* parameters,
                                         const apex_tensor* gradients, size_t count,
                                         int64_t bucket_bytes, apex_reducer** reducer);

/* The same, of sums of gradients over samples: they are divided by the sum of all ranks' weights
 * (apex_reducer_set_weight()), which gives the gradient of the mean over all samples, however many
 * each rank has. */
APEX_API apex_status apex_reducer_create_weighted(apex_group* group, const apex_tensor* parameters,
                                                  const apex_tensor* gradients, size_t count,
                                                  int64_t bucket_bytes, apex_reducer** reducer);

/* How much the samples count whose gradients come next, such as their number: of a weighted
 * reducer. One of apex_reducer_create_weighted() needs it in every step, before its first gradient;
 * one of apex_reducer_create_torch_weighted() before each backward on other samples, and weights
 * add up while it does not synchronize. Not negative; a sum of 0 leaves zeros. One that is missing
 * or refused fails the end of the step on every rank. Not collective. */
APEX_API apex_status apex_reducer_set_weight(apex_reducer* reducer, double weight);

/* gradients[index] is computed, and is not changed before apex_reducer_synchronize(). After the
 * first step, sends its bucket if that is full and those before it were sent. Does not wait for
 * other ranks. In any order, once per gradient and step; APEX_INVALID_ARGUMENT otherwise. */
APEX_API apex_status apex_reducer_gradient_ready(apex_reducer* reducer, size_t index);

/* The end of backward: sends what was not sent, waits, and writes the average over the ranks to
 * every gradient. One that was not announced on this rank counts as zeros here; one that no rank
 * has announced becomes zero. */
APEX_API apex_status apex_reducer_synchronize(apex_reducer* reducer);

/* The engine of apex::parallel::Reducer, around parameters of libtorch: parameters[i] points to an
 * at::Tensor (tch: Tensor::as_ptr(), JavaCPP: Tensor.address()), whose tensor the reducer shares.
 * `names`: [count], for messages, or NULL. `bucket_bytes`: as bucket_cap_mb in C++ and Python, of
 * which ranks may be in the same job: the first bucket has at most 1 MiB. Every backward averages
 * the gradients of those that require them, until the reducer is destroyed; its errors leave
 * backward() as C++ exceptions. */
APEX_API apex_status apex_reducer_create_torch(apex_group* group, void* const* parameters,
                                               const char* const* names, size_t count,
                                               int64_t bucket_bytes, apex_reducer** reducer);

APEX_API apex_status apex_reducer_create_torch_weighted(apex_group* group, void* const* parameters,
                                                        const char* const* names, size_t count,
                                                        int64_t bucket_bytes,
                                                        apex_reducer** reducer);

/* Before each forward; of apex_reducer_create_torch(). Not collective. */
APEX_API apex_status apex_reducer_prepare_forward(apex_reducer* reducer);

/* 0: backward adds up gradients and sends nothing, until 1; of apex_reducer_create_torch(). Not
 * collective, but the same on every rank. */
APEX_API apex_status apex_reducer_set_synchronizing(apex_reducer* reducer, int on);

/* Not collective. NULL: nothing. */
APEX_API void apex_reducer_destroy(apex_reducer* reducer);

#ifdef __cplusplus
}
#endif

#endif
