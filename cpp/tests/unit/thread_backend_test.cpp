// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <support/thread_backend.h>

#include <atomic>
#include <string>
#include <vector>

namespace apex::testing {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

c10::intrusive_ptr<c10d::Work> all_reduce(const Group& group, at::Tensor tensor,
                                          ReduceOpType op = ReduceOpType::SUM) {
  std::vector<at::Tensor> tensors{std::move(tensor)};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  return group->allreduce(tensors, options);
}

std::string error_of(const c10::intrusive_ptr<c10d::Work>& work) {
  try {
    work->wait();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

::testing::AssertionResult contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << "\"" << text << "\" does not contain \"" << part << "\"";
}

const std::vector<at::ScalarType> kAllTypes = {
    at::kFloat, at::kDouble, at::kHalf,  at::kBFloat16, at::kComplexFloat, at::kComplexDouble,
    at::kInt,   at::kLong,   at::kShort, at::kChar,     at::kByte,         at::kBool};

TEST(ThreadBackend, Allreduce_EveryDtype_SumsOverRanks) {
  run_ranks(3, [](int rank, const Group& group) {
    for (const auto dtype : kAllTypes) {
      auto tensor = at::full({5}, rank + 1, at::TensorOptions(dtype));
      all_reduce(group, tensor)->wait();
      EXPECT_TRUE(at::equal(tensor, at::full({5}, 6, at::TensorOptions(dtype)))) << dtype;
    }
  });
}

TEST(ThreadBackend, Allreduce_EveryReduceOp_MatchesItsDefinition) {
  run_ranks(2, [](int rank, const Group& group) {
    using Values = std::vector<int64_t>;
    const auto check = [&](ReduceOpType op, Values of_rank_0, Values of_rank_1, Values want) {
      auto tensor = at::tensor(rank == 0 ? of_rank_0 : of_rank_1);
      all_reduce(group, tensor, op)->wait();
      EXPECT_TRUE(at::equal(tensor, at::tensor(want))) << op;
    };
    check(ReduceOpType::MAX, {1, 9}, {5, 2}, {5, 9});
    check(ReduceOpType::MIN, {1, 9}, {5, 2}, {1, 2});
    check(ReduceOpType::PRODUCT, {3, 9}, {5, 2}, {15, 18});
    check(ReduceOpType::BAND, {6}, {3}, {2});
    check(ReduceOpType::BOR, {6}, {3}, {7});
    check(ReduceOpType::BXOR, {6}, {3}, {5});
    auto average = at::full({2}, rank == 0 ? 1.0 : 4.0);
    all_reduce(group, average, ReduceOpType::AVG)->wait();
    EXPECT_TRUE(at::equal(average, at::full({2}, 2.5)));
    EXPECT_ANY_THROW(all_reduce(group, at::ones({2}, at::kLong), ReduceOpType::AVG));
    EXPECT_ANY_THROW(all_reduce(group, at::ones({2}, at::kComplexFloat), ReduceOpType::MAX));
    EXPECT_ANY_THROW(all_reduce(group, at::ones({2}), ReduceOpType::BOR));
  });
}

TEST(ThreadBackend, Allreduce_RoundingDependsOnOrder_AddsInRankOrder) {
  // (1e8 + -1e8) + 1 is 1 in float; any other order loses the 1.
  run_ranks(3, [](int rank, const Group& group) {
    const float mine[] = {1e8f, -1e8f, 1.f};
    auto tensor = at::full({1}, mine[rank], at::kFloat);
    all_reduce(group, tensor)->wait();
    EXPECT_EQ(tensor.item<float>(), 1.f);
  });
}

TEST(ThreadBackend, Broadcast_FromEveryRoot_CopiesTheRoot) {
  run_ranks(3, [](int rank, const Group& group) {
    for (int root = 0; root < 3; ++root) {
      auto parameter = at::full({2, 2}, rank).to(at::kFloat).requires_grad_();
      std::vector<at::Tensor> tensors{parameter};
      c10d::BroadcastOptions options;
      options.rootRank = root;
      group->broadcast(tensors, options)->wait();
      EXPECT_TRUE(at::equal(parameter.detach(), at::full({2, 2}, root).to(at::kFloat)));
    }
  });
}

TEST(ThreadBackend, GatherAndScatter_AllForms_MoveThePieces) {
  run_ranks(2, [](int rank, const Group& group) {
    const auto mine = at::full({3}, rank + 1.0);
    std::vector<std::vector<at::Tensor>> outputs{{at::zeros({3}), at::zeros({3})}};
    std::vector<at::Tensor> inputs{mine};
    group->allgather(outputs, inputs)->wait();
    EXPECT_TRUE(at::equal(outputs[0][0], at::full({3}, 1.0)));
    EXPECT_TRUE(at::equal(outputs[0][1], at::full({3}, 2.0)));

    // Calls the backend directly, since the group's function names vary between versions of
    // libtorch.
    const auto backend = group->getBackend(at::kCPU);
    const auto want = at::cat({at::full({3}, 1.0), at::full({3}, 2.0)});
    auto whole = at::zeros({6});
    auto input = mine.clone();
    backend->_allgather_base(whole, input)->wait();
    EXPECT_TRUE(at::equal(whole, want));

    // In place: the input is this rank's part of the output.
    auto in_place = at::zeros({2, 3});
    auto part = in_place[rank];
    part.fill_(rank + 1.0);
    backend->_allgather_base(in_place, part)->wait();
    EXPECT_TRUE(at::equal(in_place.view(-1), want));

    std::vector<at::Tensor> wholes{at::zeros({6}), at::zeros({2}, at::kLong)};
    std::vector<at::Tensor> two{mine, at::full({1}, rank, at::kLong)};
    backend->allgather_into_tensor_coalesced(wholes, two)->wait();
    EXPECT_TRUE(at::equal(wholes[0], want));
    EXPECT_TRUE(at::equal(wholes[1], at::arange(2)));

    auto scattered = at::zeros({2});
    auto all = at::arange(4).to(at::kFloat) * (rank + 1);
    backend->_reduce_scatter_base(scattered, all)->wait();
    EXPECT_TRUE(at::equal(scattered, (at::arange(2) + 2 * rank).to(at::kFloat) * 3));

    std::vector<at::Tensor> results{at::zeros({2})};
    std::vector<std::vector<at::Tensor>> lists{{at::ones({2}), at::full({2}, 5.0)}};
    group->reduce_scatter(results, lists)->wait();
    EXPECT_TRUE(at::equal(results[0], at::full({2}, rank == 0 ? 2.0 : 10.0)));

    // Rank 0 sends 1 and 2 elements, rank 1 sends 3 and 4.
    std::vector<int64_t> sent{1 + 2 * rank, 2 + 2 * rank}, received{1 + rank, 3 + rank};
    auto exchanged = at::zeros({4 + 2 * rank});
    auto own = at::full({3 + 4 * rank}, rank + 1.0);
    backend->alltoall_base(exchanged, own, received, sent)->wait();
    EXPECT_TRUE(
        at::equal(exchanged, at::cat({at::full({1 + rank}, 1.0), at::full({3 + rank}, 2.0)})));

    std::vector<at::Tensor> reduced{at::full({2}, rank + 1.0)};
    c10d::ReduceOptions to_one;
    to_one.rootRank = 1;
    group->reduce(reduced, to_one)->wait();
    EXPECT_TRUE(at::equal(reduced[0], at::full({2}, rank == 1 ? 3.0 : 1.0)));

    std::vector<at::Tensor> several{at::ones({2}), at::ones({3}, at::kDouble)};
    group->allreduce_coalesced(several)->wait();
    EXPECT_TRUE(at::equal(several[0], at::full({2}, 2.0)));
    EXPECT_TRUE(at::equal(several[1], at::full({3}, 2.0, at::kDouble)));
    group->barrier()->wait();
  });
}

TEST(ThreadBackend, Hold_UntilReleased_WorkStaysPending) {
  const auto control = ThreadBackendControl::create(2);
  control->hold(0);
  run_ranks(control, [&](int rank, const Group& group) {
    auto tensor = at::ones({2});
    const auto work = all_reduce(group, tensor);
    control->wait_until_issued(0);
    EXPECT_FALSE(work->isCompleted());
    EXPECT_TRUE(at::equal(tensor, at::ones({2})));
    // Another collective completes first; it also keeps the ranks together until both have checked.
    all_reduce(group, at::ones({1}))->wait();
    if (rank == 0) {
      control->release(0);
    }
    EXPECT_TRUE(work->wait());
    EXPECT_TRUE(work->isCompleted());
    EXPECT_TRUE(work->isSuccess());
    EXPECT_TRUE(at::equal(tensor, at::full({2}, 2.0)));
  });
  EXPECT_EQ(control->completed(), (std::vector<uint64_t>{1, 0}));
}

TEST(ThreadBackend, Release_InReverse_CompletesInReverse) {
  const auto control = ThreadBackendControl::create(2);
  control->hold_if([](const CollectiveRecord& record) { return record.op == "allreduce"; });
  run_ranks(control, [&](int rank, const Group& group) {
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (int i = 0; i < 3; ++i) {
      works.push_back(all_reduce(group, at::ones({1})));
    }
    control->wait_until_issued(2);
    group->barrier()->wait();
    if (rank == 0) {
      for (const uint64_t seq : {2, 1}) {
        control->release(seq);
        control->wait_until_completed(seq);
      }
      control->release_all();
    }
    for (const auto& work : works) {
      work->wait();
    }
  });
  EXPECT_EQ(control->completed(), (std::vector<uint64_t>{3, 2, 1, 0}));
}

TEST(ThreadBackend, Future_Completed_RunsCallbacksWithTheTensors) {
  std::atomic<int> calls{0};
  const auto control = ThreadBackendControl::create(2);
  control->hold(0);
  run_ranks(control, [&](int rank, const Group& group) {
    auto future = all_reduce(group, at::ones({2}))->getFuture();
    auto doubled = future->then(
        [&](c10::ivalue::Future& done) {
          ++calls;
          return c10::IValue(done.value().toTensorVector().at(0) * 2);
        },
        c10::TensorType::get());
    control->wait_until_issued(0);
    EXPECT_FALSE(future->completed());
    group->barrier()->wait();
    control->release(0);
    doubled->wait();
    EXPECT_TRUE(at::equal(doubled->value().toTensor(), at::full({2}, 4.0)));
  });
  EXPECT_EQ(calls, 2);
}

TEST(ThreadBackend, Order_DiffersBetweenRanks_EveryRankIsTold) {
  run_ranks(3, [](int rank, const Group& group) {
    const auto first = all_reduce(group, at::ones({rank == 2 ? 3 : 4}));
    const auto second = all_reduce(group, at::ones({rank == 2 ? 4 : 3}));
    EXPECT_TRUE(contains(error_of(first), "collective 0 differs between ranks"));
    EXPECT_TRUE(contains(error_of(second), "collective 1 differs between ranks"));
    // Matching collectives still work.
    all_reduce(group, at::ones({1}))->wait();
  });
}

TEST(ThreadBackend, Mismatch_InDtypeOpOrReduceOp_EveryRankIsTold) {
  run_ranks(2, [](int rank, const Group& group) {
    const bool first = rank == 0;
    const char* part = "differs between ranks";
    EXPECT_TRUE(contains(
        error_of(all_reduce(group, at::ones({2}, first ? at::kFloat : at::kDouble))), part));
    EXPECT_TRUE(contains(
        error_of(all_reduce(group, at::ones({2}), first ? ReduceOpType::SUM : ReduceOpType::MAX)),
        part));
    std::vector<at::Tensor> tensors{at::ones({2})};
    const auto work = first ? group->allreduce(tensors) : group->broadcast(tensors);
    EXPECT_TRUE(contains(error_of(work), part));
    EXPECT_FALSE(work->isSuccess());
    EXPECT_TRUE(work->exception());
  });
}

TEST(ThreadBackend, Input_WrittenWhileInFlight_IsReported) {
  const auto control = ThreadBackendControl::create(2);
  control->hold(0);
  run_ranks(control, [&](int rank, const Group& group) {
    auto tensor = at::ones({2});
    const auto work = all_reduce(group, tensor);
    control->wait_until_issued(0);
    if (rank == 1) {
      tensor.fill_(7.0);
      control->release(0);
    }
    EXPECT_TRUE(contains(error_of(work), "rank 1 wrote to a tensor"));
  });
}

TEST(ThreadBackend, Faults_OnRankOnIssueEverywhere_AreThrownWhereAsked) {
  const auto control = ThreadBackendControl::create(2);
  control->fail_on_rank(0, 1, "cable pulled");
  control->fail(1, "switch off");
  control->fail_on_issue(2, 0, "no memory");
  run_ranks(control, [](int rank, const Group& group) {
    EXPECT_EQ(error_of(all_reduce(group, at::ones({2}))), rank == 1 ? "cable pulled" : "");
    const auto failed = all_reduce(group, at::ones({2}));
    EXPECT_EQ(error_of(failed), "switch off");
    EXPECT_TRUE(failed->getFuture()->hasError());
    if (rank == 0) {
      EXPECT_ANY_THROW(all_reduce(group, at::ones({2})));
    } else {
      EXPECT_TRUE(
          contains(error_of(all_reduce(group, at::ones({2}))), "rank 0 when it was issued"));
    }
    EXPECT_EQ(error_of(all_reduce(group, at::ones({2}))), "");
  });
}

TEST(ThreadBackend, Drop_AfterTheTimeout_WaitThrows) {
  const auto control = ThreadBackendControl::create(2, std::chrono::milliseconds(100));
  control->drop(0);
  run_ranks(control, [](int rank, const Group& group) {
    EXPECT_TRUE(
        contains(error_of(all_reduce(group, at::ones({2}))), "did not complete within 100 ms"));
  });
}

TEST(ThreadBackend, RunRanks_OneRankThrows_OthersEndAndItsMessageArrives) {
  try {
    run_ranks(3, [](int rank, const Group& group) {
      if (rank == 1) {
        throw std::invalid_argument("bad rank");
      }
      all_reduce(group, at::ones({2}))->wait();
    });
    FAIL() << "nothing was thrown";
  } catch (const RankError& error) {
    EXPECT_STREQ(error.what(), "rank 1: bad rank");
    EXPECT_EQ(error.rank(), 1);
    EXPECT_THROW(std::rethrow_exception(error.cause()), std::invalid_argument);
  }
}

TEST(ThreadBackend, RunRanks_OneRankReturnsEarly_OthersAreToldAtOnce) {
  run_ranks(2, [](int rank, const Group& group) {
    if (rank == 0) {
      EXPECT_TRUE(
          contains(error_of(all_reduce(group, at::ones({2}))), "rank 1 ended after 0 collectives"));
    }
  });
}

TEST(ThreadBackend, Log_AfterCollectives_TellsWhatWasIssued) {
  const auto control = ThreadBackendControl::create(2);
  run_ranks(control, [&](int rank, const Group& group) {
    auto tensor = at::ones({2, 3}, at::kHalf);
    all_reduce(group, tensor, ReduceOpType::MAX)->wait();
    group->barrier()->wait();
    const auto log = control->log(rank);
    EXPECT_EQ(log.at(0).data_ptr, tensor.const_data_ptr());
  });
  for (int rank = 0; rank < 2; ++rank) {
    const auto log = control->log(rank);
    ASSERT_EQ(log.size(), 2u);
    EXPECT_EQ(log[0].seq, 0u);
    EXPECT_EQ(log[0].op, "allreduce");
    EXPECT_EQ(log[0].numel, 6);
    EXPECT_EQ(log[0].tensor_count, 1);
    EXPECT_EQ(log[0].dtype, at::kHalf);
    EXPECT_EQ(log[0].reduce_op, ReduceOpType::MAX);
    EXPECT_EQ(log[1].op, "barrier");
    EXPECT_EQ(control->issued(rank), 2u);
    EXPECT_EQ(control->issued(rank, "allreduce"), 1u);
  }
}

TEST(ThreadBackend, Names_SameNameOnEveryRank_ResolveToTheRanksOwnGroup) {
  const auto control = ThreadBackendControl::create(2);
  const auto second = ThreadBackendControl::create(2);
  run_ranks(
      control,
      [&](int rank, const Group& group) {
        EXPECT_EQ(c10d::resolve_process_group("world").get(), group.get());
        EXPECT_EQ(c10d::resolve_process_group("world")->getRank(), rank);
        const auto other = make_thread_group(rank, second);
        const ScopedGroupName name("second", other);
        EXPECT_EQ(c10d::resolve_process_group("second").get(), other.get());
        all_reduce(other, at::ones({1}))->wait();
      },
      "world");
  EXPECT_EQ(control->issued(0), 0u);
  EXPECT_EQ(second->issued(0), 1u);
}

}  // namespace
}  // namespace apex::testing
