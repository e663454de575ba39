// What the ops' Autograd kernels in C++, the gates (bindings_norm.cpp, bindings_backward.cpp, bindings_named.cpp), ask
// before they go on to the op's private twin, below autograd: whether something is under way that only Python serves.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "tensors.h"

// Two questions that the stable ABI has no function for. Weak, as a later torch may not have these either: then every
// call goes to Python, which takes longer and is right.
namespace torch::autograd {
struct ForwardADLevel {
  // The level of forward-mode differentiation with that number, if somebody has entered it. There is but one, 0.
  __attribute__((weak, visibility("default"))) static std::shared_ptr<ForwardADLevel> try_get_by_idx(uint64_t index);
};
}  // namespace torch::autograd

namespace c10::impl {
struct TorchDispatchModeTLS {
  // How many modes, such as FakeTensorMode, see this thread's ops.
  __attribute__((weak, visibility("default"))) static int64_t stack_len();
};
}  // namespace c10::impl

namespace fastln {

inline bool in_dual_level() {
  constexpr auto level = &torch::autograd::ForwardADLevel::try_get_by_idx;
  return level == nullptr || level(0) != nullptr;
}

// Such a mode is to see the op itself, not its twin.
inline bool in_dispatch_mode() {
  constexpr auto count = &c10::impl::TorchDispatchModeTLS::stack_len;
  return count == nullptr || count() > 0;
}

// Some tensors without memory are those of torch.func, whose derivative is taken without grad mode too, and some are to
// see the op itself, as a mode does. (Those without elements are neither, and go along with them.)
inline bool is_plain(const Tensor& t) { return memory_of(t) != nullptr; }
inline bool is_plain(const OptionalTensor& t) { return !t || is_plain(*t); }
inline bool is_plain(double) { return true; }

// Forward mode differentiates without grad mode too.
template <typename... Arguments>
bool is_for_python(const Arguments&... arguments) {
  return aoti_torch_grad_mode_is_enabled() || in_dual_level() || in_dispatch_mode() || !(is_plain(arguments) && ...);
}

// What torch calls in the place of a gate where an argument is a nested tensor, whose sizes and memory C++ must not ask
// for. kName gives the op's name.
template <auto kName, auto kGate>
struct ForNested;
template <auto kName, typename Result, typename... Arguments, Result (*kGate)(Arguments...)>
struct ForNested<kName, kGate> {
  static Result refuse(Arguments...) { fail(kName(), "expected tensors that are not nested, got a nested one"); }
};

// The op, its private twin, and the op that its gate calls in Python, all of one signature.
template <typename Library>
void define_gated(Library& m, const std::string& op, const std::string& in_python, const std::string& signature) {
  for (const std::string& name : {op, "_" + op, "_" + op + in_python}) m.def((name + signature).c_str());
}

// A device's kernel behind the op and its twin: in inference mode dispatch skips the gate.
template <typename Library, typename Kernel>
void implement_gated(Library& m, const std::string& op, Kernel kernel) {
  for (const std::string& name : {op, "_" + op}) m.impl(name.c_str(), kernel);
}

}  // namespace fastln
