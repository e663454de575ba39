// The kernels of layer_norm_fwd (bindings_norm.cpp) and layer_norm_bwd (bindings_backward.cpp) as their ops have them,
// checks included, for bindings_override.cpp and bindings_autograd.cpp to put behind aten's.
#pragma once

#include <vector>

#include "tensors.h"

namespace fastln {

// Output, mean, and rstd times `rstd_sign`.
Triple layer_norm_fwd_cuda(const Tensor& input, IntList shape, const OptionalTensor& weight, const OptionalTensor& bias,
                           double eps, int rstd_sign);

// dx, dweight, dbias; undefined where the mask says no. On CUDA rstd may be negative: its magnitude counts.
Triple layer_norm_bwd_cuda(Tensor grad_out, Tensor input, std::vector<int64_t> shape, Tensor mean, Tensor rstd,
                           OptionalTensor weight, OptionalTensor bias, std::vector<bool> mask);

}  // namespace fastln
