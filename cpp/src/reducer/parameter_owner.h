// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Which reducer averages the gradient of a parameter that several of them know.

#include <atomic>
#include <memory>

#include <ATen/core/Tensor.h>

namespace apex::parallel {

// Note [One parameter, one reducer]
//
// A module may be wrapped twice, a wrapper may be wrapped, two wrapped modules may share layers,
// and a wrapper that was replaced lives on while something refers to it: until the garbage
// collector comes by, or as long as an output of it is held, which differs from rank to rank. If
// all their reducers acted on one gradient, it would be reduced twice, from memory that the other
// is writing, or by some ranks only. So a parameter has one owner: of the reducers that a backward
// comes through, the one that was constructed last. Constructions come in the order of the program,
// which is the same on every rank; that cannot be said of forwards (a rank may evaluate what others
// do not), nor of destruction. For a reducer that is not the owner, the parameter is one that is
// frozen.

/// The owner of one parameter. Thread safe.
using ParameterOwner = std::atomic<const void*>;

/// The one place for `parameter` that all reducers share, for as long as one of them holds it. The
/// parameter has to live as long.
std::shared_ptr<ParameterOwner> owner_of(const at::Tensor& parameter);

}  // namespace apex::parallel
