// SPDX-License-Identifier: BSD-3-Clause
// The CUDA operators of batch norm, registered for the fake device. Their headers are included
// first, so that the name of the dispatch key is replaced in that one file only.

#include <ATen/ATen.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <utility>

#include "batch_norm/sync_batch_norm_ops.h"
#include "kernels/batch_norm_cuda.h"

#define CUDA PrivateUse1
#include "batch_norm/sync_batch_norm_cuda.cpp"
#undef CUDA
