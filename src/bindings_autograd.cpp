// Our kernels under torch's own autograd of native_layer_norm, in C++: for fastln.layer_norm where a gradient is needed
// (fastln/_autograd.py). The stable ABI has no autograd, and one in Python takes the host as long again as all the rest.
//
// torch's Autograd kernel of aten::native_layer_norm saves what the forward gives and later calls
// aten::native_layer_norm_backward with it; both calls look for a kernel on the dispatch key Negative, below Autograd
// and above CUDA, if a tensor with the negative bit (a lazy `-x`) is among the arguments or the thread has included the
// key. aten has none there, so torch resolves such tensors and goes on. Ours are there for the two ops. A forward
// without negative tensors is ours: fastln.layer_norm has included the key. It returns rstd with the negative bit, over
// memory that holds -rstd, so that every other reader finds rstd; that marks the backward as ours too. Whatever else
// comes here is resolved, as without us. (CPU tensors never come for the first reason: where the key is included, aten's
// own kernel is out of reach.)
#include "norm_ops.h"

namespace fastln {
namespace {

using torch::stable::detail::from;

// Whether `t` has the negative bit; if so it is resolved. (Of all that tells, only resolve_neg() is asked about the
// tensor itself this far below Autograd. It copies where there is something to resolve, and else gives back `t`.)
bool resolve(Tensor& t) {
  const Tensor plain = resolved(t);
  const bool was_negative = plain.const_data_ptr() != t.const_data_ptr();
  t = plain;
  return was_negative;
}
bool resolve(OptionalTensor& t) { return t && resolve(*t); }

// Fake tensors have none, nor have those that torch.compile traces with.
bool has_memory(const Tensor& t) {
  const void* data;
  return torch_get_const_data_ptr(t.get(), &data) == AOTI_TORCH_SUCCESS && (data != nullptr || t.numel() == 0);
}

Triple forward(Tensor input, std::vector<int64_t> shape, OptionalTensor weight, OptionalTensor bias, double eps) {
  weight = present(weight);
  bias = present(bias);
  const bool is_ours = input.is_cuda() && has_memory(input) && !(resolve(input) | resolve(weight) | resolve(bias));
  if (!is_ours) return call_forward(kAtenForward, resolved(input), shape, resolved(weight), resolved(bias), eps);
  const auto [y, mean, minus_rstd] = layer_norm_fwd_cuda("layer_norm", input, shape, weight, bias, eps, -1);
  return {y, mean, call_unary("aten::_neg_view", minus_rstd)};
}

Triple backward(Tensor grad_out, Tensor input, std::vector<int64_t> shape, Tensor mean, Tensor rstd,
                OptionalTensor weight, OptionalTensor bias, std::vector<bool> mask) {
  weight = present(weight);
  bias = present(bias);
  bool is_ours = input.is_cuda() && has_memory(grad_out) && has_memory(input);
  // If nothing else is negative, rstd is.
  if (is_ours && (resolve(grad_out) | resolve(input) | resolve(mean) | resolve(weight) | resolve(bias))) {
    Tensor plain = rstd;
    is_ours = resolve(plain);
  }
  if (!is_ours)
    return call_backward(kAtenBackward, resolved(grad_out), resolved(input), shape, resolved(mean), resolved(rstd),
                         resolved(weight), resolved(bias), mask);
  const Triple grads =
      layer_norm_bwd_cuda(grad_out, input, shape, mean, rstd, weight, bias, of_present(mask, weight, bias));
  if (aoti_torch_grad_mode_is_enabled()) {  // create_graph: what torch has recorded of this call is put right
    const auto [dx, dweight, dbias] = grads;
    StableIValue stack[] = {from(some(dx)), from(some(dweight)), from(some(dbias))};
    call_op("fastln::_layer_norm_bwd_recorded", "", stack);
  }
  return grads;
}

STABLE_TORCH_LIBRARY_FRAGMENT(fastln, m) {
  m.def("_layer_norm_bwd_recorded(Tensor? dx, Tensor? dweight, Tensor? dbias) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("native_layer_norm", TORCH_BOX(&forward));
  m.impl("native_layer_norm_backward", TORCH_BOX(&backward));
}

}  // namespace
}  // namespace fastln
