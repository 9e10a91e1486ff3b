// SPDX-License-Identifier: BSD-3-Clause
// The launches of batch_norm_cuda.h on the fake device. The emulator computes them, and the
// device's detector records the memory they use on their stream.

#include <support/fake_device.h>

#define launch_statistics emulated_launch_statistics
#define launch_normalize emulated_launch_normalize
#define launch_reduce emulated_launch_reduce
#define launch_gradient emulated_launch_gradient
#include "kernels/batch_norm.cu"
#undef launch_statistics
#undef launch_normalize
#undef launch_reduce
#undef launch_gradient

#include <memory>
#include <vector>

namespace apex::kernels {
namespace {

namespace fake = testing::fake;

class Launch {
 public:
  Launch(const CudaCall& call, const char* name)
      : call_(call),
        name_(name),
        elements_(call.sizes.batch * call.sizes.channels * call.sizes.plane) {}

  Launch& reads(const void* data, int64_t bytes) { return add(data, bytes, false); }
  Launch& writes(const void* data, int64_t bytes) { return add(data, bytes, true); }
  Launch& reads_elements(const void* data) {
    return reads(data, elements_ * element_bytes(call_.type));
  }
  Launch& writes_elements(const void* data) {
    return writes(data, elements_ * element_bytes(call_.type));
  }
  Launch& reads_channels(const double* data, int64_t per_channel = 1) {
    return reads(data, 8 * per_channel * call_.sizes.channels);
  }
  Launch& writes_channels(const double* data, int64_t per_channel = 1) {
    return writes(data, 8 * per_channel * call_.sizes.channels);
  }
  Launch& reads(const ChannelArray& array) { return add(array, false); }
  Launch& writes(const ChannelArray& array) { return add(array, true); }
  Launch& works() { return writes(call_.partial, 8 * partial_length(call_)); }

  int run(const std::function<int()>& compute) {
    const auto error = std::make_shared<int>(0);  // a capture may keep the operation
    fake::operate(stream(), name_, regions_, [compute, error] { *error = compute(); });
    return *error;
  }

 private:
  c10::Stream stream() const {
    return c10::Stream(c10::Stream::UNSAFE, fake::device(),
                       reinterpret_cast<c10::StreamId>(call_.stream));
  }
  Launch& add(const ChannelArray& array, bool writes) {
    return add(array.narrow, 4 * call_.sizes.channels, writes)
        .add(array.wide, 8 * call_.sizes.channels, writes);
  }
  Launch& add(const void* data, int64_t bytes, bool writes) {
    if (data != nullptr && bytes > 0)
      regions_.push_back({data, static_cast<size_t>(bytes), writes});
    return *this;
  }

  const CudaCall call_;
  const char* const name_;
  const int64_t elements_;
  std::vector<fake::Region> regions_;
};

}  // namespace

int launch_statistics(const CudaCall& call, const void* x, double* record,
                      int64_t* num_batches_tracked) {
  return Launch(call, "statistics")
      .reads_elements(x)
      .writes(record, 8 * statistics_length(call.sizes.channels))
      .writes(num_batches_tracked, 8)
      .works()
      .run([=] { return emulated_launch_statistics(call, x, record, num_batches_tracked); });
}

int launch_normalize(const CudaCall& call, const NormalizeArguments& a) {
  Launch launch(call, "normalize");
  launch.reads_elements(a.x).writes_elements(a.out).reads(a.weight).reads(a.bias);
  launch.reads(a.records, 8 * a.ranks * statistics_length(call.sizes.channels))
      .reads(a.num_batches, 8);
  launch.writes(a.running_mean).writes(a.running_var);
  launch.writes_channels(a.mean).writes_channels(a.invstd).writes(a.count, 8);
  return launch.run([=] { return emulated_launch_normalize(call, a); });
}

int launch_reduce(const CudaCall& call, const GradientArguments& a) {
  Launch launch(call, "reduce");
  launch.reads_elements(a.dy).reads_elements(a.x).reads_channels(a.mean).reads_channels(a.invstd);
  launch.writes_channels(a.sums, 2).writes(a.dweight).writes(a.dbias).works();
  return launch.run([=] { return emulated_launch_reduce(call, a); });
}

int launch_gradient(const CudaCall& call, const GradientArguments& a) {
  Launch launch(call, "gradient");
  launch.reads_elements(a.dy).reads_elements(a.x).reads(a.weight);
  launch.reads_channels(a.mean).reads_channels(a.invstd).reads(a.count, 8);
  launch.reads_channels(a.sums, 2).writes_elements(a.out);
  return launch.run([=] { return emulated_launch_gradient(call, a); });
}

}  // namespace apex::kernels
