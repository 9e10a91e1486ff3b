// SPDX-License-Identifier: BSD-3-Clause
#include <support/thread_collectives.h>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <cstring>
#include <sstream>

namespace apex::testing {
namespace {

const char* name_of(ReduceOpType op) {
  switch (op) {
    case ReduceOpType::SUM:
      return "SUM";
    case ReduceOpType::AVG:
      return "AVG";
    case ReduceOpType::PRODUCT:
      return "PRODUCT";
    case ReduceOpType::MIN:
      return "MIN";
    case ReduceOpType::MAX:
      return "MAX";
    case ReduceOpType::BAND:
      return "BAND";
    case ReduceOpType::BOR:
      return "BOR";
    case ReduceOpType::BXOR:
      return "BXOR";
    case ReduceOpType::PREMUL_SUM:
      return "PREMUL_SUM";
    default:
      return "UNUSED";
  }
}

// The elements in memory order, as a real backend sends them.
at::Tensor flat(const at::Tensor& tensor) {
  return tensor.as_strided({tensor.numel()}, {1}, tensor.storage_offset());
}

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.numel() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

void accumulate(at::Tensor& sum, const at::Tensor& next, ReduceOpType op) {
  switch (op) {
    case ReduceOpType::SUM:
    case ReduceOpType::AVG:
      sum.add_(next);
      return;
    case ReduceOpType::PRODUCT:
      sum.mul_(next);
      return;
    case ReduceOpType::MIN:
      sum.copy_(at::minimum(sum, next));
      return;
    case ReduceOpType::MAX:
      sum.copy_(at::maximum(sum, next));
      return;
    case ReduceOpType::BAND:
      sum.bitwise_and_(next);
      return;
    case ReduceOpType::BOR:
      sum.bitwise_or_(next);
      return;
    case ReduceOpType::BXOR:
      sum.bitwise_xor_(next);
      return;
    default:
      TORCH_CHECK(false, "the thread backend does not know the reduce op ", name_of(op));
  }
}

at::Tensor reduced(const std::vector<Contribution>& ranks, size_t tensor, size_t piece,
                   ReduceOpType op) {
  at::Tensor sum = flat(ranks[0].inputs[tensor][piece]).clone();
  for (size_t rank = 1; rank < ranks.size(); ++rank) {
    accumulate(sum, flat(ranks[rank].inputs[tensor][piece]), op);
  }
  if (op == ReduceOpType::AVG) {
    sum.div_(static_cast<double>(ranks.size()));
  }
  return sum;
}

void check_snapshots(const std::vector<Contribution>& ranks) {
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    size_t next = 0;
    for (const auto& pieces : ranks[rank].inputs) {
      for (const at::Tensor& piece : pieces) {
        TORCH_CHECK(same_bytes(flat(piece), ranks[rank].snapshots[next++]), "rank ", rank,
                    " wrote to a tensor while collective ", ranks[rank].record.seq, " (",
                    ranks[rank].record.describe(), ") was still using it");
      }
    }
  }
}

}  // namespace

std::string CollectiveRecord::describe() const {
  std::ostringstream text;
  text << op;
  if (reduce_op != ReduceOpType::UNUSED) {
    text << '(' << name_of(reduce_op) << ')';
  }
  if (root >= 0) {
    text << " with root " << root;
  }
  if (tensor_count > 0) {
    text << " of " << c10::toString(dtype);
    for (const auto& size : sizes) {
      text << " [";
      for (size_t i = 0; i < size.size(); ++i) {
        text << (i ? ", " : "") << size[i];
      }
      text << ']';
    }
  }
  return text.str();
}

void check_contribution(const Contribution& contribution) {
  const auto op = contribution.record.reduce_op;
  const auto check = [&](const at::Tensor& tensor) {
    TORCH_CHECK(tensor.defined() && tensor.device().is_cpu(),
                "the thread backend takes CPU tensors only");
    TORCH_CHECK(tensor.is_non_overlapping_and_dense(),
                "the thread backend takes dense tensors only, like NCCL; got sizes ",
                tensor.sizes(), " and strides ", tensor.strides());
    if (op == ReduceOpType::MIN || op == ReduceOpType::MAX) {
      TORCH_CHECK(!tensor.is_complex(), name_of(op), " does not exist for complex numbers");
    }
    if (op == ReduceOpType::AVG) {
      TORCH_CHECK(tensor.is_floating_point() || tensor.is_complex(),
                  "AVG does not exist for integers");
    }
    if (op == ReduceOpType::BAND || op == ReduceOpType::BOR || op == ReduceOpType::BXOR) {
      TORCH_CHECK(!tensor.is_floating_point() && !tensor.is_complex(), name_of(op),
                  " exists for integers and bool only");
    }
  };
  for (const auto* side : {&contribution.inputs, &contribution.outputs}) {
    for (const auto& pieces : *side) {
      for (const at::Tensor& piece : pieces) {
        check(piece);
      }
    }
  }
}

void complete_contribution(Contribution& contribution) {
  at::AutoDispatchBelowADInplaceOrView guard;
  auto& record = contribution.record;
  for (const auto& pieces : contribution.inputs) {
    for (const at::Tensor& piece : pieces) {
      contribution.snapshots.push_back(flat(piece).clone());
      record.numel += piece.numel();
      record.sizes.push_back(piece.sizes().vec());
      if (record.tensor_count++ == 0) {
        record.dtype = piece.scalar_type();
        record.data_ptr = piece.const_data_ptr();
      }
    }
  }
}

std::optional<std::string> find_mismatch(int rank_a, const CollectiveRecord& a, int rank_b,
                                         const CollectiveRecord& b) {
  // In an all-to-all, lengths differ per pair of ranks; run_collective() compares them.
  if (a.op == b.op && a.reduce_op == b.reduce_op && a.root == b.root && a.dtype == b.dtype &&
      (a.sizes == b.sizes || a.op == "alltoall_base")) {
    return std::nullopt;
  }
  std::ostringstream text;
  text << "collective " << a.seq << " differs between ranks: rank " << rank_a << " issued "
       << a.describe() << ", rank " << rank_b << " issued " << b.describe()
       << "; the ranks do not launch the same collectives in the same order";
  return text.str();
}

void run_collective(std::vector<Contribution>& ranks) {
  // Below autograd, since parameters that require grad are valid outputs, as with a real backend.
  at::AutoDispatchBelowADInplaceOrView guard;
  check_snapshots(ranks);
  const CollectiveRecord& record = ranks[0].record;
  const size_t world = ranks.size();
  for (size_t tensor = 0; tensor < ranks[0].inputs.size(); ++tensor) {
    if (record.op == "broadcast") {
      const at::Tensor source = flat(ranks[record.root].inputs[tensor][0]);
      for (size_t rank = 0; rank < world; ++rank) {
        if (static_cast<int64_t>(rank) != record.root) {
          flat(ranks[rank].outputs[tensor][0]).copy_(source);
        }
      }
    } else if (record.op.find("allgather") != std::string::npos) {
      // Copy all inputs first, since an output may share memory with an input.
      std::vector<at::Tensor> sources;
      for (size_t rank = 0; rank < world; ++rank) {
        sources.push_back(flat(ranks[rank].inputs[tensor][0]).clone());
      }
      for (size_t rank = 0; rank < world; ++rank) {
        for (size_t from = 0; from < world; ++from) {
          flat(ranks[rank].outputs[tensor][from]).copy_(sources[from]);
        }
      }
    } else if (record.op == "alltoall_base") {
      for (size_t rank = 0; rank < world; ++rank) {
        for (size_t from = 0; from < world; ++from) {
          const at::Tensor source = flat(ranks[from].inputs[tensor][rank]);
          const at::Tensor room = flat(ranks[rank].outputs[tensor][from]);
          TORCH_CHECK(source.numel() == room.numel(), "alltoall_base: rank ", from, " sends ",
                      source.numel(), " elements to rank ", rank, ", which has room for ",
                      room.numel());
          room.copy_(source);
        }
      }
    } else if (record.op.find("reduce_scatter") != std::string::npos) {
      std::vector<at::Tensor> sums;
      for (size_t rank = 0; rank < world; ++rank) {
        sums.push_back(reduced(ranks, tensor, rank, record.reduce_op));
      }
      for (size_t rank = 0; rank < world; ++rank) {
        flat(ranks[rank].outputs[tensor][0]).copy_(sums[rank]);
      }
    } else {
      const at::Tensor sum = reduced(ranks, tensor, 0, record.reduce_op);
      for (size_t rank = 0; rank < world; ++rank) {
        if (record.op != "reduce" || static_cast<int64_t>(rank) == record.root) {
          flat(ranks[rank].outputs[tensor][0]).copy_(sum);
        }
      }
    }
  }
}

}  // namespace apex::testing
