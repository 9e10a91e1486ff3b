// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Includes all headers of apex's C++ interface.

#include <apex/amp/autocast.h>
#include <apex/amp/loss_scaler.h>
#include <apex/distributed/collectives.h>
#include <apex/distributed/host_backend.h>
#include <apex/distributed/launch_environment.h>
#include <apex/distributed/log.h>
#include <apex/distributed/process_group.h>
#include <apex/error.h>
#include <apex/interruption.h>
#include <apex/parallel/checkpoint.h>
#include <apex/parallel/comm_hook.h>
#include <apex/parallel/detail/bucket_assignment.h>
#include <apex/parallel/detail/model_sync.h>
#include <apex/parallel/detail/output_tensors.h>
#include <apex/parallel/distributed_data_parallel.h>
#include <apex/parallel/guards.h>
#include <apex/parallel/larc.h>
#include <apex/parallel/reducer.h>
#include <apex/parallel/sharded_optimizer.h>
#include <apex/parallel/stall_report.h>
#include <apex/parallel/sync_batch_norm.h>
#include <apex/version.h>
