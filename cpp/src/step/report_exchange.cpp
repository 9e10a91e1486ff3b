// SPDX-License-Identifier: BSD-3-Clause
#include "step/report_exchange.h"

#include <algorithm>
#include <utility>

#include <ATen/Functions.h>

namespace apex::parallel::detail {

namespace {

/// Pieces of 16 bits in a word.
constexpr int kPieces = 4;

}  // namespace

void ReportExchange::send(const std::string& what, const StepReport& report,
                          const std::vector<uint8_t>& used, const std::vector<bool>& trainable) {
  drop();
  // Its all-gather may still read `on_device_`.
  std::exchange(last_, {}).order();
  const at::Tensor row =
      at::empty({static_cast<int64_t>(StepTable::row_size(parameters_))}, at::kLong);
  int64_t* const words = row.mutable_data_ptr<int64_t>();
  StepTable::encode(report, used, trainable, words);
  const at::Device device = members_.alone() ? at::Device(at::kCPU) : members_.control_device();
  if (device.is_cpu()) {
    message_ = members_.all_gather(what, row);
    return;
  }
  if (!on_device_.defined() || on_device_.device() != device) {
    on_device_ = at::empty_like(row, row.options().device(device));
    gathered_ = at::empty({members_.size * row.numel()}, on_device_.options());
    row_ = at::Tensor();
  }
  const bool same =
      row_.defined() && std::equal(words, words + row.numel(), row_.const_data_ptr<int64_t>());
  if (!same) on_device_.copy_(row_ = row, /*non_blocking=*/true);
  message_ = members_.all_gather(what, on_device_, gathered_);
}

int64_t ReportExchange::tail_size(const Membership& members, size_t parameters) {
  return members.size * kPieces * static_cast<int64_t>(StepTable::row_size(parameters));
}

void ReportExchange::write(const StepReport& report, const std::vector<uint8_t>& used,
                           const std::vector<bool>& trainable, const at::Tensor& tail) {
  std::vector<int64_t> words(StepTable::row_size(parameters_));
  StepTable::encode(report, used, trainable, words.data());
  std::vector<double> pieces(static_cast<size_t>(tail.numel()));
  double* mine = pieces.data() + static_cast<size_t>(members_.rank) * kPieces * words.size();
  for (const int64_t word : words) {
    for (int piece = 0; piece < kPieces; ++piece)
      *mine++ = static_cast<double>((static_cast<uint64_t>(word) >> (16 * piece)) & 0xffffU);
  }
  tail.copy_(at::from_blob(pieces.data(), tail.sizes(), at::kDouble));
}

void ReportExchange::sent_behind(
    std::function<bool()> done,
    std::function<at::Tensor(const std::function<void()>& meanwhile)> await) {
  drop();
  done_ = std::move(done);
  await_ = std::move(await);
}

const StepTable* ReportExchange::peek() {
  if (!table_ && (message_.arrived() || (done_ && done_()))) receive({});
  return table_ ? &*table_ : nullptr;
}

const StepTable& ReportExchange::receive(const std::function<void()>& meanwhile) {
  if (table_) return *table_;
  // What is waited for is taken first, because `meanwhile` may call peek().
  const ControlMessage message = std::exchange(message_, {});
  const auto await = std::exchange(await_, {});
  done_ = {};
  std::vector<int64_t> words;
  if (await) {
    const at::Tensor sum = await(meanwhile).to(at::kDouble);
    const auto* piece = sum.const_data_ptr<double>();
    words.resize(static_cast<size_t>(sum.numel() / kPieces));
    for (int64_t& word : words) {
      uint64_t bits = 0;
      for (int i = 0; i < kPieces; ++i) bits |= static_cast<uint64_t>(*piece++) << (16 * i);
      word = static_cast<int64_t>(bits);
    }
  } else {
    const at::Tensor rows = message.wait(meanwhile);
    words.assign(rows.const_data_ptr<int64_t>(), rows.const_data_ptr<int64_t>() + rows.numel());
  }
  return table_.emplace(std::move(words), static_cast<size_t>(members_.size), parameters_);
}

void ReportExchange::drop() {
  if (message_) last_ = std::exchange(message_, {});
  done_ = {};
  await_ = {};
  table_.reset();
}

}  // namespace apex::parallel::detail
