// The torch side of the eight named ops: schemas, checks, launch, autograd gate. Of torch it needs the stable ABI
// alone, so that one binary serves every torch >= 2.10; what the gates ask beside it, they can do without
// (autograd_gate.h).
//
// Each op has a public name, fastln::layer_norm_X, and a private twin fastln::_layer_norm_X that holds
// the CPU and CUDA kernels. The public name's Autograd kernel is a gate (autograd_gate.h): where there is
// nothing to differentiate it goes straight on to the twin, so an inference call never enters Python; else to
// the autograd of fastln/_named.py. The stable ABI cannot redispatch below autograd, hence two names.
#include <algorithm>
#include <cfloat>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "autograd_gate.h"
#include "launch.h"
#include "tensors.h"

namespace fastln {
namespace {

// ---------------------------------------------------------------------------------------------- list

struct KernelEntry {
  const char* name;
  const char* twin;
  ScalarType element;
  bool accumulates_in_half;
  const char* (*cuda)(const Rows&, const DeviceFacts&, void*);
  void (*cpu)(const Rows&, int64_t, int64_t);
};

struct half {};  // stands for float16 where the list says `half`
template <typename T> constexpr ScalarType kTypeOf = ScalarType::Float;
template <> constexpr ScalarType kTypeOf<half> = ScalarType::Half;

#define FASTLN_ENTRY(name, Elem, Acc, items, access)                                  \
  KernelEntry{"layer_norm_" #name,       "fastln::_layer_norm_" #name, kTypeOf<Elem>, \
              std::is_same_v<Acc, half>, cuda_layer_norm_##name,       cpu_layer_norm_##name},
constexpr KernelEntry kKernels[] = {FASTLN_KERNELS(FASTLN_ENTRY)};
#undef FASTLN_ENTRY
constexpr size_t kKernelCount = std::size(kKernels);

// -------------------------------------------------------------------------------------------- checks

constexpr const char* kNoRule =
    "expected no derivative by forward mode or torch.func, which this op does not have, got one";
constexpr const char* kOutRequiresGrad = "expected no argument of the out overload to require grad, got one that does";
constexpr const char* kOutOverlapsInput = "expected out to be input itself or not to overlap it, got a partial overlap";
constexpr const char* kOutOverlapsWeight = "expected out not to overlap weight, got an overlap";
constexpr const char* kOutOverlapsBias = "expected out not to overlap bias, got an overlap";

void check_input(const KernelEntry& k, const Tensor& input) {
  if (dtype_of(input) != k.element)
    fail(k.name, "expected input of dtype ", dtype_name(k.element), ", got ", dtype_name(dtype_of(input)));
  if (input.dim() == 0) fail(k.name, "expected input with at least 1 dimension, got 0");
}

void check_affine(const KernelEntry& k, const char* what, const Tensor& t, const Tensor& input) {
  const int64_t cols = input.size(input.dim() - 1);
  if (t.dim() != 1 || t.size(0) != cols)
    fail(k.name, "expected ", what, " of shape [", cols, "], got ", list_text(t.sizes()));
  const ScalarType type = dtype_of(t);
  if (type != k.element && type != ScalarType::Float)
    fail(k.name, "expected ", what, " of dtype ", dtype_name(k.element),
         k.element == ScalarType::Float ? "" : " or float32", ", got ", dtype_name(type));
  if (!on_same_device(t, input)) fail(k.name, "expected ", what, " on ", device_text(input), ", got ", device_text(t));
}

void check_layouts(const KernelEntry& k, const Tensor& input, double, double) { check_layout(k.name, "input", input); }

void check_layouts(const KernelEntry& k, const Tensor& input, const OptionalTensor& weight,
                   const OptionalTensor& bias) {
  check_layout(k.name, "input", input);
  check_layout(k.name, "weight", weight);
  check_layout(k.name, "bias", bias);
}

void check_out(const KernelEntry& k, const Tensor& out, const Tensor& input) {
  check_layout(k.name, "out", out);
  const auto want = input.sizes(), got = out.sizes();
  if (!std::equal(want.begin(), want.end(), got.begin(), got.end()))
    fail(k.name, "expected out of shape ", list_text(want), ", got ", list_text(got));
  if (dtype_of(out) != k.element)
    fail(k.name, "expected out of dtype ", dtype_name(k.element), ", got ", dtype_name(dtype_of(out)));
  if (!on_same_device(out, input)) fail(k.name, "expected out on ", device_text(input), ", got ", device_text(out));
  if (!out.is_contiguous()) fail(k.name, "expected a contiguous out, got strides ", list_text(out.strides()));
}

// The bytes [first, last) that a tensor's elements lie in. None where it has no memory, and perhaps no strides either:
// fakes look at theirs themselves.
std::pair<uintptr_t, uintptr_t> extent(const Tensor& t) {
  const auto first = reinterpret_cast<uintptr_t>(memory_of(t));
  if (first == 0 || t.numel() == 0) return {first, first};
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  return {first, first + (last + 1) * t.element_size()};
}

bool overlap(const Tensor& a, const Tensor& b) {
  const auto [a0, a1] = extent(a);
  const auto [b0, b1] = extent(b);
  return std::max(a0, b0) < std::min(a1, b1);
}

void check_overlap(const KernelEntry& k, const Tensor& out, const Tensor& input, const OptionalTensor& weight,
                   const OptionalTensor& bias) {
  const bool in_place = memory_of(input) == memory_of(out) && input.is_contiguous();
  if (!in_place && overlap(out, input)) fail(k.name, kOutOverlapsInput);
  if (weight && overlap(out, *weight)) fail(k.name, kOutOverlapsWeight);
  if (bias && overlap(out, *bias)) fail(k.name, kOutOverlapsBias);
}

// ----------------------------------------------------------------------------------------- arguments

Affine affine_of(const Tensor& t, ScalarType element) {
  Affine affine;
  affine.data = t.const_data_ptr();
  affine.kind = dtype_of(t) == element ? Affine::Kind::kElement : Affine::Kind::kFloat32;
  return affine;
}

Affine scalar_affine(double value) {
  Affine affine;
  affine.value = static_cast<float>(value);
  return affine;
}

// eps in the accumulate type, never rounded to zero: a constant row would come out as 0 * inf = NaN.
float eps_of(const KernelEntry& k, double eps) {
  const float smallest = k.accumulates_in_half ? 0x1p-24f : FLT_MIN;
  return eps > 0 ? std::max(static_cast<float>(eps), smallest) : static_cast<float>(eps);
}

// ------------------------------------------------------------------------------------------- running

void run(const KernelEntry& k, const Tensor& input, Affine weight, Affine bias, double eps, const Tensor& out) {
  const int64_t cols = input.size(input.dim() - 1);
  if (out.numel() == 0) return;
  const bool cuda = input.is_cuda();
  const int32_t device = cuda ? input.get_device_index() : -1;
  const CurrentDevice current(device);
  auto stride = row_stride(input, 1);
  const Tensor x = stride ? input : as_contiguous(input);
  const Rows rows{x.const_data_ptr(),
                  out.mutable_data_ptr(),
                  out.numel() / cols,
                  cols,
                  stride.value_or(cols),
                  weight,
                  bias,
                  eps_of(k, eps),
                  0};
  if (cuda) {
    if (const char* error = k.cuda(rows, device_facts(device), current_stream(device))) fail(k.name, "CUDA: ", error);
  } else {
    // Rows are independent; a grain of about 32k elements outweighs waking a thread.
    const int64_t grain = std::max<int64_t>(1, (1 << 15) / cols);
    torch::stable::parallel_for(0, rows.rows, grain, [&](int64_t begin, int64_t end) { k.cpu(rows, begin, end); });
  }
}

void run_affine(const KernelEntry& k, const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                double eps, const Tensor& out) {
  // The copies, if any, must outlive the launch call.
  const OptionalTensor w = weight ? OptionalTensor(as_contiguous(*weight)) : std::nullopt;
  const OptionalTensor b = bias ? OptionalTensor(as_contiguous(*bias)) : std::nullopt;
  run(k, input, w ? affine_of(*w, k.element) : scalar_affine(1), b ? affine_of(*b, k.element) : scalar_affine(0), eps,
      out);
}

// Tells autograd that `out` is about to change, as an in-place torch op would, so that a graph which
// saved its old value raises instead of using the new one. The stable ABI has no call for it; writing
// zero elements through a view, which shares the version counter, has that effect.
void bump_version(const Tensor& out) {
  const int64_t size = 0, stride = 1;
  AtenTensorHandle empty_view;
  FASTLN_CHECK_TORCH(aoti_torch_as_strided(out.get(), &size, &stride, &empty_view));
  const Tensor owner(empty_view);
  FASTLN_CHECK_TORCH(aoti_torch_zero_(empty_view));
}

// ------------------------------------------------------------------------------------------ overloads

void check(const KernelEntry& k, const Tensor& input) {
  check_input(k, input);
  if (input.is_cuda()) check_arch(k.name, input.get_device_index());
}

void check(const KernelEntry& k, const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias) {
  check(k, input);
  if (weight) check_affine(k, "weight", *weight, input);
  if (bias) check_affine(k, "bias", *bias, input);
}

void check(const KernelEntry& k, const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
           const Tensor& out) {
  check(k, input, weight, bias);
  check_out(k, out, input);
  check_overlap(k, out, input, weight, bias);
}

template <size_t kIndex>
Tensor layer_norm(Tensor input, OptionalTensor weight, OptionalTensor bias, double eps) {
  const KernelEntry& k = kKernels[kIndex];
  check(k, input, weight, bias);
  const Tensor out = empty_contiguous(input.sizes(), k.element, input);
  run_affine(k, input, weight, bias, eps, out);
  return out;
}

template <size_t kIndex>
Tensor layer_norm_scalar(Tensor input, double weight, double bias, double eps) {
  const KernelEntry& k = kKernels[kIndex];
  check(k, input);
  const Tensor out = empty_contiguous(input.sizes(), k.element, input);
  run(k, input, scalar_affine(weight), scalar_affine(bias), eps, out);
  return out;
}

template <size_t kIndex>
void layer_norm_out(Tensor input, OptionalTensor weight, OptionalTensor bias, double eps, Tensor out) {
  const KernelEntry& k = kKernels[kIndex];
  check(k, input, weight, bias, out);
  bump_version(out);
  run_affine(k, input, weight, bias, eps, out);
}

// ------------------------------------------------------------------------------------- negative bit

// torch resolves tensors with the negative bit for ops that have no kernel for them. It takes what an op returns for
// what was written to an `out`, and `.out` returns nothing: so this one does it, by way of a tensor without the bit.
template <size_t kIndex>
void negative_out(Tensor input, OptionalTensor weight, OptionalTensor bias, double eps, Tensor out) {
  using torch::stable::detail::from;
  const KernelEntry& k = kKernels[kIndex];
  check(k, input, weight, bias, out);
  const Tensor target = resolved(out);
  StableIValue stack[] = {from(resolved(input)), from(resolved(weight)), from(resolved(bias)), from(eps), from(target)};
  call_op(k.twin, "out", stack);
  // Without memory to tell it by, as for what torch.compile traces, it is copied in either case.
  if (memory_of(target) == nullptr || memory_of(target) != memory_of(out)) torch::stable::copy_(out, target);
}

// ------------------------------------------------------------------------------------- autograd gate

// The checks come before, because an error loses its text on the way back through the C interface.
template <typename... Args>
StableIValue call_twin(const KernelEntry& k, const char* overload, const Args&... args) {
  StableIValue stack[] = {torch::stable::detail::from(args)...};
  call_op(k.twin, overload, stack);
  return stack[0];
}

// The Python autograd op, which takes the kernel's index first.
template <typename... Args>
StableIValue call_python(size_t index, const char* overload, const Args&... args) {
  using torch::stable::detail::from;
  StableIValue stack[] = {from(static_cast<int64_t>(index)), from(args)...};
  check_torch(torch_call_dispatcher("fastln::_with_grad", overload, stack, TORCH_ABI_VERSION), kKernels[index].name);
  return stack[0];
}

template <typename Parameter>
StableIValue go_on(size_t index, const char* overload, const Tensor& input, const Parameter& weight,
                   const Parameter& bias, double eps) {
  const KernelEntry& k = kKernels[index];
  if (!is_for_python(input, weight, bias)) return call_twin(k, overload, input, weight, bias, eps);
  check_layouts(k, input, weight, bias);
  return call_python(index, overload, input, weight, bias, eps);
}

// Python returns no tensor where a derivative is to be taken that the op has no rule for.
Tensor result(size_t index, StableIValue returned) {
  const auto out = torch::stable::detail::to<Tensor>(returned);
  if (!out.defined()) fail(kKernels[index].name, kNoRule);
  return out;
}

template <size_t kIndex>
Tensor gate(Tensor input, OptionalTensor weight, OptionalTensor bias, double eps) {
  check(kKernels[kIndex], input, weight, bias);
  return result(kIndex, go_on(kIndex, "", input, weight, bias, eps));
}

template <size_t kIndex>
Tensor gate_scalar(Tensor input, double weight, double bias, double eps) {
  check(kKernels[kIndex], input);
  return result(kIndex, go_on(kIndex, "scalar", input, weight, bias, eps));
}

template <size_t kIndex>
void gate_out(Tensor input, OptionalTensor weight, OptionalTensor bias, double eps, Tensor out) {
  const KernelEntry& k = kKernels[kIndex];
  check(k, input, weight, bias, out);
  if (!is_for_python(input, weight, bias, out)) {
    call_twin(k, "out", input, weight, bias, eps, out);
    return;
  }
  check_layouts(k, input, weight, bias);
  // Fakes have no address to check the overlap by: Python compares the storages.
  // Told by number: only here can it be raised with its text.
  switch (torch::stable::detail::to<int64_t>(call_python(kIndex, "out", input, weight, bias, eps, out))) {
    case 0: return;
    case 1: fail(k.name, kOutRequiresGrad);
    case 2: fail(k.name, kOutOverlapsInput);
    case 3: fail(k.name, kOutOverlapsWeight);
    default: fail(k.name, kOutOverlapsBias);
  }
}

// -------------------------------------------------------------------------------------- registration

using Library = torch::stable::detail::StableLibrary;

constexpr const char* kSignature = "(Tensor input, Tensor? weight=None, Tensor? bias=None, float eps=1e-05) -> Tensor";
constexpr const char* kScalarSignature = ".scalar(Tensor input, float weight, float bias, float eps=1e-05) -> Tensor";
// Returns nothing: torch before 2.14 cannot functionalise a custom op whose return aliases `out`.
constexpr const char* kOutSignature =
    ".out(Tensor input, Tensor? weight=None, Tensor? bias=None, float eps=1e-05, *, Tensor(a!) out) -> ()";

template <typename F, size_t... kIndex>
void for_each_kernel(F f, std::index_sequence<kIndex...>) {
  (f(std::integral_constant<size_t, kIndex>{}), ...);
}
template <typename F>
void for_each_kernel(F f) {
  for_each_kernel(f, std::make_index_sequence<kKernelCount>{});
}

void define(Library& m) {
  for (const KernelEntry& k : kKernels)
    for (const std::string& name : {"fastln::" + std::string(k.name), std::string(k.twin)})
      for (const char* signature : {kSignature, kScalarSignature, kOutSignature}) m.def((name + signature).c_str());
  m.def("_with_grad(int kernel, Tensor input, Tensor? weight, Tensor? bias, float eps) -> Tensor");
  m.def("_with_grad.scalar(int kernel, Tensor input, float weight, float bias, float eps) -> Tensor");
  m.def("_with_grad.out(int kernel, Tensor input, Tensor? weight, Tensor? bias, float eps, Tensor(a!) out) -> int");
}

// Both names have the kernels: in inference mode dispatch skips the gate.
void implement(Library& m) {
  for_each_kernel([&](auto index) {
    constexpr size_t kIndex = decltype(index)::value;
    for (const std::string& op :
         {"fastln::" + std::string(kKernels[kIndex].name), std::string(kKernels[kIndex].twin)}) {
      m.impl(op.c_str(), TORCH_BOX(&layer_norm<kIndex>));
      m.impl((op + ".scalar").c_str(), TORCH_BOX(&layer_norm_scalar<kIndex>));
      m.impl((op + ".out").c_str(), TORCH_BOX(&layer_norm_out<kIndex>));
    }
  });
}

void implement_gate(Library& m) {
  for_each_kernel([&](auto index) {
    constexpr size_t kIndex = decltype(index)::value;
    const std::string op = kKernels[kIndex].name;
    m.impl(op.c_str(), TORCH_BOX(&gate<kIndex>));
    m.impl((op + ".scalar").c_str(), TORCH_BOX(&gate_scalar<kIndex>));
    m.impl((op + ".out").c_str(), TORCH_BOX(&gate_out<kIndex>));
  });
}

void implement_gate_for_nested(Library& m) {
  for_each_kernel([&](auto index) {
    constexpr size_t kIndex = decltype(index)::value;
    constexpr auto name = [] { return kKernels[kIndex].name; };
    constexpr auto plain = &ForNested<name, &gate<kIndex>>::refuse;
    constexpr auto scalar = &ForNested<name, &gate_scalar<kIndex>>::refuse;
    constexpr auto out = &ForNested<name, &gate_out<kIndex>>::refuse;
    const std::string op = kKernels[kIndex].name;
    m.impl(op.c_str(), TORCH_BOX(plain));
    m.impl((op + ".scalar").c_str(), TORCH_BOX(scalar));
    m.impl((op + ".out").c_str(), TORCH_BOX(out));
  });
}

void implement_negative(Library& m) {
  for_each_kernel([&](auto index) {
    constexpr size_t kIndex = decltype(index)::value;
    for (const char* op : {kKernels[kIndex].name, kKernels[kIndex].twin})
      m.impl((std::string(op) + ".out").c_str(), TORCH_BOX(&negative_out<kIndex>));
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fastln, m) { define(m); }
STABLE_TORCH_LIBRARY_IMPL(fastln, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(fastln, CUDA, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(fastln, Autograd, m) { implement_gate(m); }
STABLE_TORCH_LIBRARY_IMPL(fastln, AutogradNestedTensor, m) { implement_gate_for_nested(m); }
STABLE_TORCH_LIBRARY_IMPL(fastln, Negative, m) { implement_negative(m); }

}  // namespace fastln
