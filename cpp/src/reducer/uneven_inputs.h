// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

namespace apex::parallel::detail {

// Note [Uneven inputs]
//
// Under join() a rank that has run out of data takes part in each synchronized backward of the
// others: it launches zeros for every bucket of the plan, and its report contains `without_data`.
// So it waits in the next bucket, or report, until the other ranks come. If the reports of all
// ranks contain `without_data`, the join has ended on every rank. Nothing is announced, and a
// backward under no_sync() needs nothing from the others.
//
// The reports are read before the first bucket is unpacked. So the number of ranks with data is
// known when the sum is divided, like the weights of Note [Weighted means].
//
// Only the reducer's own messages are covered. A collective of the module, such as that of a
// synchronized batch norm, would meet a bucket of the rank without data.

/// The state of join() on this rank.
struct UnevenInputs {
  bool active = false;              ///< between begin_join() and end_join()
  bool by_ranks_with_data = false;  ///< averages are over the ranks that have data
  bool throws = false;              ///< throw_on_early_termination
  bool without_data = false;        ///< this rank has run out of data
  bool followed = false;            ///< it has taken part in a backward of ranks with data
  bool over = false;                ///< no rank has data
  int64_t last = -1;  ///< when it is over: a rank that had data to the end; -1 if all had
};

}  // namespace apex::parallel::detail
