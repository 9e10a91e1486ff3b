// SPDX-License-Identifier: BSD-3-Clause
// The arithmetic of ThreadBackend's collectives: no threads, no state.
#include <support/thread_backend_control.h>

#include <cstring>
#include <sstream>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

namespace apex::testing {
namespace {

const char* name_of(ReduceOpType op) {
  switch (op) {
    case ReduceOpType::SUM:
      return "SUM";
    case ReduceOpType::MIN:
      return "MIN";
    case ReduceOpType::MAX:
      return "MAX";
    default:
      return "another reduction";
  }
}

// The elements in memory order, as a real backend sends them.
at::Tensor flat(const at::Tensor& tensor) {
  return tensor.as_strided({tensor.numel()}, {1}, tensor.storage_offset());
}

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.numel() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

at::Tensor reduced(const std::vector<Contribution>& ranks, ReduceOpType op) {
  at::Tensor result = flat(ranks[0].inputs[0]).clone();
  for (size_t rank = 1; rank < ranks.size(); ++rank) {
    const at::Tensor next = flat(ranks[rank].inputs[0]);
    TORCH_CHECK(op == ReduceOpType::SUM || op == ReduceOpType::MIN || op == ReduceOpType::MAX,
                "the thread backend sums, or takes the minimum or maximum");
    if (op == ReduceOpType::SUM) result.add_(next);
    if (op == ReduceOpType::MIN) result.copy_(at::minimum(result, next));
    if (op == ReduceOpType::MAX) result.copy_(at::maximum(result, next));
  }
  return result;
}

}  // namespace

std::string CollectiveRecord::describe() const {
  std::ostringstream text;
  text << op;
  if (reduce_op != ReduceOpType::UNUSED) text << '(' << name_of(reduce_op) << ')';
  if (root >= 0) text << " with root " << root;
  text << " of " << c10::toString(dtype) << ' ' << at::IntArrayRef(sizes);
  return text.str();
}

void run_collective(const std::vector<Contribution>& ranks) {
  // Below autograd, since parameters that require grad are valid outputs, as with a real backend.
  const at::AutoDispatchBelowADInplaceOrView guard;
  const CollectiveRecord& record = ranks[0].record;
  const size_t world = ranks.size();
  for (size_t rank = 0; rank < world; ++rank) {
    for (size_t i = 0; i < ranks[rank].inputs.size(); ++i) {
      TORCH_CHECK(same_bytes(flat(ranks[rank].inputs[i]), ranks[rank].snapshots[i]), "rank ", rank,
                  " wrote to a tensor while collective ", record.seq, " (",
                  ranks[rank].record.describe(), ") was still using it");
    }
  }
  // Results are computed first, since an output may share memory with an input.
  std::vector<at::Tensor> sources;
  if (record.op == "allreduce") sources = {reduced(ranks, record.reduce_op)};
  if (record.op == "broadcast") sources = {flat(ranks[record.root].inputs[0]).clone()};
  if (record.op == "allgather" || record.op == "_allgather_base") {
    for (const Contribution& from : ranks) sources.push_back(flat(from.inputs[0]).clone());
  }
  for (size_t rank = 0; rank < world; ++rank) {
    if (record.op == "broadcast" && static_cast<int64_t>(rank) == record.root) continue;
    if (record.op == "alltoall_base") {
      sources.clear();
      for (const Contribution& from : ranks) sources.push_back(flat(from.inputs[rank]));
    }
    for (size_t i = 0; i < sources.size(); ++i) {
      const at::Tensor output = flat(ranks[rank].outputs[i]);
      TORCH_CHECK(output.numel() == sources[i].numel(), record.op, ": rank ", rank,
                  " has room for ", output.numel(), " elements, and not for ", sources[i].numel());
      output.copy_(sources[i]);
    }
  }
}

}  // namespace apex::testing
