// The general forward for float16 input.
#include "norm_launch.cuh"

namespace fastln {

const char* norm_forward_f16_f16(const NormRows& p, const Plan& plan, const DeviceFacts& device, void* workspace,
                                 void* stream) {
  return run_forward<half, half>(p, plan, device, workspace, stream);
}
const char* norm_forward_f16_f32(const NormRows& p, const Plan& plan, const DeviceFacts& device, void* workspace,
                                 void* stream) {
  return run_forward<half, float>(p, plan, device, workspace, stream);
}

}  // namespace fastln
