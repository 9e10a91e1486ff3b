// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <memory>

#include <apex/parallel/reducer.h>
#include <nanobind/nanobind.h>

namespace apex::python {

/// A communication hook written in Python: `runner(bucket, completion)`, where `bucket` has the
/// methods of torch.distributed.GradBucket and `completion` takes the result.
std::shared_ptr<parallel::CommHook> make_python_comm_hook(nanobind::object runner);

/// Registers GradBucket and Completion.
void init_python_comm_hook(nanobind::module_& m);

}  // namespace apex::python
