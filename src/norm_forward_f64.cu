// The general forward for float64 input.
#include "norm_launch.cuh"

namespace fastln {

const char* norm_forward_f64_f64(const NormRows& p, const Plan& plan, const DeviceFacts& device, void* workspace,
                                 void* stream) {
  return run_forward<double, double>(p, plan, device, workspace, stream);
}

}  // namespace fastln
