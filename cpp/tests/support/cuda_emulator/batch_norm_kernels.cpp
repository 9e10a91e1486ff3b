// SPDX-License-Identifier: BSD-3-Clause
// The launches of batch_norm_cuda.h, compiled for the host and run by the emulator.

#include "kernels/batch_norm.cu"
