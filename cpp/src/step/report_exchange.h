// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Sends this rank's row, and receives those of all.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/membership.h"
#include "step/step_report.h"

namespace apex::parallel::detail {

// Note [How reports travel]
//
// By an all-gather of their own, over the group of the buckets and behind them. Numbers that ride
// in the last bucket would save a small collective; they cost every bucket a tail in which
// gradients and numbers are told apart, in each dtype, before and after each reduction, and their
// size grows with the number of ranks in a sum, whose every element travels twice.
// docs/performance.md has the measurement. On a device the rows of a rank are the same in most
// steps, and are copied there once.

/// Not thread safe.
class ReportExchange {
 public:
  ReportExchange(const Membership& members, size_t parameters)
      : members_(members), parameters_(parameters) {}

  /// Issues it; one that was not received is forgotten. The host does not wait.
  /// @throws CommunicationError.
  void send(const std::string& what, const StepReport& report, const std::vector<uint8_t>& used,
            const std::vector<bool>& trainable);

  /// Whether a row was sent, and not dropped since.
  bool sent() const { return static_cast<bool>(message_) || table_; }
  /// The rows of all ranks, if they are there. Does not block.
  const StepTable* peek();
  /// The same, which the host waits for. `meanwhile`: see wait_collective().
  const StepTable& receive(const std::function<void()>& meanwhile);
  /// Where nobody reads them: on a device, what the current stream does next comes after.
  void order() const { message_.order(); }
  void drop();

 private:
  const Membership& members_;
  const size_t parameters_;
  ControlMessage message_;
  std::optional<StepTable> table_;
  // On a device, whose memory may have run out when there is most to say: kept.
  at::Tensor row_;        ///< the last one that was sent, on the CPU
  at::Tensor on_device_;  ///< and there
  at::Tensor gathered_;
};

}  // namespace apex::parallel::detail
