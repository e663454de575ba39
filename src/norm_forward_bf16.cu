// The general forward for bfloat16 input.
#include "norm_launch.cuh"

namespace fastln {

const char* norm_forward_bf16_bf16(const NormRows& p, const Plan& plan, const DeviceFacts& device, void* workspace,
                                   void* stream) {
  return run_forward<__nv_bfloat16, __nv_bfloat16>(p, plan, device, workspace, stream);
}
const char* norm_forward_bf16_f32(const NormRows& p, const Plan& plan, const DeviceFacts& device, void* workspace,
                                  void* stream) {
  return run_forward<__nv_bfloat16, float>(p, plan, device, workspace, stream);
}

}  // namespace fastln
