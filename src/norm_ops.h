// The CUDA kernels of layer_norm_fwd (bindings_norm.cpp) and layer_norm_bwd (bindings_backward.cpp) as their ops
// have them, checks included, for bindings_override.cpp to put behind aten's.
#pragma once

#include <vector>

#include "tensors.h"

namespace fastln {

// Output, mean, rstd.
Triple layer_norm_fwd_cuda(Tensor input, std::vector<int64_t> shape, OptionalTensor weight, OptionalTensor bias,
                           double eps);

// dx, dweight, dbias; undefined where the mask says no.
Triple layer_norm_bwd_cuda(Tensor grad_out, Tensor input, std::vector<int64_t> shape, Tensor mean, Tensor rstd,
                           OptionalTensor weight, OptionalTensor bias, std::vector<bool> mask);

}  // namespace fastln
