// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <apex/export.h>
#include <apex/parallel/bucket_assignment.h>
#include <apex/parallel/comm_hook.h>
#include <apex/parallel/gradient_statistics.h>
#include <apex/parallel/model_sync.h>
#include <apex/parallel/overlap_report.h>
#include <apex/parallel/straggler_report.h>

/// The engine of data-parallel training: averages gradients over the ranks of a process group while
/// backward is still running.
///
/// Sources: bucketed, overlapped gradient all-reduce as in S. Li et al., "PyTorch Distributed:
/// Experiences on Accelerating Data Parallel Training", VLDB 2020, sections 3.2 and 4.2; learning
/// the order in which gradients arrive in the first backward, and rank 0's order for all, is the
/// documented behaviour of NVIDIA Apex's DistributedDataParallel.

namespace apex::parallel {

namespace detail {
class Reduction;
class ReducerCore;
struct ReductionSite;
}  // namespace detail

/// What a rank does that learns that not all hold the same state; see
/// ReducerOptions::replica_check_every.
enum class OnDivergence {
  kRaise,   ///< backward throws RankMismatch on every rank
  kWarn,    ///< a notice (on_notice()); of the same difference after 1, 2, 4, ... of them
  kResync,  ///< a notice, and all take over what most ranks hold, or the first, and skip the step;
            ///< if they differ again, for the fourth time without a clean round, kRaise
};

/// Something that should be equal on all ranks; see Reducer::set_replicas().
struct Replica {
  NamedTensor tensor;
  bool may_differ = false;  ///< left alone if it does in the first round
};

/// Everything that can be chosen; the defaults are those of NVIDIA Apex, but for the size of
/// buckets.
struct ReducerOptions {
  /// Size at which a bucket is closed; by default it goes by the device.
  BucketLimits limits;

  /// Launch nothing before the end of backward; one bucket per dtype and device.
  bool delay_allreduce = false;

  /// Indices (into the reducer's parameters) at whose gradients the open buckets are closed,
  /// instead of by size.
  std::vector<int64_t> trigger_parameters;

  /// Leave gradients as views of the buckets' buffers: saves the copy back and the memory of one
  /// gradient. A view must not be detached in place, and lives until a new plan is recorded.
  /// During backward, .grad may be undefined from when a gradient has moved into its bucket to the
  /// end.
  bool gradient_as_bucket_view = false;

  /// Half and bfloat16 gradients are summed as float32.
  bool allreduce_always_fp32 = false;

  /// Divide the sum by the world size. Without it gradients are sums, and have to be cleared
  /// between two synchronized backwards: a sum that is summed again counts once per rank.
  bool gradient_average = true;

  /// Divide the sum by the sum of the ranks' weights instead (begin_weight()): the gradient of the
  /// mean over the global batch, whatever each rank holds of it, if each rank's loss is a sum over
  /// its samples. Gradients have to be cleared between two synchronized backwards. Ranks read each
  /// other's reports, for which the host waits for a device. Needs gradient_average, and
  /// gradient_predivide_factor 1.
  bool weighted = false;

  /// Gradients are multiplied by 1/f before the all-reduce and, when averaging, by f/world after.
  double gradient_predivide_factor = 1.0;

  /// The set of parameters that get a gradient never changes after the first backward: parameters
  /// that had none then are not watched any more, and a gradient that they get all the same is an
  /// error. To watch them, the host waits in every backward on devices other than the CPU.
  bool static_graph = false;

  /// Take the memory of flat buckets from the backend, where it has some of its own: with NCCL that
  /// is registered with the communicator, which then may reduce without copying to buffers of its
  /// own (user buffer registration). Where it has none, a warning is logged and torch's memory is
  /// used. Buckets in place are gradients, whose memory is not ours. The group has to outlive the
  /// reducer's buffers.
  bool registered_buffers = false;

  /// Broadcast parameters from rank 0 at construction.
  bool init_sync = true;

  /// After each synchronized backward, throw NonFiniteGradient on every rank if a rank contributed
  /// an infinity or a NaN, naming the first rank and its first parameter. Costs one read of the
  /// gradients, and on devices other than the CPU a wait of the host.
  bool check_finite = false;

  /// After each synchronized backward, throw RankMismatch on every rank if the ranks are out of
  /// step: if some have stepped an optimizer twice without a backward between, or updated their
  /// parameters, and others have not; the error says who did what. By default on where it costs
  /// nothing, for parameters on the CPU; elsewhere it is a wait of the host, and steps of
  /// libtorch's SGD alone, which count as no change of a tensor, are not seen.
  std::optional<bool> check_steps;

  /// If an exception ends the backward of some ranks, the others skip the step, as by skip_step(),
  /// instead of throwing; with check_finite, a gradient that is infinite or NaN has every rank skip
  /// it. On devices other than the CPU the host then waits in every backward.
  bool skip_failed_steps = false;

  /// Measure gradients while they are copied, for gradient_statistics(). On devices other than the
  /// CPU by one more read of them before and one after the average, and waits of the host.
  bool gradient_statistics = false;

  /// Compare the trainable parameters of all ranks, bit for bit, a part in each synchronized
  /// backward, so that all are compared in so many; 0: never. By default in 100, where that costs
  /// nothing: for parameters on the CPU, with init_sync, without a communication hook and unless
  /// check_steps is off; then not in a step whose parameters were updated after a backward without
  /// synchronization. Costs one read of the part. Not under join(), and not with set_deferred().
  std::optional<int64_t> replica_check_every;
  OnDivergence on_divergence = OnDivergence::kWarn;

  /// Compared between ranks at construction, besides the options above: "name=value".
  std::vector<std::string> settings;

  /// How a bucket is reduced, instead of by the built-in choice; the same on every rank. For the
  /// library's own parts and tests: the interface (src/reducer/reduction.h) is private and changes.
  std::function<std::unique_ptr<detail::Reduction>(const detail::ReductionSite&)> reduction_factory;
};

/// A bucket whose gradients are complete; see Reducer::set_bucket_callback().
struct ReducedBucket {
  int64_t index = 0;  ///< position in the launch order; -1: reduced apart from the plan
  std::vector<int64_t> parameters;  ///< indices into parameters(): those whose gradient was reduced
};

/// What the active ranks do next, as a rank learns that has run out of data; see
/// Reducer::begin_join().
struct JoinEvent {
  enum Kind : int64_t {
    kEnd = 0,            ///< no rank is active any more
    kForward = 1,        ///< a forward in training; argument: whether buffers are synchronized
    kBackward = 2,       ///< a synchronized backward begins
    kLocalBackward = 3,  ///< a backward without synchronization
    kCustom = 4,         ///< announced by the caller; its argument is passed on
    kBackwardEnd = 5,    ///< the synchronized backward has computed its gradients
  };
  Kind kind = kEnd;
  int64_t argument = 0;
  bool gradients_kept = false;    ///< of kBackward: they were not cleared before
  bool end_follows = false;       ///< of kBackward: kBackwardEnd is announced, too
  std::vector<int64_t> active{};  ///< ranks that have data
};

/// Counts since construction. A fast path that is no longer taken shows here, without a clock.
struct ReducerStatistics {
  int64_t backwards = 0;       ///< synchronized backwards that were completed
  int64_t plans_learnt = 0;    ///< times the order was learnt and a plan agreed on
  int64_t plans_extended = 0;  ///< times parameters without a gradient so far were added
  // With one rank buckets are launched and counted as with several, but nothing is sent.
  int64_t launched_in_backward = 0;  ///< collectives started by a hook, while backward was running
  int64_t launched_at_end = 0;       ///< collectives started when backward had ended
  int64_t gradients_copied = 0;      ///< gradients copied into a buffer
  int64_t gradients_copied_early = 0;    ///< of these, as soon as they were computed (on the CPU)
  int64_t reduced_in_place = 0;          ///< collectives on a gradient's own memory
  int64_t reduced_in_shared_memory = 0;  ///< collectives between ranks of one host, in their memory
  int64_t reduced_by_host = 0;  ///< collectives in the memory of each host, then between the hosts
  int64_t buffers_registered = 0;  ///< buckets whose memory came from the backend
  int64_t steps_skipped = 0;       ///< backwards that ended without gradients, see skip_step()
  int64_t deferred = 0;            ///< backwards that ended before their buckets had arrived
  int64_t usage_reads = 0;         ///< backwards in which the reports of all ranks decided about
                                   ///< parameters without a gradient on this rank
};

/// Hooks the gradient accumulators of a module's parameters and keeps their gradients averaged.
///
/// One backward: each gradient that becomes ready counts its bucket down, on the autograd thread
/// and without Python; a bucket that is full, and whose predecessors were launched, is launched at
/// once; when the outermost backward ends, the rest is launched, the results are awaited (the host
/// waits on CPU backends, the current stream on NCCL) and gradients are complete when backward()
/// returns.
///
/// The first backward with a set of trainable parameters observes: it reduces at its end and fixes
/// the plan. Then, on every rank: launch order is the same; a parameter that only some ranks used
/// gets the average with zeros; one that no rank used is left alone (None stays None) without a
/// flag and without a collective; parameters may be used several times, in checkpointed segments
/// (reentrant or not), and backward may be called several times on one forward.
///
/// Every rank has to freeze and unfreeze the same parameters before the same backward. If ranks
/// differ, that backward throws RankMismatch on every rank; all can go on once they agree and have
/// cleared the gradients.
///
/// Thread safety: hooks may run on any number of autograd threads. The member functions may be
/// called from one thread at a time, not during backward unless they say so. Backwards of one
/// reducer must not run at the same time.
///
/// Of several reducers that know a parameter, one averages its gradient: of those with an output in
/// the graph, the one that was constructed last. For the others it is as if frozen.
///
/// Dropping the reducer while outputs that it watches are alive is safe: a backward through these
/// still synchronizes, unless another reducer has taken its parameters; other backwards do not.
///
/// A backward that an exception ends on one rank throws on every rank: what that rank had not sent
/// yet it sends as zeros, and its report says that it failed. Afterwards all ranks can go on with
/// the next backward, once gradients are cleared (with skip_failed_steps the others do not throw,
/// and skip the step). An exception in what comes after the module, in the loss's own backward,
/// ends it before any gradient here is known to be on its way: the other ranks wait for that rank's
/// next backward. Several reducers in one graph end together: if the end of one throws, the others
/// are still completed, and the first error is thrown.
///
/// On devices other than the CPU ranks read each other's reports only with check_steps or
/// skip_failed_steps. Without them a rank that failed sends NaN instead of zeros, and ranks that
/// have frozen different parameters are not noticed.
class APEX_API Reducer {
 public:
  /// Verifies that all ranks hold the same parameters, broadcasts them (frozen ones too) from rank
  /// 0, and hooks the trainable ones. Collective; blocks the host.
  ///
  /// @param parameters  all parameters, with names for error messages, in the same order on every
  ///                    rank; a tensor that appears twice counts once. Any strided floating or
  ///                    complex dtype if trainable, any dtype if frozen; any mix of devices.
  /// @param groups      process groups with the same ranks; buckets use them in turn. At least one,
  ///                    and one may be given several times. For CPU tensors over Gloo the reducer
  ///                    makes groups of its own from them, with the same timeout, so that no other
  ///                    use of a group can come between its messages.
  /// @throws InvalidArgument for options that contradict each other or are out of range, a
  ///         parameter that is undefined, or that is trainable and no leaf, of a dtype that cannot
  ///         be averaged, or on the meta device;
  ///         RankMismatch if the ranks differ; CommunicationError if the group fails.
  Reducer(std::vector<NamedTensor> parameters,
          std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups, ReducerOptions options = {});
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// Call before each forward: notices parameters that were frozen, unfrozen, or changed dtype,
  /// device or strides; the next backward takes, or records, a plan for them. Every rank has to
  /// make the same changes. Costs nanoseconds per parameter.
  void prepare_for_forward();

  /// Skips a step on all ranks together: because of a loss that is not finite, a batch without a
  /// valid sample, or memory that did not suffice for its forward. Call it on any rank before that
  /// rank's backward, or in a hook during it. The next synchronized backward of all ranks (the
  /// current one, during backward) then ends without gradients: every rank has .grad undefined for
  /// each parameter, so that an optimizer has nothing to step, and step_skipped() is true. What
  /// accumulated before under set_synchronizing(false) is dropped as well.
  ///
  /// Returns a loss of zero, of shape [] and float32, for a rank that has none to run backward on:
  /// its backward() takes part in that of the others without a gradient. A rank with a loss of its
  /// own may run backward on that instead. Does not block; the backward does, as always.
  ///
  /// Collectives in the module's forward or backward (SyncBatchNorm, broadcast buffers) still need
  /// every rank, so such a module has to run there as well.
  /// @throws Error with set_deferred(), with a bucket callback but without skip_failed_steps, on a
  ///         device where ranks do not read each other's reports (without check_steps and
  ///         skip_failed_steps), and while a backward ends, as in a bucket callback.
  at::Tensor skip_step();

  /// Whether the last synchronized backward was skipped, the same on every rank. May be called at
  /// any time.
  bool step_skipped() const;

  /// With the option weighted: the backwards until end_weight() are of samples with this weight,
  /// such as their number, in one element on any device; it is copied, and one on a device is read
  /// at the end of a synchronized backward. Several backwards of the same samples count once.
  /// Weights add up while backward does not synchronize. In a synchronized backward a weight that
  /// is missing, negative or not finite throws RankMismatch on every rank. With a sum of zero
  /// gradients are zero. A backward that fails or is skipped drops the weights that belong to it.
  /// Not during backward. Does not block.
  /// @throws Error without the option, or inside of another one; InvalidArgument for another
  ///         number of elements, or complex ones.
  void begin_weight(const at::Tensor& weight);
  void begin_weight(double weight);
  void end_weight() noexcept;
  /// Of samples that `other`, which this reducer takes the place of, has accumulated. Not while one
  /// of them is in backward. Does not block.
  void take_weight(Reducer& other);
  /// By what the last synchronized backward divided, the same on every rank; 0 before the first.
  /// May be called at any time.
  double total_weight() const;

  /// How large the ranks' gradients are, in the last synchronized backward that ended without an
  /// exception; the same on every rank. With the option gradient_statistics, else empty. May be
  /// called at any time; does not block.
  GradientStatistics gradient_statistics() const;
  /// The same of single parameters, as parameters() has them.
  std::vector<ParameterNorms> parameter_norms() const;
  /// GradientStatistics::norm, if all gradients are those that the last backward left; nullopt
  /// without the option, on devices, and where one was replaced or changed since: its version, or
  /// elements that are looked at. May miss a change of single elements through .data().
  std::optional<double> gradient_norm() const;

  /// Compares `replicas()`, too, besides the parameters: see ReducerOptions::replica_check_every.
  /// Called now and then in a synchronized backward, on the thread that ends it. The same names in
  /// the same order on every rank; if they are not, only parameters are compared. `taken_over` is
  /// called after OnDivergence::kResync. Not during backward.
  void set_replicas(std::function<std::vector<Replica>()> replicas,
                    std::function<void()> taken_over = {});
  /// Compares all of the state in the next synchronized backward instead of a part, as after
  /// loading a checkpoint. Every rank may call it, or only some; what is compared then is the same.
  /// Has no effect where replicas are not compared: see ReducerOptions::replica_check_every. Does
  /// not block.
  void check_replicas_next();

  /// For an optimizer that is about to step these parameters: a step inside of backward, in a
  /// gradient's hook, would use this rank's gradient instead of the average. May be left out.
  /// Thread safe; does not block.
  /// @throws Error if one of them is in a synchronized backward of several ranks, naming it.
  static void optimizer_steps(const std::vector<at::Tensor>& parameters);

  /// Tells the reducers that own these parameters that an optimizer has stepped: check_steps then
  /// also finds ranks that have stepped without a backward, or by kernels that do not count as a
  /// change of a tensor. `optimizer` is any number that tells optimizers apart. May be left out:
  /// LARC, OverlappedOptimizer and amp::LossScaler report their steps themselves, and for
  /// parameters on the CPU the steps of others show in how far the parameters have moved. `all`:
  /// the caller reports the steps of all optimizers, so ranks need not be compared in that. Thread
  /// safe; does not block.
  static void optimizer_stepped(const std::vector<at::Tensor>& parameters, int64_t optimizer,
                                bool all = true);

  /// The group that carries gradients, over the same ranks as the first one that was given; nullptr
  /// after release(). For communication hooks; collectives on it have to be issued in the order of
  /// the buckets.
  c10::intrusive_ptr<c10d::ProcessGroup> communicator() const;

  /// Call with the outputs of each forward that a loss may be computed from. Their backward is then
  /// known to take part even if it reaches no parameter on this rank, and under reentrant
  /// checkpointing the reduction ends with the outer backward. Tensors that do not require grad are
  /// passed over.
  void watch_outputs(const std::vector<at::Tensor>& outputs);

  /// Whether a backward that begins now is synchronized; looked at when the first gradient of a
  /// backward arrives. While off, gradients accumulate locally and are reduced by the next
  /// synchronized backward. Default on. May be called at any time.
  void set_synchronizing(bool on);
  bool synchronizing() const;

  /// Calls `callback` for each bucket of a synchronized backward once its gradients are complete,
  /// while later buckets may still be on their way: an optimizer may step these parameters. Buckets
  /// with a parameter that this rank did not use come last, since another rank may have used it;
  /// parameters that no rank used are not listed. Called on the thread that ends backward, on the
  /// current stream; it must not start a backward. An exception reaches the caller of backward()
  /// after all buckets were completed. nullptr: none. Not called for gradients that are accumulated
  /// without synchronization.
  void set_bucket_callback(std::function<void(const ReducedBucket&)> callback);

  /// Past the bound of one step: with `on`, backward() returns when the last bucket was sent, not
  /// when it has arrived. Gradients must not be read or changed before wait_for() says that they
  /// are there; the bucket callback is called from there, and may step the optimizer. Buckets that
  /// arrive after backward are sent in the order in which the next forward needs them, as the third
  /// backward with a plan has shown. A backward that began before all was waited for waits for the
  /// rest, and throws if it reaches a parameter that was not waited for, since forward then used
  /// its old value. Waits at once, as without it: in backwards that learn or order; in which this
  /// rank misses a gradient or a parameter is outside the plan (without static_graph); with
  /// check_finite, check_steps, under join(), and with hooks of two phases. A new plan is recorded.
  /// Every rank has to do the same.
  void set_deferred(bool on);
  /// What set_deferred() has set, at first false. Does not block.
  bool deferred() const;

  /// Returns when the gradients of these parameters (indices into parameters()) are complete: on
  /// CPU backends the host waits, on NCCL the current stream. Calls the bucket callback for each
  /// bucket that they are in. Does nothing for what is complete.
  /// @throws CommunicationError, what the callback throws, and InvalidArgument for an index out of
  /// range.
  void wait_for(const std::vector<int64_t>& parameters);

  /// The same for all parameters.
  void wait();

  /// Of a backward that has ended without waiting: the parameters (indices into parameters()) that
  /// were not waited for since.
  std::vector<int64_t> in_flight() const;

  /// Uneven inputs. Between begin_join() and end_join() each rank announces its forwards
  /// (announce()) and, by itself, its backwards; a rank that has run out of data calls
  /// await_event() instead, until it says kEnd, and takes part in the others' backwards by
  /// shadow_backward_begin() and _end() with zeros. Each announcement is one small all-reduce that
  /// the host waits for.
  ///
  /// `divide_by_initial_world_size`: gradients are divided by the number of ranks, so that a rank
  /// without data counts as zeros; else by the number of ranks that still have data.
  void begin_join(bool divide_by_initial_world_size);
  void end_join();
  ///
  /// The backwards of synchronized batch norms (of apex::parallel::sync_batch_norm and its module)
  /// are announced as kCustom with 4 * n + k: k 1 is a backward with n channels, 2 and 3 are sums
  /// of n values of float32 and float64. Their forwards, k 0, are announced by the C++ module, else
  /// by the caller, before any backward. After the first, kBackwardEnd is announced, too, and
  /// buckets are launched when backward ends; between kBackward and kBackwardEnd a rank without
  /// data takes part in what is announced, before shadow_backward_end().
  ///
  /// @throws RankMismatch on every rank if active ranks announce different things.
  JoinEvent announce(JoinEvent::Kind kind, int64_t argument);
  JoinEvent await_event();
  /// @param event  the kBackward.
  void shadow_backward_begin(const JoinEvent& event);
  /// The loop of a rank without data: await_event() until the end, backwards shadowed, `on_event`
  /// called for each kForward and kCustom; then end_join(). Returns a rank that had data to the
  /// end, the same on every rank, or -1 if all had.
  int64_t follow_until_end(const std::function<void(const JoinEvent&)>& on_event);
  /// A rank that had data to the end, the same on every rank, or -1 if all had. `followed`: this
  /// rank awaited other events than kEnd. `states`: how many states besides the model's, e.g. of
  /// loss scalers, the caller is going to take over from that rank. Collective; blocks the host.
  /// @throws RankMismatch on every rank if these numbers differ.
  int64_t last_with_data(bool followed, int64_t states = 0) const;
  void shadow_backward_end();

  /// Replaces the all-reduce (and the averaging) by a hook; nullptr restores it. The next backward
  /// agrees on a new plan. Every rank has to do the same: where gradients are on the CPU, the next
  /// backward throws RankMismatch on every rank if some have not.
  void set_comm_hook(std::shared_ptr<CommHook> hook);

  /// Forget the plan; the next backward learns a new one. Every rank has to do the same, as for
  /// set_comm_hook().
  void relearn();

  /// Lets go of the process groups, which end with their last reference: a graph that is still held
  /// keeps the reducer alive, and must not keep them. For the end of a process; not collective. A
  /// backward that would have to synchronize throws from then on. Does nothing the second time.
  void release();

  /// release() for every reducer of this process, also those that only graphs refer to, and waits
  /// until groups that reducers have made are gone. For the end of a process that may hold some in
  /// global variables. Blocks; reducers with a backward in progress are passed over.
  static void release_all();

  /// The plan in force (indices into parameters()), or nothing before the first backward.
  std::optional<BucketPlan> plan() const;

  /// Uses `plan`, saved from plan() of the same model, from the next backward on, if the parameters
  /// that get a gradient are those it holds. Collective: rank 0's plan counts.
  /// @throws InvalidArgument if it names other parameters than these, or mixes dtypes or devices.
  void set_plan(const BucketPlan& plan);

  /// The flat buffer of each bucket of the plan, [elements], in launch order; of a bucket reduced
  /// in place, its gradient. With gradient_as_bucket_view, gradients are views of these. None
  /// before the first backward, after one that failed, and, without gradient_as_bucket_view, after
  /// one that changed the plan.
  std::vector<at::Tensor> buffers() const;

  /// All parameters, duplicates removed.
  const std::vector<NamedTensor>& parameters() const;

  ReducerStatistics statistics() const;

  /// Takes the times of each synchronized backward from the next one on, for overlap_report(); off:
  /// one branch. On: a clock is read per gradient and a few times per bucket; on devices other than
  /// the CPU a timed event is recorded each time, and another stream of torch's pool waits for each
  /// bucket, but neither the host nor the stream of backward does. Not while a device's graph is
  /// captured. Off forgets the last report. Waits for a deferred backward.
  /// @throws Error while a backward is running; what wait() throws.
  void record_overlap(bool on);

  /// What the last synchronized backward of this rank hid, of those that were recorded and whose
  /// buckets were all awaited: after a deferred backward, the one before it until wait() or
  /// wait_for() have completed it. nullopt if there is none. Without what is exchanged to learn a
  /// plan, and late gradients that were reduced apart from it. On the CPU does not block, and
  /// arrivals are told by the backend, when the future of its Work is complete; by a backend
  /// without futures, when the wait for the bucket returned, which is later. On another device the
  /// host waits until its streams are through with that backward; if its events give no times
  /// (OverlapClock::kHostOnly), times are those of the host.
  std::optional<OverlapReport> overlap_report() const;

  /// How long each rank takes for its own part of a step, over the last steps, and which one the
  /// others wait for; the same on every rank. Steps count from the first synchronized backward that
  /// had a plan. Without ranks where none has counted: with one rank, and on devices other than
  /// the CPU unless check_steps or skip_failed_steps are set, since ranks do not read each other's
  /// reports there. Does not block.
  StragglerReport straggler_report() const;

 private:
  std::shared_ptr<detail::ReducerCore> core_;
};

}  // namespace apex::parallel
