// What the bindings share: torch's tensors through the stable ABI, errors, device and stream.
// Included by bindings*.cpp alone: nothing below them sees torch.
#pragma once

#include <algorithm>
#include <cctype>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/Layout.h>
#include <torch/headeronly/core/ScalarType.h>

#include "device.h"

// libtorch_cuda's only symbol used here. Weak, so that the library also loads under CPU-only torch.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** ret_stream);

// What torch says of the last error on this thread; from 2.13 on, hence weak.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

// Throws if a call into torch failed, with torch's own text: programs look for "out of memory" in it.
#define FASTLN_CHECK_TORCH(call) fastln::check_torch((call), #call)

namespace fastln {

using torch::headeronly::Layout;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Triple = std::tuple<Tensor, Tensor, Tensor>;
using IntList = torch::headeronly::IntHeaderOnlyArrayRef;

// Texts of errors match those of the fakes in fastln/ word for word. Thrown as they are, because
// STD_TORCH_CHECK would put a file and line of this library in front.
template <typename... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  std::ostringstream text;
  text << "fastln::" << op << ": ";
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

// An error that Python raised arrives without a text.
inline void check_torch(AOTITorchError error, const char* call) {
  if (error == AOTI_TORCH_SUCCESS) return;
  const auto what = torch_exception_get_what_without_backtrace;
  const char* text = what ? what() : nullptr;
  throw std::runtime_error(text && *text ? text : std::string("fastln: an error came without its text from ") + call);
}

// Calls an op through torch's dispatcher. Takes the arguments off `stack` and leaves there what the op returns.
inline void call_op(const char* op, const char* overload, StableIValue* stack) {
  check_torch(torch_call_dispatcher(op, overload, stack, TORCH_ABI_VERSION), op);
}

inline Tensor call_unary(const char* op, const Tensor& t) {
  StableIValue stack[] = {torch::stable::detail::from(t)};
  call_op(op, "", stack);
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// `t` itself, or a copy without torch's negative bit.
inline Tensor resolved(const Tensor& t) { return call_unary("aten::resolve_neg", t); }
inline OptionalTensor resolved(const OptionalTensor& t) { return t ? OptionalTensor(resolved(*t)) : t; }

// The dtype, also where the stable ABI has no number for it, as for quantized ones; and in one call into torch, where
// scalar_type() takes up to a dozen.
inline ScalarType dtype_of(const Tensor& t) {
  if (!t.defined()) return ScalarType::Undefined;
  int32_t dtype;
  FASTLN_CHECK_TORCH(aoti_torch_get_dtype(t.get(), &dtype));
  return static_cast<ScalarType>(dtype);
}

// As Python has it.
inline std::string dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Half: return "float16";
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::ComplexHalf: return "complex32";
    case ScalarType::ComplexFloat: return "complex64";
    case ScalarType::ComplexDouble: return "complex128";
    case ScalarType::Bool: return "bool";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Undefined: return "None";
    default: break;
  }
  std::string name = torch::headeronly::toString(type);  // the others are Python's names with capitals
  for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return name;
}

inline std::string list_text(IntList values) {
  std::string out = "[";
  for (size_t i = 0; i < values.size(); ++i) out += (i ? ", " : "") + std::to_string(values[i]);
  return out + "]";
}

inline std::string device_text(const Tensor& t) {
  if (t.is_cuda()) return "cuda:" + std::to_string(t.get_device_index());
  return t.is_cpu() ? "cpu" : "another device";
}

inline bool on_same_device(const Tensor& a, const Tensor& b) {
  return a.is_cuda() == b.is_cuda() && a.is_cpu() == b.is_cpu() && a.get_device_index() == b.get_device_index();
}

inline void check_arch(const char* op, int32_t device) {
  if (device_is_supported(device)) return;
  const DeviceFacts& facts = device_facts(device);
  fail(op, "expected a GPU of a compute capability this build was compiled for (", arch_list(), "), got ", facts.major,
       ".", facts.minor);
}

// Where the elements of `t` lie. Null where it has none, or no memory of its own for them: fake tensors, subclasses in
// Python that wrap others, wrappers of torch.func, sparse and mkldnn tensors. (The first versions of torch that we run
// under write to stderr when asked for that of a wrapper of torch.func.)
inline const void* memory_of(const Tensor& t) {
  const void* data;
  return torch_get_const_data_ptr(t.get(), &data) == AOTI_TORCH_SUCCESS ? data : nullptr;
}

// As Python has it.
inline const char* layout_name(Layout layout) {
  switch (layout) {
    case Layout::Strided: return "strided";
    case Layout::Sparse: return "sparse_coo";
    case Layout::SparseCsr: return "sparse_csr";
    case Layout::SparseCsc: return "sparse_csc";
    case Layout::SparseBsr: return "sparse_bsr";
    case Layout::SparseBsc: return "sparse_bsc";
    case Layout::Mkldnn: return "_mkldnn";
    case Layout::Jagged: return "jagged";
    default: return "another";
  }
}

// There are kernels for strided tensors alone, and others may have no strides to ask for.
inline void check_layout(const char* op, const char* what, const Tensor& t) {
  int32_t layout;
  FASTLN_CHECK_TORCH(aoti_torch_get_layout(t.get(), &layout));
  if (const auto got = static_cast<Layout>(layout); got != Layout::Strided)
    fail(op, "expected ", what, " of layout strided, got ", layout_name(got));
}
inline void check_layout(const char* op, const char* what, const OptionalTensor& t) {
  if (t) check_layout(op, what, *t);
}

// What there is: absent arguments are undefined tensors where autograd passes on what it saved, or asked for nothing.
inline OptionalTensor some(const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }
inline OptionalTensor present(const OptionalTensor& t) { return t ? some(*t) : t; }

// A new tensor on the device of `like`, contiguous.
inline Tensor empty_contiguous(IntList sizes, ScalarType type, const Tensor& like) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = step;
    step *= std::max<int64_t>(sizes[d], 1);
  }
  int32_t device_type, device_index;
  FASTLN_CHECK_TORCH(aoti_torch_get_device_type(like.get(), &device_type));
  FASTLN_CHECK_TORCH(aoti_torch_get_device_index(like.get(), &device_index));
  AtenTensorHandle out;
  FASTLN_CHECK_TORCH(aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(),
                                              torch::stable::detail::to<int32_t>(torch::stable::detail::from(type)),
                                              device_type, device_index, &out));
  return Tensor(out);
}

// `t` itself if it is contiguous: torch's own contiguous() says so too, but 2 us later.
inline Tensor as_contiguous(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

// The stride from row to row when the rows of `t`, its last `row_dims` dimensions, lie evenly spaced and
// each contiguous; none otherwise.
inline std::optional<int64_t> row_stride(const Tensor& t, size_t row_dims) {
  const auto sizes = t.sizes(), strides = t.strides();
  const size_t leading = sizes.size() - row_dims;
  int64_t cols = 1;
  for (size_t d = sizes.size(); d-- > leading;) {
    if (sizes[d] != 1 && strides[d] != cols) return std::nullopt;
    cols *= sizes[d];
  }
  int64_t stride = cols, expected = -1;
  for (size_t d = leading; d-- > 0;) {
    if (sizes[d] == 1) continue;
    if (expected < 0) stride = strides[d];
    else if (strides[d] != expected) return std::nullopt;
    expected = strides[d] * sizes[d];
  }
  return stride;
}

// Makes `device` current for its lifetime; a negative one means the CPU. Asking which device is current
// is cheap, switching is not, so it switches only if it must. The guard is a member with a destructor of its own, since
// make_current() may throw.
class CurrentDevice {
 public:
  explicit CurrentDevice(int32_t device) {
    if (device < 0) return;
    int32_t current;
    FASTLN_CHECK_TORCH(aoti_torch_get_current_device_index(&current));
    if (current != device) {
      DeviceGuardHandle guard;
      FASTLN_CHECK_TORCH(aoti_torch_create_device_guard(device, &guard));
      guard_.reset(guard);
    }
    make_current(device);
  }

 private:
  struct Delete {
    void operator()(DeviceGuardHandle guard) const { aoti_torch_delete_device_guard(guard); }
  };
  std::unique_ptr<std::remove_pointer_t<DeviceGuardHandle>, Delete> guard_;
};

// The current stream of that device, as a cudaStream_t.
inline void* current_stream(int32_t device) {
  void* stream = nullptr;
  FASTLN_CHECK_TORCH(aoti_torch_get_current_cuda_stream(device, &stream));
  return stream;
}

}  // namespace fastln
