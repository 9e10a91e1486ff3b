// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Every reducer of the process, for what concerns more than one of them.

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

namespace apex::parallel::detail {

class ReducerCore;

// Note [One backward, all its reducers]
//
// A backward may come through several reducers' outputs, one after the other. If each took part
// only from its own output on, an exception on one rank before that would leave the others waiting
// for this reducer. What a rank uses, in which order, and where it raises, differs; which reducers
// its graph comes through does not. So the first output that a backward reaches begins it for every
// reducer of which an output lies in the graph: in the order of construction, so that they end in
// the same order on every rank, too. Of those that know a parameter, the one constructed last owns
// it from then on.
//
// An exception in a part of the graph that comes before all outputs is a backward that was not run.

/// Adds a reducer; it leaves by drop_reducer().
void add_reducer(const std::shared_ptr<ReducerCore>& state);
void drop_reducer(const ReducerCore* state);

/// Those that are alive, in the order of construction. Thread safe, as the two above.
std::vector<std::shared_ptr<ReducerCore>> all_reducers();

/// Of these, the owners of `parameters`.
std::vector<std::shared_ptr<ReducerCore>> owners_of(const std::vector<at::Tensor>& parameters);

/// Called by autograd when a backward comes to an output of `reached`. No reducer may be locked by
/// this thread.
void enter_backward(ReducerCore& reached);

}  // namespace apex::parallel::detail
