// The general forward for float32 input.
#include "norm_launch.cuh"

namespace fastln {

const char* norm_forward_f32_f32(const NormRows& p, const Plan& plan, const DeviceFacts& device, void* workspace,
                                 void* stream) {
  return run_forward<float, float>(p, plan, device, workspace, stream);
}

}  // namespace fastln
