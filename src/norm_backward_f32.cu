// The general backward for float32 input.
#include "norm_backward_launch.cuh"

namespace fastln {

const char* norm_backward_f32_f32(const NormGrads& p, const BackwardPlan& plan, const DeviceFacts& device,
                                  void* workspace, void* stream) {
  return run_backward<float, float>(p, plan, device, workspace, stream);
}

}  // namespace fastln
