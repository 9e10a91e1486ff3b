// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/nn/module.h>

#include <apex/parallel/reducer.h>

/// The part of DistributedDataParallel that does not depend on the class of the module, and the
/// guard of join(). It documents them.

namespace apex::parallel {

namespace detail {

class APEX_API Wrapper {
 public:
  Wrapper(torch::nn::Module& module, c10::intrusive_ptr<c10d::ProcessGroup> group,
          bool broadcast_buffers, ReducerOptions options);

  /// Checks that the parameters are those of construction, and prepares the reducer and buffers.
  void before_forward();

  /// Nested calls are counted.
  void stop_synchronizing();
  void continue_synchronizing();

  void begin_join(bool divide_by_initial_world_size, bool throw_on_early_termination);
  void end_join();
  void leave_join() noexcept;

  Reducer& reducer() { return *reducer_; }

 private:
  std::vector<const void*> identities() const;
  [[noreturn]] void refuse_other_parameters() const;
  std::vector<std::string> describe_buffers() const;
  void synchronize_buffers();

  torch::nn::Module& module_;
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const bool broadcast_buffers_;
  const std::vector<std::string> buffers_;  ///< as the ranks compared them
  std::unique_ptr<Reducer> reducer_;
  std::vector<const void*> parameters_;  ///< the reducer's parameters; see identities()
  bool joining_ = false;
  int no_sync_ = 0;                   ///< live guards
  bool synchronizing_before_ = true;  ///< the setting before the first of them
};

/// The module class that a holder or a smart pointer refers to.
template <typename Wrapped, typename = void>
struct ModuleOf {
  using type = torch::nn::Module;
  static constexpr bool known = false;
};
template <typename Wrapped>
struct ModuleOf<Wrapped, std::void_t<decltype(*std::declval<Wrapped&>())>> {
  using type = std::remove_reference_t<decltype(*std::declval<Wrapped&>())>;
  static constexpr bool known = std::is_base_of_v<torch::nn::Module, type>;
};

template <typename Void, typename Module, typename... Args>
struct TakesArguments : std::false_type {};
template <typename Module, typename... Args>
struct TakesArguments<
    std::void_t<decltype(std::declval<Module&>().forward(std::declval<Args>()...))>, Module,
    Args...> : std::true_type {};

}  // namespace detail

// Note [A destructor that throws]
//
// Only Join's destructor throws. The end of its scope is a collective: this rank follows the other
// ranks and receives their parameters. If that fails, this rank's model differs from theirs, and a
// destructor that hid the error would let the program save this model or train on. So the
// destructor throws (noexcept(false)), except while another exception propagates, because that
// exception states the cause. Nothing is left to release at that point.

class [[nodiscard]] Join {
 public:
  explicit Join(detail::Wrapper& wrapper)
      : wrapper_(&wrapper), exceptions_(std::uncaught_exceptions()) {}

  /// Calls end(). While an exception propagates, leaves without waiting for other ranks.
  /// @throws CommunicationError, RankMismatch: errors while following the other ranks.
  ~Join() noexcept(false) {
    if (std::uncaught_exceptions() == exceptions_) {
      end();
    } else if (wrapper_ != nullptr) {
      wrapper_->leave_join();
    }
  }
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;

  /// Blocks until every rank has called it. Idempotent. For programs that want no throwing
  /// destructor: after it the destructor does nothing.
  void end() {
    if (detail::Wrapper* const wrapper = std::exchange(wrapper_, nullptr)) wrapper->end_join();
  }

 private:
  detail::Wrapper* wrapper_;
  const int exceptions_;
};

}  // namespace apex::parallel
