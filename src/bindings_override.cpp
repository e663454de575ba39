// Our kernels behind aten::native_layer_norm and native_layer_norm_backward on CUDA, while fastln.override() is on.
//
// What surrounds these two ops, autograd, autocast, functorch and the decompositions, is torch's and stays. So they
// take what aten's kernels take, give what those give, and refuse the rest in the same words.
#include <chrono>
#include <memory>
#include <stdexcept>
#include <thread>

#include "norm_ops.h"

namespace fastln {
namespace {

// -------------------------------------------------------------------------------------------- checks

template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

void check_device(const char* op, const char* what, const OptionalTensor& t, const Tensor& first) {
  if (t && !on_same_device(*t, first))
    refuse("Expected all tensors to be on the same device, but got ", what, " is on ", device_text(*t),
           ", different from other tensors on ", device_text(first),
           " (when checking argument in method wrapper_CUDA__", op, ")");
}

void check_parameter(const char* what, const OptionalTensor& t, IntList shape) {
  if (!t) return;
  const auto got = t->sizes();
  if (!std::equal(shape.begin(), shape.end(), got.begin(), got.end()))
    refuse("Expected ", what, " to be of same shape as normalized_shape, but got ", what, " of shape ", list_text(got),
           " and normalized_shape = ", list_text(shape));
}

void check_shapes(const Tensor& input, IntList shape, const OptionalTensor& weight, const OptionalTensor& bias) {
  if (shape.size() == 0)
    refuse(
        "Expected normalized_shape to be at least 1-dimensional, i.e., containing at least one element, but got "
        "normalized_shape = []");
  check_parameter("weight", weight, shape);
  check_parameter("bias", bias, shape);
  const auto sizes = input.sizes();
  if (sizes.size() >= shape.size() && std::equal(shape.begin(), shape.end(), sizes.end() - shape.size())) return;
  std::ostringstream wanted;
  for (const int64_t size : shape) wanted << ", " << size;
  refuse("Given normalized_shape=", list_text(shape), ", expected input with shape [*", wanted.str(),
         "], but got input of size", list_text(sizes));
}

const char* name_of(const Tensor& t) { return torch::headeronly::toString(dtype_of(t)); }

// aten asks for the dtypes only if there are rows.
void check_dtypes(const char* kernel, const Tensor& input, std::initializer_list<const OptionalTensor*> others) {
  switch (dtype_of(input)) {
    case ScalarType::Half:
    case ScalarType::BFloat16:
    case ScalarType::Float:
    case ScalarType::Double: break;
    default: refuse("\"", kernel, "\" not implemented for '", name_of(input), "'");
  }
  for (const OptionalTensor* t : others)
    if (*t && dtype_of(**t) != dtype_of(input))
      refuse("expected scalar type ", name_of(input), " but found ", name_of(**t));
}

// ------------------------------------------------------------------------------------------- kernels

Triple forward(Tensor input, std::vector<int64_t> shape, OptionalTensor weight, OptionalTensor bias, double eps) {
  weight = present(weight);
  bias = present(bias);
  check_device("native_layer_norm", "weight", weight, input);
  check_device("native_layer_norm", "bias", bias, input);
  check_shapes(input, shape, weight, bias);
  check_dtypes("LayerNormKernelImpl", input, {&weight, &bias});
  return layer_norm_fwd_cuda("layer_norm", input, shape, weight, bias, eps, 1);
}

Triple backward(Tensor grad_out, Tensor input, std::vector<int64_t> shape, Tensor mean, Tensor rstd,
                OptionalTensor weight, OptionalTensor bias, std::vector<bool> mask) {
  constexpr const char* kOp = "native_layer_norm_backward";
  weight = present(weight);
  bias = present(bias);
  check_device(kOp, "input", input, grad_out);
  check_device(kOp, "mean", mean, grad_out);
  check_device(kOp, "rstd", rstd, grad_out);
  check_device(kOp, "weight", weight, grad_out);
  check_device(kOp, "bias", bias, grad_out);
  check_shapes(input, shape, weight, bias);
  const OptionalTensor dy = grad_out;
  check_dtypes("LayerNormBackwardKernelImpl", input, {&dy, &weight, &bias});
  return layer_norm_bwd_cuda(grad_out, input, shape, mean, rstd, weight, bias, of_present(mask, weight, bias));
}

// ------------------------------------------------------------------------------------------ the switch

using torch::stable::detail::StableLibrary;

// The registrations last as long as this does.
std::unique_ptr<StableLibrary> registrations;

// torch warns, once a process and on stderr where no Python is around, of the first kernel that replaces another.
// fastln/override.py replaces this one first, from Python, where the warning can be caught.
void nothing() {}

STABLE_TORCH_LIBRARY_FRAGMENT(fastln, m) { m.def("_replaced() -> ()"); }
STABLE_TORCH_LIBRARY_IMPL(fastln, CPU, m) { m.impl("_replaced", TORCH_BOX(&nothing)); }

}  // namespace

// For fastln.override(), which sees to it that there is one call at a time, and holds the GIL. Returns what went
// wrong, or null.
extern "C" __attribute__((visibility("default"))) const char* fastln_override(int on) {
  static std::string error;
  try {
    // torch's table of kernels has no lock for those who read it, and an entry is several words: a call that finds half
    // of ours and half of aten's crashes. So no thread may be inside either op on CUDA while this writes, and that is for
    // the caller of override() to see to. Ours cannot stay there and pass calls on instead: this entry is the only way to
    // aten's kernels.
    //
    // The pause is for callers who do not quite see to it. It synchronizes nothing: threads that came from Python mostly
    // finish their call in this time, and then wait for the GIL; autograd's threads do not wait for it.
    if (!on == !registrations) return nullptr;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    if (!on) {
      registrations.reset();
    } else {
      auto made = std::make_unique<StableLibrary>(StableLibrary::Kind::IMPL, "aten", "CUDA", "fastln.override", 0);
      made->impl("native_layer_norm", TORCH_BOX(&forward));
      made->impl("native_layer_norm_backward", TORCH_BOX(&backward));
      registrations = std::move(made);
    }
    return nullptr;
  } catch (const std::exception& caught) {
    error = caught.what();
    return error.c_str();
  }
}

}  // namespace fastln
