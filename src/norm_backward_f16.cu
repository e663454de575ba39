// The general backward for float16 input.
#include "norm_backward_launch.cuh"

namespace fastln {

const char* norm_backward_f16_f16(const NormGrads& p, const BackwardPlan& plan, const DeviceFacts& device,
                                  void* workspace, void* stream) {
  return run_backward<half, half>(p, plan, device, workspace, stream);
}
const char* norm_backward_f16_f32(const NormGrads& p, const BackwardPlan& plan, const DeviceFacts& device,
                                  void* workspace, void* stream) {
  return run_backward<half, float>(p, plan, device, workspace, stream);
}

}  // namespace fastln
