// The general backward for bfloat16 input.
#include "norm_backward_launch.cuh"

namespace fastln {

const char* norm_backward_bf16_bf16(const NormGrads& p, const BackwardPlan& plan, const DeviceFacts& device,
                                    void* workspace, void* stream) {
  return run_backward<__nv_bfloat16, __nv_bfloat16>(p, plan, device, workspace, stream);
}
const char* norm_backward_bf16_f32(const NormGrads& p, const BackwardPlan& plan, const DeviceFacts& device,
                                   void* workspace, void* stream) {
  return run_backward<__nv_bfloat16, float>(p, plan, device, workspace, stream);
}

}  // namespace fastln
