// The general backward for float64 input.
#include "norm_backward_launch.cuh"

namespace fastln {

const char* norm_backward_f64_f64(const NormGrads& p, const BackwardPlan& plan, const DeviceFacts& device,
                                  void* workspace, void* stream) {
  return run_backward<double, double>(p, plan, device, workspace, stream);
}

}  // namespace fastln
