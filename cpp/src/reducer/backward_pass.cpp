// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/backward_pass.h"

#include <apex/error.h>

namespace apex::parallel::detail {

void BackwardPass::rethrow() const {
  if (!out_of_step.empty()) throw RankMismatch(out_of_step);
  if (!error.empty()) throw Error(error);
  if (!non_finite.empty()) throw NonFiniteGradient(non_finite);
}

}  // namespace apex::parallel::detail
