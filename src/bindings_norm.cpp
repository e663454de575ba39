// The torch side of the general op, fastln::layer_norm, and of layer_norm_fwd beneath it, which also
// returns the statistics. CUDA tensors get our kernels, CPU tensors aten's.
//
// As with the named ops (bindings_named.cpp), their Autograd kernels are gates (autograd_gate.h): where there is nothing
// to differentiate they go on to the private twin in C++, else to the autograd of fastln/_autograd.py.
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstdlib>

#include "autograd_gate.h"
#include "norm_launch.h"
#include "norm_ops.h"
#include "norm_tensors.h"
#include "tuning.h"

namespace fastln {
namespace {

constexpr const char* kOp = "layer_norm";
constexpr const char* kFwd = "layer_norm_fwd";

// Leading dimensions of the input, then ones: the shape that aten gives mean and rstd.
std::vector<int64_t> stats_sizes(const Tensor& input, size_t row_dims) {
  const auto sizes = input.sizes();
  std::vector<int64_t> out(sizes.begin(), sizes.end());
  std::fill(out.end() - row_dims, out.end(), 1);
  return out;
}

// ------------------------------------------------------------------------------------------ the plan

// A plan to use instead of plan()'s wherever it can hold the row, for tests and tuning; negative pieces for none. In one
// word: threads read it while another one may write.
struct ForcedPlan {
  int16_t pieces = -1, cluster = 1;
  int32_t threads = 0;
};
std::atomic<ForcedPlan> forced_plan;
static_assert(decltype(forced_plan)::is_always_lock_free);

Plan plan_for(int64_t cols, int element_bytes, int max_cluster, bool wide_blocks) {
  const Plan own = plan(cols, element_bytes, max_cluster, wide_blocks);
  const auto [pieces, cluster, threads] = forced_plan.load(std::memory_order_relaxed);
  if (pieces < 0) return own;
  const Plan forced{pieces, threads, cluster};
  const bool shifted = cols * element_bytes % 16 != 0;
  const bool holds = static_cast<int64_t>(forced.pieces) * forced.threads * forced.cluster >= cols * element_bytes / 16;
  const bool fits = (wide_blocks || forced.threads <= 512) && forced.cluster <= max_cluster &&
                    (!is_long_block(forced) || holds_long_blocks(element_bytes, max_cluster, wide_blocks));
  const bool runs =
      !shifted || (forced.cluster == 1 && forced.pieces != 5 && forced.threads <= shifted_max_threads(forced.pieces) &&
                   forced.threads >= cols * element_bytes % 16 / element_bytes);
  return forced.pieces == 0 || (holds && fits && runs) ? forced : own;
}

// --------------------------------------------------------------------------------------------- CUDA

ForwardLauncher launcher(ScalarType element, ScalarType param) {
  const bool wide = param == ScalarType::Float;
  switch (element) {
    case ScalarType::Half: return wide ? norm_forward_f16_f32 : norm_forward_f16_f16;
    case ScalarType::BFloat16: return wide ? norm_forward_bf16_f32 : norm_forward_bf16_bf16;
    case ScalarType::Float: return norm_forward_f32_f32;
    default: return norm_forward_f64_f64;
  }
}

void run_cuda(const char* op, const Tensor& input, size_t row_dims, const OptionalTensor& weight,
              const OptionalTensor& bias, double eps, const Tensor& out, const Tensor* mean, const Tensor* rstd,
              int rstd_sign = 1) {
  const int64_t cols = row_length(input, row_dims);
  const int64_t count = out.numel();
  if (count == 0) return;
  const int32_t device = input.get_device_index();
  const CurrentDevice current(device);
  const DeviceFacts& facts = device_facts(device);

  const Plan how =
      plan_for(cols, static_cast<int>(input.element_size()), forward_max_cluster(facts), wide_blocks_fit(facts));
  // The copies, if any, outlive the launch call.
  const auto stride = row_stride(input, row_dims);
  Tensor x = stride ? input : as_contiguous(input);
  const ScalarType type = param_type(input, is_own(weight, input) && is_own(bias, input));
  const OptionalTensor w = ready_whole(weight, type), b = ready_whole(bias, type);
  NormRows rows{};
  rows.x = x.const_data_ptr();
  rows.y = out.mutable_data_ptr();
  rows.mean = mean ? mean->mutable_data_ptr() : nullptr;
  rows.rstd = rstd ? rstd->mutable_data_ptr() : nullptr;
  rows.rstd_sign = static_cast<float>(rstd_sign);
  rows.weight = data_of(w);
  rows.bias = data_of(b);
  rows.rows = count / cols;
  rows.cols = cols;
  rows.x_stride = stride.value_or(cols);
  const bool whole_rows_only = how.cluster > 1 || how.threads > shifted_max_threads(how.pieces);
  if (whole_rows_only) align_rows(x, rows.x, rows.x_stride, rows.rows, cols);
  // Never rounded to zero: a constant row would come out as 0 * inf = NaN.
  rows.eps = eps > 0 ? std::max(eps, static_cast<double>(FLT_MIN)) : eps;

  OptionalTensor workspace;
  if (how.pieces == 0) {
    const int64_t values = split_workspace_values(rows.rows, cols, static_cast<int64_t>(input.element_size()));
    workspace = empty_contiguous({&values, 1}, stats_type(input), input);
  }
  const char* error = launcher(dtype_of(input), type)(
      rows, how, facts, workspace ? workspace->mutable_data_ptr() : nullptr, current_stream(device));
  if (error) fail(op, "CUDA: ", error);
}

Tensor layer_norm_cuda(Tensor input, std::vector<int64_t> shape, OptionalTensor weight, OptionalTensor bias,
                       double eps) {
  check_norm(kOp, input, shape, weight, bias);
  const Tensor out = empty_contiguous(input.sizes(), dtype_of(input), input);
  run_cuda(kOp, input, shape.size(), weight, bias, eps, out, nullptr, nullptr);
  return out;
}

}  // namespace

Triple layer_norm_fwd_cuda(const char* op, const Tensor& input, IntList shape, const OptionalTensor& weight,
                           const OptionalTensor& bias, double eps, int rstd_sign) {
  check_norm(op, input, shape, weight, bias);
  const Tensor out = empty_contiguous(input.sizes(), dtype_of(input), input);
  const auto sizes = stats_sizes(input, shape.size());
  const Tensor mean = empty_contiguous(sizes, stats_type(input), input);
  const Tensor rstd = empty_contiguous(sizes, stats_type(input), input);
  if (out.numel() == 0) {  // no columns: aten's statistics of nothing
    torch::stable::fill_(mean, 0);
    torch::stable::fill_(rstd, std::nan(""));
  }
  run_cuda(op, input, shape.size(), weight, bias, eps, out, &mean, &rstd, rstd_sign);
  return {out, mean, rstd};
}

namespace {

Triple layer_norm_fwd(Tensor input, std::vector<int64_t> shape, OptionalTensor weight, OptionalTensor bias,
                      double eps) {
  return layer_norm_fwd_cuda(kFwd, input, shape, weight, bias, eps, 1);
}

// ---------------------------------------------------------------------------------------------- CPU

Tensor layer_norm_cpu(Tensor input, std::vector<int64_t> shape, OptionalTensor weight, OptionalTensor bias,
                      double eps) {
  check_norm(kOp, input, shape, weight, bias);
  const ScalarType type = param_type(input, is_own(weight, input) && is_own(bias, input));
  return std::get<0>(call_forward(kAtenForward, input, shape, ready(weight, type), ready(bias, type), eps));
}

// Parameters in float32 beside float16 or bfloat16 make aten keep the statistics in float32 too, as ours are on
// both devices; the output has the same bits.
Triple layer_norm_fwd_cpu(Tensor input, std::vector<int64_t> shape, OptionalTensor weight, OptionalTensor bias,
                          double eps) {
  check_norm(kFwd, input, shape, weight, bias);
  const ScalarType type = stats_type(input);
  if (!weight && type != dtype_of(input)) {
    weight = empty_contiguous(shape, type, input);
    torch::stable::fill_(*weight, 1);
  }
  return call_forward(kAtenForward, input, shape, ready(weight, type), ready(bias, type), eps);
}

// --------------------------------------------------------------------------------------------- gate

Tensor gate(Tensor input, std::vector<int64_t> shape, OptionalTensor weight, OptionalTensor bias, double eps) {
  using torch::stable::detail::from;
  // Before: an error loses its text on the way back through the C interface.
  check_norm(kOp, input, shape, weight, bias);
  const bool to_python = is_for_python(input, weight, bias);
  if (to_python) check_layouts(kOp, input, weight, bias);
  const char* op = to_python ? "fastln::_layer_norm_with_grad" : "fastln::_layer_norm";
  StableIValue stack[] = {from(input), from(IntList(shape)), from(weight), from(bias), from(eps)};
  call_op(op, "", stack);
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Triple gate_fwd(Tensor input, std::vector<int64_t> shape, OptionalTensor weight, OptionalTensor bias, double eps) {
  check_norm(kFwd, input, shape, weight, bias);
  const bool to_python = is_for_python(input, weight, bias);
  if (to_python) check_layouts(kFwd, input, weight, bias);
  return call_forward(to_python ? "fastln::_layer_norm_fwd_with_grad" : "fastln::_layer_norm_fwd", input, shape, weight,
                      bias, eps);
}

// -------------------------------------------------------------------------------------- registration

STABLE_TORCH_LIBRARY_FRAGMENT(fastln, m) {
  define_gated(
      m, "layer_norm", "_with_grad",
      "(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1e-05) -> Tensor");
  define_gated(m, "layer_norm_fwd", "_with_grad",
               "(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps)"
               " -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(fastln, CUDA, m) {
  implement_gated(m, "layer_norm", TORCH_BOX(&layer_norm_cuda));
  implement_gated(m, "layer_norm_fwd", TORCH_BOX(&layer_norm_fwd));
}

STABLE_TORCH_LIBRARY_IMPL(fastln, CPU, m) {
  implement_gated(m, "layer_norm", TORCH_BOX(&layer_norm_cpu));
  implement_gated(m, "layer_norm_fwd", TORCH_BOX(&layer_norm_fwd_cpu));
}

STABLE_TORCH_LIBRARY_IMPL(fastln, Autograd, m) {
  m.impl("layer_norm", TORCH_BOX(&gate));
  m.impl("layer_norm_fwd", TORCH_BOX(&gate_fwd));
}

STABLE_TORCH_LIBRARY_IMPL(fastln, AutogradNestedTensor, m) {
  constexpr auto refuse = &ForNested<[] { return kOp; }, &gate>::refuse;
  constexpr auto refuse_fwd = &ForNested<[] { return kFwd; }, &gate_fwd>::refuse;
  m.impl("layer_norm", TORCH_BOX(refuse));
  m.impl("layer_norm_fwd", TORCH_BOX(refuse_fwd));
}

}  // namespace

// For fastln.plan(): writes pieces, threads and cluster for rows of `cols` elements.
extern "C" __attribute__((visibility("default"))) void fastln_plan(int64_t cols, int element_bytes, int max_cluster,
                                                                   int wide_blocks, int32_t* out) {
  const Plan how = plan_for(cols, element_bytes, max_cluster, wide_blocks != 0);
  const int32_t values[] = {how.pieces, how.threads, how.cluster};
  std::copy(std::begin(values), std::end(values), out);
}

// Forces a plan on every row that it can hold; negative pieces end that.
extern "C" __attribute__((visibility("default"))) void fastln_force_plan(int pieces, int threads, int cluster) {
  forced_plan.store({static_cast<int16_t>(pieces), static_cast<int16_t>(cluster), threads}, std::memory_order_relaxed);
}

}  // namespace fastln
