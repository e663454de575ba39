// The kernels of layer_norm_fwd (bindings_norm.cpp) and layer_norm_bwd (bindings_backward.cpp) as their ops have them,
// checks included, for bindings_override.cpp and bindings_autograd.cpp to put behind aten's; and calls of ops of these
// signatures by name.
#pragma once

#include <vector>

#include "tensors.h"

namespace fastln {

// Output, mean, and rstd times `rstd_sign`. Errors name `op`.
Triple layer_norm_fwd_cuda(const char* op, const Tensor& input, IntList shape, const OptionalTensor& weight,
                           const OptionalTensor& bias, double eps, int rstd_sign);

// dx, dweight, dbias; undefined where the mask says no. On CUDA rstd may be negative: its magnitude counts.
Triple layer_norm_bwd_cuda(Tensor grad_out, Tensor input, std::vector<int64_t> shape, Tensor mean, Tensor rstd,
                           OptionalTensor weight, OptionalTensor bias, std::vector<bool> mask);

// The mask without the gradients of what is not there, as in aten's decomposition.
inline std::vector<bool> of_present(std::vector<bool> mask, const OptionalTensor& weight, const OptionalTensor& bias) {
  mask.at(1) = mask.at(1) && weight;
  mask.at(2) = mask.at(2) && bias;
  return mask;
}

// An op of the signature of aten::native_layer_norm, by way of torch's dispatcher.
inline Triple call_forward(const char* op, const Tensor& input, IntList shape, const OptionalTensor& weight,
                           const OptionalTensor& bias, double eps) {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  StableIValue stack[] = {from(input), from(shape), from(weight), from(bias), from(eps)};
  call_op(op, "", stack);
  return {to<Tensor>(stack[0]), to<Tensor>(stack[1]), to<Tensor>(stack[2])};
}

// An op of the signature of aten::native_layer_norm_backward.
inline Triple call_backward(const char* op, const Tensor& grad_out, const Tensor& input, IntList shape,
                            const Tensor& mean, const Tensor& rstd, const OptionalTensor& weight,
                            const OptionalTensor& bias, const std::vector<bool>& mask) {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  const bool wanted[] = {mask.at(0), mask.at(1), mask.at(2)};
  StableIValue stack[] = {
      from(grad_out), from(input),  from(shape), from(mean),
      from(rstd),     from(weight), from(bias),  from(torch::headeronly::HeaderOnlyArrayRef<bool>(wanted, 3))};
  call_op(op, "", stack);
  return {to<Tensor>(stack[0]), to<Tensor>(stack[1]), to<Tensor>(stack[2])};
}

constexpr const char* kAtenForward = "aten::native_layer_norm";
constexpr const char* kAtenBackward = "aten::native_layer_norm_backward";

}  // namespace fastln
