// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The owner of a parameter: the one reducer that averages its gradient, if several share it.

#include <atomic>
#include <memory>

#include <ATen/core/Tensor.h>

namespace apex::parallel {

// Note [One parameter, one reducer]
//
// Several reducers may share a parameter. A module may be wrapped twice, a wrapper may be wrapped,
// and two wrapped modules may share layers. A replaced wrapper stays alive until the garbage
// collector runs, or as long as one of its outputs is referenced, which differs between ranks. If
// all these reducers acted on one gradient, it would be reduced twice, read while another reducer
// writes it, or reduced by some ranks only. So a parameter has one owner: the last constructed of
// the reducers that a backward reaches. The order of construction is the same on every rank. The
// order of forwards is not (a rank may evaluate a model alone), and neither is the order of
// destruction. A reducer that is not the owner treats the parameter as frozen. Without an owner,
// the first reducer whose hook runs takes a parameter that backward reaches without an output of a
// reducer. Hooks run in the order of construction.

/// The owner of one parameter. Thread safe.
using ParameterOwner = std::atomic<const void*>;

/// The owner entry of `parameter`, which all reducers share. It lives as long as a reducer holds
/// it, and the parameter must live as long.
std::shared_ptr<ParameterOwner> owner_of(const at::Tensor& parameter);

}  // namespace apex::parallel
