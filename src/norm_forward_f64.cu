// The general forward for float64 input.
#include "norm_launch.cuh"

namespace fastln {

const char* norm_forward_f64_f64(const NormRows& p, const Plan& plan, int64_t l2_bytes, void* workspace, void* stream) {
  return run_forward<double, double>(p, plan, l2_bytes, workspace, stream);
}

}  // namespace fastln
