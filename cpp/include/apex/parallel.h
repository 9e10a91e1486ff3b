// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Includes all headers of apex's C++ interface.

#include <apex/amp.h>
#include <apex/distributed.h>
#include <apex/error.h>
#include <apex/optim.h>
#include <apex/parallel/checkpoint.h>
#include <apex/parallel/comm_hook.h>
#include <apex/parallel/distributed_data_parallel.h>
#include <apex/parallel/reducer.h>
#include <apex/parallel/stall_report.h>
#include <apex/parallel/sync_batch_norm.h>
#include <apex/version.h>
