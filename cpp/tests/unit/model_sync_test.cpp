// SPDX-License-Identifier: BSD-3-Clause
// Ranks are threads. Oracles: a copy of the root's bytes; float64 sums; the first difference that
// the test has made.

#include <apex/parallel/detail/model_sync.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <locale>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <support/test_seed.h>
#include <support/thread_backend.h>
#include <support/toy_model.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <apex/error.h>
#include <apex/parallel/reducer.h>

namespace apex::parallel {
namespace {

using apex::testing::run_ranks;
using apex::testing::ThreadBackendControl;
using apex::testing::ToyModel;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Model = std::vector<NamedTensor>;
using Settings = std::vector<std::string>;

template <typename Error>
std::string text_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "no exception";
  return {};
}

Model model() { return ToyModel::mlp({4, 6, 2}, 1).parameters; }

const std::string kRemedy =
    ". Construct the same model, with the same options and mixed precision, in "
    "the same order on every rank.";

TEST(VerifySameModel, EqualModels_Pass_ByOneMessageOf24Bytes) {
  const auto control = ThreadBackendControl::create(3);
  run_ranks(control, [&](int rank, const Group& group) {
    verify_same_model(model(), {"bucket size=3", "views=True"}, group);
    const auto log = control->log(rank);
    ASSERT_EQ(log.size(), 1u);
    EXPECT_EQ(log[0].numel, 3);
    EXPECT_EQ(log[0].dtype, at::kLong);
  });
}

TEST(VerifySameModel, ValuesThatDiffer_OrNoParameters_Pass) {
  run_ranks(2, [&](int rank, const Group& group) {
    verify_same_model({{"p", at::full({3}, rank)}}, {}, group);
    verify_same_model({}, {}, group);
  });
}

TEST(VerifySameModel, AnyDifference_ThrowsTheSameOnEveryRank_SayingWhat) {
  struct Difference {
    std::string text;
    std::function<void(Model&)> change;
  };
  const std::string bias =
      "parameter 1 is 'fc0.bias' Float [6] strides [1], trainable on rank 0 and ";
  const Difference differences[] = {
      {bias + "'other' Float [6] strides [1], trainable on rank 2",
       [](Model& m) { m[1].name = "other"; }},
      {bias + "'fc0.bias' Float [7] strides [1], trainable on rank 2",
       [](Model& m) { m[1].tensor = at::zeros({7}).requires_grad_(); }},
      {bias + "'fc0.bias' Float [6] strides [2], trainable on rank 2",
       [](Model& m) { m[1].tensor = at::zeros({12}).slice(0, 0, 12, 2).requires_grad_(); }},
      {bias + "'fc0.bias' Half [6] strides [1], trainable on rank 2",
       [](Model& m) { m[1].tensor = at::zeros({6}, at::kHalf).requires_grad_(); }},
      {bias + "'fc0.bias' Float [6] strides [1], frozen on rank 2",
       [](Model& m) { m[1].tensor = at::zeros({6}); }},
      {bias + "'fc0.bias' Float [6] layout Sparse, trainable on rank 2",
       [](Model& m) { m[1].tensor = at::zeros({6}).to_sparse().requires_grad_(); }},
      {"parameter 0 is 'fc0.weight' Float [6, 4] strides [4, 1], trainable on rank 0 and "
       "'fc0.weight' Float [6, 4] strides [1, 6], trainable on rank 2",
       [](Model& m) { m[0].tensor = at::zeros({4, 6}).t().requires_grad_(); }},
      {"parameter 3 is 'fc1.bias' Float [2] strides [1], trainable on rank 0 and missing on rank 2 "
       "(4 and 3 parameters in all)",
       [](Model& m) { m.pop_back(); }},
      {"parameter 4 is missing on rank 0 and 'extra' Long [] strides [], frozen on rank 2 (4 and 5 "
       "parameters in all)",
       [](Model& m) { m.push_back({"extra", at::zeros({}, at::kLong)}); }},
      {bias + "'fc1.weight' ", [](Model& m) { std::swap(m[1], m[2]); }},
  };
  for (const Difference& difference : differences) {
    std::vector<std::string> texts(3);
    run_ranks(3, [&](int rank, const Group& group) {
      Model mine = model();
      if (rank == 2) difference.change(mine);
      texts[rank] = text_of<RankMismatch>([&] { verify_same_model(mine, {}, group); });
    });
    const std::string start = "rank 2's model differs from rank 0's: " + difference.text;
    EXPECT_EQ(texts[0].substr(0, start.size()), start);
    EXPECT_EQ(texts[0].substr(texts[0].size() - kRemedy.size()), kRemedy);
    EXPECT_EQ(texts[1], texts[0]);
    EXPECT_EQ(texts[2], texts[0]);
  }
}

TEST(VerifySameModel, SeveralDifferences_FirstRankAndFirstTensorAreNamed) {
  run_ranks(4, [&](int rank, const Group& group) {
    Model mine = model();
    if (rank == 2) mine[3].name = "second";
    if (rank == 3) mine[1].name = "third";
    if (rank == 2) mine[2].name = "first";
    const std::string text = text_of<RankMismatch>([&] { verify_same_model(mine, {}, group); });
    EXPECT_EQ(text.rfind("rank 2's model differs from rank 0's: parameter 2 is", 0), 0u) << text;
    EXPECT_NE(text.find("'first'"), std::string::npos) << text;
  });
}

TEST(VerifySameModel, SettingsThatDiffer_AreNamedBeforeTensors) {
  struct Case {
    Settings first, second;
    std::string text;
  };
  const Case cases[] = {
      {{"a=1", "b=2"}, {"a=1", "b=3"}, "rank 0 was constructed with b=2, rank 1 with b=3"},
      {{"a=1"}, {"a=1", "b=3"}, "rank 0 was constructed without b, rank 1 with b=3"},
      {{"a=1", "b=2"}, {"a=1"}, "rank 0 was constructed with b=2, rank 1 without b"},
      {{}, {"a=1"}, "rank 0 was constructed without a, rank 1 with a=1"},
      {{"a=1", "b=2"}, {"a=2", "b=3"}, "rank 0 was constructed with a=1, rank 1 with a=2"},
      {{"ab=1"}, {"a=1", "ab=1"}, "rank 0 was constructed without a, rank 1 with a=1"},
  };
  for (const Case& one : cases) {
    run_ranks(2, [&](int rank, const Group& group) {
      Model mine = model();
      if (rank == 1) mine[0].name = "other";
      const Settings& settings = rank == 0 ? one.first : one.second;
      EXPECT_EQ(text_of<RankMismatch>([&] { verify_same_model(mine, settings, group); }),
                "rank 1's model differs from rank 0's: " + one.text + kRemedy);
    });
  }
}

// Hazard: a rank whose program has set a locale, with a Python program that has not.
TEST(VerifySameModel, LocaleWithThousandsSeparators_NumbersAreThoseOfEveryRank) {
  struct Dots : std::numpunct<char> {
    char do_thousands_sep() const override { return '.'; }
    std::string do_grouping() const override { return "\3"; }
  };
  const std::locale before = std::locale::global(std::locale(std::locale::classic(), new Dots));
  run_ranks(2, [&](int rank, const Group& group) {
    const int64_t size = rank == 0 ? 1000 : 2000;
    const std::string text =
        text_of<RankMismatch>([&] { verify_same_model({{"w", at::zeros({size, 1})}}, {}, group); });
    EXPECT_NE(text.find("[1000, 1]"), std::string::npos) << text;
    ReducerOptions options;
    options.limits.cap = size;
    const std::string settings =
        text_of<RankMismatch>([&] { const Reducer reducer(model(), {group}, options); });
    EXPECT_NE(settings.find("bucket size=2000"), std::string::npos) << settings;
  });
  std::locale::global(before);
}

at::Tensor bytes_of(const at::Tensor& tensor) {
  return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(at::kByte).clone();
}

/// Random bits, including NaNs of every kind.
at::Tensor random_bits(at::IntArrayRef sizes, at::ScalarType dtype) {
  if (dtype == at::kBool) return at::randint(2, sizes).to(at::kBool);
  const at::Tensor like = at::empty(sizes, dtype);
  const auto numel = static_cast<int64_t>(like.nbytes());
  return at::randint(256, {numel}, at::kByte).view(dtype).view(sizes);
}

/// Tensors of every form, with different values in each call.
std::vector<at::Tensor> tensors_of_every_form() {
  std::vector<at::Tensor> all;
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kBool,
                                     at::kByte, at::kInt, at::kLong, at::kComplexFloat}) {
    all.push_back(random_bits({3}, dtype));  // misaligns the next tensor in the message
    all.push_back(random_bits({2, 3, 2, 2}, dtype).contiguous(at::MemoryFormat::ChannelsLast));
    all.push_back(random_bits({4, 3}, dtype).t());
    all.push_back(random_bits({4, 6}, dtype).slice(1, 0, 6, 2));
    all.push_back(random_bits({1}, dtype).view({}));
    all.push_back(at::empty({0, 2}, dtype));
  }
  all.push_back(at::conj(at::randn({3}, at::kComplexDouble)));
  all.push_back(at::_neg_view(at::randn({3})));
  all.push_back(at::randn({5}).requires_grad_());
  all.push_back(at::empty({3}, at::TensorOptions(at::kMeta)));
  all.push_back(all.front());  // a duplicate
  all.emplace_back();
  return all;
}

bool has_bytes(const at::Tensor& tensor) { return tensor.defined() && !tensor.is_meta(); }

TEST(BroadcastCoalesced, TensorsOfEveryForm_AreTheRootsBitForBit_WhateverTheMessages) {
  at::manual_seed(apex::testing::fresh_seed());
  for (const int64_t root : {0, 2}) {
    for (const int64_t chunk_bytes : {int64_t{1}, int64_t{64}, kBroadcastBytes}) {
      std::vector<std::vector<at::Tensor>> of_rank;
      for (int rank = 0; rank < 3; ++rank) of_rank.push_back(tensors_of_every_form());
      std::vector<at::Tensor> expected;
      for (const at::Tensor& tensor : of_rank[root]) {
        expected.push_back(has_bytes(tensor) ? bytes_of(tensor) : at::Tensor());
      }
      run_ranks(3, [&](int rank, const Group& group) {
        broadcast_coalesced(of_rank[rank], group, root, chunk_bytes);
      });
      for (int rank = 0; rank < 3; ++rank) {
        for (size_t i = 0; i < expected.size(); ++i) {
          const at::Tensor& tensor = of_rank[rank][i];
          if (!has_bytes(tensor)) continue;
          EXPECT_TRUE(bytes_of(tensor).equal(expected[i]))
              << "rank " << rank << ", tensor " << i << ", in messages of " << chunk_bytes;
          EXPECT_EQ(tensor.sizes(), of_rank[root][i].sizes());
          EXPECT_EQ(tensor.strides(), of_rank[root][i].strides());
        }
      }
    }
  }
}

// A slice with gaps belongs to a larger tensor.
TEST(BroadcastCoalesced, TensorWithGaps_NothingBetweenIsWritten) {
  run_ranks(2, [&](int rank, const Group& group) {
    const at::Tensor whole = at::full({4, 4}, rank + 1.0);
    broadcast_coalesced({whole.slice(1, 0, 4, 2)}, group);
    EXPECT_TRUE(whole.slice(1, 0, 4, 2).eq(1.0).all().item<bool>());
    EXPECT_TRUE(whole.slice(1, 1, 4, 2).eq(rank + 1.0).all().item<bool>());
  });
}

// copy_() refuses to write to expanded tensors.
TEST(BroadcastCoalesced, ExpandedTensors_AreTheRootsAndStayExpanded) {
  run_ranks(2, [&](int rank, const Group& group) {
    const at::Tensor row = at::full({3, 1}, rank + 1.0).expand({3, 4});
    const at::Tensor all = at::full({1}, rank + 1.0).expand({2, 1 << 18});
    broadcast_coalesced({row, all}, group);
    all_reduce_coalesced({row}, group, 1.0);
    EXPECT_TRUE(row.eq(2.0).all().item<bool>());
    EXPECT_TRUE(all.eq(1.0).all().item<bool>());
    EXPECT_EQ(row.strides(), (at::IntArrayRef{1, 0}));
  });
}

TEST(RequireSendable, ValuesThatCannotBeSent_ThrowsAndNamesTensorAndCause) {
  run_ranks(1, [](int, const Group& group) {
    const at::Tensor values = at::randn({2, 3});
    const at::Tensor freed = at::randn({2, 3});
    freed.storage().set_data_ptr_noswap(at::DataPtr(nullptr, at::kCPU));
    const std::vector<std::pair<at::Tensor, std::string>> cases{
        {freed, "its memory has been freed"},
        {values.to(at::kMeta), "it is on the meta device, and has no values yet"},
        {values.to_sparse(), "its layout is Sparse, not strided"},
        {at::quantize_per_tensor(values, 0.1, 0, at::kQInt8), "its dtype is quantized (QInt8)"},
    };
    const NamedTensor good{"good", values};
    for (const auto& [tensor, cause] : cases) {
      const Model tensors{good, {"bad", tensor}};
      EXPECT_EQ(text_of<InvalidArgument>(
                    [&, &tensors = tensors] { require_sendable(tensors, "buffer", group); }),
                "rank 0: buffer 'bad' cannot be synchronized, since " + cause +
                    ": replace it before the model is wrapped, or leave it out");
    }
    require_sendable({good,
                      {"zero", at::_efficientzerotensor({2}, at::kFloat)},
                      {"empty", at::empty({0})},
                      {"expanded", values[0][0].expand({4})}},
                     "buffer", group);
  });
}

TEST(BroadcastCoalesced, ManyTensors_TravelInMessagesOfTheGivenSize_OneThatIsLargerAlone) {
  const auto control = ThreadBackendControl::create(2);
  run_ranks(control, [&](int rank, const Group& group) {
    std::vector<at::Tensor> tensors;
    for (const int64_t numel : {2, 2, 1, 9, 1, 3, 4}) {
      tensors.push_back(at::full({numel}, rank + 1.0, at::kFloat));
    }
    tensors.push_back(at::full({1}, rank + 1, at::kLong));
    broadcast_coalesced(tensors, group, 0, /*chunk_bytes=*/16);
    std::vector<int64_t> bytes;
    for (const auto& record : control->log(rank)) {
      EXPECT_EQ(record.op, "broadcast");
      bytes.push_back(record.numel);
    }
    EXPECT_EQ(bytes, (std::vector<int64_t>{16, 4, 36, 16, 16, 8}));
    for (const at::Tensor& tensor : tensors) EXPECT_TRUE(tensor.eq(1).all().item<bool>());
  });
}

// A forward whose backward is pending may have saved an unchanged tensor. For a changed one
// autograd must raise an error.
TEST(BroadcastCoalesced, OnlyWhatHasChanged_IsWritten_AndAutogradSeesThat) {
  run_ranks(2, [&](int rank, const Group& group) {
    const at::Tensor same = at::tensor({1.0, double{NAN}, -0.0});
    const at::Tensor zero = at::full({1}, rank == 0 ? -0.0 : 0.0);  // equal, but different bits
    const at::Tensor large = at::full({1 << 18}, rank + 1.0, at::kFloat);
    const std::vector<int64_t> before{same._version(), zero._version(), large._version()};
    broadcast_coalesced({same, zero}, group);
    broadcast_coalesced({large}, group);
    EXPECT_EQ(same._version(), before[0]);
    EXPECT_EQ(zero._version() > before[1], rank == 1);
    EXPECT_EQ(large._version() > before[2], rank == 1);
    EXPECT_TRUE(std::signbit(zero.item<double>()));
  });
}

TEST(BroadcastCoalesced, TensorLargerThanAMessage_IsSentInSeveral) {
  const auto control = ThreadBackendControl::create(2);
  run_ranks(control, [&](int rank, const Group& group) {
    const at::Tensor large = at::full({kBroadcastBytes + 5}, rank + 1, at::kByte);
    broadcast_coalesced({large}, group, 0);
    EXPECT_TRUE(large.eq(1).all().item<bool>());
    EXPECT_EQ(control->issued(rank), 2u);
  });
}

TEST(BroadcastCoalesced, RootOrLayoutThatCannotBe_ThrowsBeforeAnythingIsSent) {
  const auto control = ThreadBackendControl::create(2);
  run_ranks(control, [&](int rank, const Group& group) {
    for (const int64_t root : {-1, 2}) {
      EXPECT_NE(text_of<InvalidArgument>([&] {
                  broadcast_coalesced({at::zeros({1})}, group, root);
                }).find("root rank " + std::to_string(root) + " is not in the group of 2"),
                std::string::npos);
    }
    const std::string text = text_of<InvalidArgument>(
        [&] { broadcast_coalesced({at::zeros({1}), at::zeros({2, 3}).to_sparse()}, group); });
    EXPECT_NE(text.find("layout Sparse and shape [2, 3]"), std::string::npos) << text;
    EXPECT_EQ(control->issued(rank), 0u);
  });
}

TEST(AllReduceCoalesced, TensorsOfEveryForm_AreTheScaledSumInFloat64_ByOneMessageADtype) {
  at::manual_seed(apex::testing::fresh_seed());
  const auto random = [] {
    std::vector<at::Tensor> all;
    for (const at::ScalarType dtype :
         {at::kFloat, at::kBFloat16, at::kComplexDouble, at::kDouble}) {
      const bool complex = at::isComplexType(dtype);
      const auto values = [&](at::IntArrayRef sizes) {
        return at::randn(sizes, complex ? at::kComplexDouble : at::kDouble).to(dtype);
      };
      all.push_back(values({5}));
      all.push_back(values({2, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast));
      all.push_back(values({3, 4}).slice(1, 0, 4, 2));
      all.push_back(complex ? at::conj(values({3})) : at::_neg_view(values({3})));
      all.push_back(values({}));
      all.push_back(values({0}));
      all.push_back(all[0]);  // a duplicate: added only once
    }
    return all;
  };
  for (const double scale : {1.0, 1.0 / 3}) {
    const std::vector<std::vector<at::Tensor>> of_rank{random(), random(), random()};
    std::vector<at::Tensor> expected;
    for (size_t i = 0; i < of_rank[0].size(); ++i) {
      const auto wide = of_rank[0][i].is_complex() ? at::kComplexDouble : at::kDouble;
      expected.push_back(
          (of_rank[0][i].to(wide) + of_rank[1][i].to(wide) + of_rank[2][i].to(wide)) * scale);
    }
    const auto control = ThreadBackendControl::create(3);
    run_ranks(control, [&](int rank, const Group& group) {
      all_reduce_coalesced(of_rank[rank], group, scale);
      EXPECT_EQ(control->issued(rank), 4u);
      for (size_t i = 0; i < expected.size(); ++i) {
        const at::Tensor& sum = of_rank[rank][i];
        const double tolerance = sum.scalar_type() == at::kBFloat16 ? 0.05 : 1e-5;
        EXPECT_TRUE(
            at::allclose(sum.to(expected[i].scalar_type()), expected[i], tolerance, tolerance))
            << i << ", scale " << scale;
      }
    });
  }
}

TEST(AllReduceCoalesced, WhatCannotBeAveraged_ThrowsBeforeAnythingIsSent) {
  const auto control = ThreadBackendControl::create(2);
  run_ranks(control, [&](int rank, const Group& group) {
    EXPECT_NE(text_of<InvalidArgument>([&] {
                all_reduce_coalesced({at::zeros({2}), at::zeros({2}, at::kLong)}, group, 1.0);
              }).find("got Long"),
              std::string::npos);
    EXPECT_THROW(all_reduce_coalesced({at::zeros({2}).to_sparse()}, group, 1.0), InvalidArgument);
    EXPECT_EQ(control->issued(rank), 0u);
  });
}

TEST(ModelSync, NullGroupOrUndefinedTensor_ThrowsInvalidArgument) {
  const Group null;
  const std::vector<at::Tensor> tensors{at::zeros({2})};
  EXPECT_THROW(verify_same_model({{"a", tensors[0]}}, {}, null), InvalidArgument);
  EXPECT_THROW(broadcast_coalesced(tensors, null), InvalidArgument);
  EXPECT_THROW(all_reduce_coalesced(tensors, null, 1.0), InvalidArgument);
  EXPECT_THROW(control_device(null, at::kCPU), InvalidArgument);
  run_ranks(2, [](int, const Group& group) {
    EXPECT_NE(text_of<InvalidArgument>([&] {
                verify_same_model({{"weight", {}}}, {}, group);
              }).find("'weight' is undefined"),
              std::string::npos);
  });
}

TEST(ControlDevice, GroupWithoutACpuBackend_IsTheFallback) {
  const at::Device gpu(at::kCUDA, 1);
  run_ranks(1, [&](int, const Group& group) { EXPECT_TRUE(control_device(group, gpu).is_cpu()); });
  const auto control = ThreadBackendControl::create(2);
  const auto without =
      c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::HashStore>(), 0, 2);
  without->setBackend(c10::DeviceType::CUDA, c10d::ProcessGroup::BackendType::CUSTOM,
                      c10::intrusive_ptr<c10d::Backend>(
                          c10::make_intrusive<apex::testing::ThreadBackend>(0, control)));
  EXPECT_EQ(control_device(without, gpu), gpu);
}

}  // namespace
}  // namespace apex::parallel
