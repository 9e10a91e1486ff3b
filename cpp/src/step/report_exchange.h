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
// By an all-gather of their own, over the group of the buckets and behind them. In shared memory
// that takes some microseconds. Over sockets a collective more is worth a tenth of a small step, so
// there the rows travel in the last bucket, behind its gradients: each rank writes its row in a
// place of its own, with zeros for those of the others, and the sum over ranks is the table. Words
// are sent in pieces of 16 bits, which are exact in float32, also if the sum is divided by the
// number of ranks. docs/performance.md has the measurement. Where the last bucket is not a plain
// one on the CPU, or there are so many ranks that the table would be long, it is an all-gather
// again. On a device the rows of a rank are the same in most steps, and are copied there once.

/// Not thread safe.
class ReportExchange {
 public:
  ReportExchange(const Membership& members, size_t parameters)
      : members_(members), parameters_(parameters) {}

  /// Issues it; one that was not received is forgotten. The host does not wait.
  /// @throws CommunicationError.
  void send(const std::string& what, const StepReport& report, const std::vector<uint8_t>& used,
            const std::vector<bool>& trainable);

  /// Elements that the rows of all ranks take in the tail of a bucket.
  static int64_t tail_size(const Membership& members, size_t parameters);
  /// Writes this rank's row, and nothing for the others, into `tail` [tail_size()], float32 or
  /// float64 on the CPU, which is summed over the ranks.
  void write(const StepReport& report, const std::vector<uint8_t>& used,
             const std::vector<bool>& trainable, const at::Tensor& tail);
  /// That was sent.
  /// @param done        whether the sum is there; does not block.
  /// @param await       waits for it, and returns it.
  /// @param divided_by  what the backend divides sums by.
  void sent_behind(std::function<bool()> done,
                   std::function<at::Tensor(const std::function<void()>& meanwhile)> await,
                   int divided_by);

  /// Whether a row was sent, and not dropped since.
  bool sent() const { return static_cast<bool>(message_) || await_ || table_; }
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
  std::function<bool()> done_;
  std::function<at::Tensor(const std::function<void()>&)> await_;
  int divided_by_ = 1;
  std::optional<StepTable> table_;
  // On a device, whose memory may have run out when there is most to say: kept.
  at::Tensor row_;        ///< the last one that was sent, on the CPU
  at::Tensor on_device_;  ///< and there
  at::Tensor gathered_;
};

}  // namespace apex::parallel::detail
