// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The exchange of step reports: sends this rank's row and receives the rows of all ranks.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/membership.h"
#include "step/step_report.h"

namespace apex::parallel::detail {

// Note [How reports travel]
//
// Reports use a separate all-gather on the group of the buckets, after the buckets. In shared
// memory that takes a few microseconds. Over sockets an additional collective costs a tenth of a
// small step. So over sockets the rows are sent in the last bucket, after its gradients. Each rank
// writes its row at its own position and zeros at the positions of the others, and the sum over the
// ranks is the table. Words are sent in pieces of 16 bits, which are exact in float32. If the last
// bucket is not a plain one on the CPU, or the table would be long because there are many ranks,
// the all-gather is used. On a device the rows of a rank are the same in most steps, so they are
// copied there once.

/// Exchanges the step reports of one reducer. Not thread safe.
class ReportExchange {
 public:
  ReportExchange(const Membership& members, size_t parameters)
      : members_(members), parameters_(parameters) {}

  /// Issues the exchange, and drops an earlier one that was not received. The host does not wait.
  /// @throws CommunicationError.
  void send(const std::string& what, const StepReport& report, const std::vector<uint8_t>& used,
            const std::vector<bool>& trainable);

  /// The size of the rows of all ranks in the tail of a bucket, in elements.
  static int64_t tail_size(const Membership& members, size_t parameters);
  /// Writes this rank's row, and zeros for the others, into `tail` [tail_size()]. It is float32 or
  /// float64 on the CPU, and is summed over the ranks.
  void write(const StepReport& report, const std::vector<uint8_t>& used,
             const std::vector<bool>& trainable, const at::Tensor& tail);
  /// The tail was sent with its bucket.
  /// @param done   whether the sum is complete; does not block.
  /// @param await  waits for the sum and returns it.
  void sent_behind(std::function<bool()> done,
                   std::function<at::Tensor(const std::function<void()>& meanwhile)> await);

  /// The rows of all ranks, or null if they have not arrived. Does not block.
  const StepTable* peek();
  /// Waits for the rows of all ranks on the host. `meanwhile`: see wait_collective().
  const StepTable& receive(const std::function<void()>& meanwhile = {});
  /// For a device whose reports are not read: orders the current stream after the exchange.
  void order() { std::exchange(message_, {}).order(); }
  void drop();

 private:
  const Membership& members_;
  const size_t parameters_;
  ControlMessage message_;
  ControlMessage last_;  ///< dropped, neither received nor ordered
  std::function<bool()> done_;
  std::function<at::Tensor(const std::function<void()>&)> await_;
  std::optional<StepTable> table_;
  // Kept for a device, because its memory may be exhausted when a failure is to be reported.
  at::Tensor row_;        ///< the last row that was sent, on the CPU
  at::Tensor on_device_;  ///< the same row on the device
  at::Tensor gathered_;
};

}  // namespace apex::parallel::detail
