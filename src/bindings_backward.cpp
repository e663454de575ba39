// The torch side of fastln::layer_norm_bwd, the gradients of layer_norm as aten's native_layer_norm_backward has
// them. CUDA tensors get our kernels, CPU tensors aten's.
//
// Outputs that the mask leaves out are undefined tensors, which Python sees as None.
#include "autograd_gate.h"
#include "norm_launch.h"
#include "norm_ops.h"
#include "norm_tensors.h"

namespace fastln {
namespace {

constexpr const char* kOp = "layer_norm_bwd";

// What one call works on, checked. Which of the three gradients are wanted stands in `mask`, in the order of input,
// weight, bias.
struct Call {
  const Tensor &grad_out, &input;
  IntList shape;
  const Tensor &mean, &rstd;
  const OptionalTensor &weight, &bias;
  const std::vector<bool>& mask;

  int64_t cols() const { return row_length(input, shape.size()); }
  // The dtype of a parameter's gradient: the parameter's, or that of the sums where there is no parameter.
  ScalarType grad_type(const OptionalTensor& t) const { return t ? dtype_of(*t) : stats_type(input); }
};

// -------------------------------------------------------------------------------------------- checks

void check_stats(const char* what, const Tensor& t, const Tensor& input, int64_t rows) {
  if (t.numel() != rows) fail(kOp, "expected ", what, " of ", rows, " elements, one a row, got ", t.numel());
  if (dtype_of(t) != stats_type(input))
    fail(kOp, "expected ", what, " of dtype ", dtype_name(stats_type(input)), ", got ", dtype_name(dtype_of(t)));
  check_on_device(kOp, what, t, input);
}

void check(const Call& c) {
  if (c.mask.size() != 3) fail(kOp, "expected output_mask of 3 booleans, got ", c.mask.size());
  check_norm(kOp, c.input, c.shape, c.weight, c.bias);
  const auto sizes = c.input.sizes(), got = c.grad_out.sizes();
  if (!std::equal(sizes.begin(), sizes.end(), got.begin(), got.end()))
    fail(kOp, "expected grad_out of shape ", list_text(sizes), ", got ", list_text(got));
  if (dtype_of(c.grad_out) != dtype_of(c.input))
    fail(kOp, "expected grad_out of dtype ", dtype_name(dtype_of(c.input)), ", got ", dtype_name(dtype_of(c.grad_out)));
  check_on_device(kOp, "grad_out", c.grad_out, c.input);
  int64_t rows = 1;
  for (size_t d = 0; d < sizes.size() - c.shape.size(); ++d) rows *= sizes[d];
  check_stats("mean", c.mean, c.input, rows);
  check_stats("rstd", c.rstd, c.input, rows);
}

// --------------------------------------------------------------------------------------------- CUDA

BackwardLauncher launcher(ScalarType element, ScalarType param) {
  const bool wide = param == ScalarType::Float;
  switch (element) {
    case ScalarType::Half: return wide ? norm_backward_f16_f32 : norm_backward_f16_f16;
    case ScalarType::BFloat16: return wide ? norm_backward_bf16_f32 : norm_backward_bf16_bf16;
    case ScalarType::Float: return norm_backward_f32_f32;
    default: return norm_backward_f64_f64;
  }
}

// The dtype in which the kernel reads the weight and writes dweight and dbias, so that none is rounded twice.
ScalarType kernel_type(const Call& c) {
  const ScalarType own = dtype_of(c.input);
  const bool reads_own = !c.mask[0] || is_own(c.weight, c.input);
  const bool writes_own = (!c.mask[1] || c.grad_type(c.weight) == own) && (!c.mask[2] || c.grad_type(c.bias) == own);
  return param_type(c.input, reads_own && writes_own);
}

void run_cuda(const Call& c, ScalarType type, const OptionalTensor& dx, const OptionalTensor& dweight,
              const OptionalTensor& dbias) {
  const int32_t device = c.input.get_device_index();
  const CurrentDevice current(device);
  const size_t row_dims = c.shape.size();
  // The copies, if any, outlive the launch call.
  const auto dy_stride = row_stride(c.grad_out, row_dims), x_stride = row_stride(c.input, row_dims);
  const Tensor dy = dy_stride ? c.grad_out : as_contiguous(c.grad_out);
  const Tensor x = x_stride ? c.input : as_contiguous(c.input);
  const Tensor mean = as_contiguous(c.mean), rstd = as_contiguous(c.rstd);
  const OptionalTensor weight = c.mask[0] ? ready_whole(c.weight, type) : std::nullopt;
  const auto written = [](const OptionalTensor& t) { return t ? t->mutable_data_ptr() : nullptr; };
  NormGrads grads{};
  grads.dy = dy.const_data_ptr();
  grads.x = x.const_data_ptr();
  grads.mean = mean.const_data_ptr();
  grads.rstd = rstd.const_data_ptr();
  grads.weight = data_of(weight);
  grads.dx = written(dx);
  grads.dweight = written(dweight);
  grads.dbias = written(dbias);
  grads.cols = c.cols();
  grads.rows = c.input.numel() / grads.cols;
  grads.dy_stride = dy_stride.value_or(grads.cols);
  grads.x_stride = x_stride.value_or(grads.cols);

  const DeviceFacts& facts = device_facts(device);
  const int element_bytes = static_cast<int>(c.input.element_size());
  const BackwardPlan plan = plan_backward(grads.rows, grads.cols, element_bytes, grads.dx, grads.dweight || grads.dbias,
                                          facts, backward_max_cluster(facts));
  // Ragged rows are read where they lie; those of whole pieces must begin at such. The copies outlive the launch call.
  Tensor aligned_x = x, aligned_dy = dy;
  if (!rows_are_ragged(grads.cols, element_bytes, plan.piece_bytes)) {
    align_rows(aligned_x, grads.x, grads.x_stride, grads.rows, grads.cols, plan.piece_bytes);
    align_rows(aligned_dy, grads.dy, grads.dy_stride, grads.rows, grads.cols, plan.piece_bytes);
  }

  // From torch's allocator: what it hands out belongs to the current stream, or to the graph being captured.
  const int64_t bytes = backward_workspace_bytes(grads, plan, element_bytes, facts);
  OptionalTensor workspace;
  if (bytes > 0) workspace = empty_contiguous({&bytes, 1}, ScalarType::Byte, c.input);
  const char* error = launcher(dtype_of(c.input), type)(
      grads, plan, facts, workspace ? workspace->mutable_data_ptr() : nullptr, current_stream(device));
  if (error) fail(kOp, "CUDA: ", error);
}

}  // namespace

Triple layer_norm_bwd_cuda(Tensor grad_out, Tensor input, std::vector<int64_t> shape, Tensor mean, Tensor rstd,
                           OptionalTensor weight, OptionalTensor bias, std::vector<bool> mask) {
  const Call c{grad_out, input, shape, mean, rstd, weight, bias, mask};
  check(c);
  const ScalarType type = kernel_type(c);
  OptionalTensor dx, dweight, dbias;
  if (mask[0]) dx = empty_contiguous(input.sizes(), dtype_of(input), input);
  if (mask[1]) dweight = empty_contiguous(shape, type, input);
  if (mask[2]) dbias = empty_contiguous(shape, type, input);
  if (input.numel() == 0) {
    for (const OptionalTensor* t : {&dweight, &dbias})
      if (*t) FASTLN_CHECK_TORCH(aoti_torch_zero_((*t)->get()));
  } else if (dx || dweight || dbias) {
    run_cuda(c, type, dx, dweight, dbias);
  }
  return {dx ? *dx : Tensor(), dweight ? in_dtype(*dweight, c.grad_type(weight)) : Tensor(),
          dbias ? in_dtype(*dbias, c.grad_type(bias)) : Tensor()};
}

namespace {

// ---------------------------------------------------------------------------------------------- CPU

// aten's kernel in the dtype of the sums: in float16 and bfloat16 it adds up dweight and dbias in that dtype, and
// past 256 bfloat16 counts no further. It multiplies x and mean by rstd before it subtracts one from the other,
// which leaves little of a row far from zero, so the rows are centred before.
Triple layer_norm_bwd_cpu(Tensor grad_out, Tensor input, std::vector<int64_t> shape, Tensor mean, Tensor rstd,
                          OptionalTensor weight, OptionalTensor bias, std::vector<bool> mask) {
  const Call c{grad_out, input, shape, mean, rstd, weight, bias, mask};
  check(c);
  const ScalarType type = stats_type(input);
  auto stats_sizes = input.sizes().vec();
  std::fill(stats_sizes.end() - shape.size(), stats_sizes.end(), 1);
  const Tensor zero = empty_contiguous(stats_sizes, type, input);
  FASTLN_CHECK_TORCH(aoti_torch_zero_(zero.get()));
  const bool has_sizes = std::equal(stats_sizes.begin(), stats_sizes.end(), mean.sizes().begin(), mean.sizes().end());
  const Tensor row_means = has_sizes ? mean : torch::stable::reshape(mean, stats_sizes);
  const Tensor centred = torch::stable::subtract(in_dtype(input, type), row_means);
  // Also in the place of bias, of which aten asks the dtype alone.
  const Tensor w = weight ? *ready(weight, type) : torch::stable::fill_(empty_contiguous(shape, type, input), 1);
  const auto [dx, dweight, dbias] =
      call_backward(kAtenBackward, in_dtype(grad_out, type), centred, shape, zero, as_contiguous(rstd), w, w, mask);
  return {mask[0] ? in_dtype(dx, dtype_of(input)) : dx, mask[1] ? in_dtype(dweight, c.grad_type(weight)) : dweight,
          mask[2] ? in_dtype(dbias, c.grad_type(bias)) : dbias};
}

// --------------------------------------------------------------------------------------------- gate

Triple gate(Tensor grad_out, Tensor input, std::vector<int64_t> shape, Tensor mean, Tensor rstd, OptionalTensor weight,
            OptionalTensor bias, std::vector<bool> mask) {
  check({grad_out, input, shape, mean, rstd, weight, bias, mask});
  const bool to_python = is_for_python(grad_out, input, mean, rstd, weight, bias);
  if (to_python) {
    check_layouts(kOp, input, weight, bias);
    check_layout(kOp, "grad_out", grad_out);
    check_layout(kOp, "mean", mean);
    check_layout(kOp, "rstd", rstd);
  }
  return call_backward(to_python ? "fastln::_layer_norm_bwd_with_grad" : "fastln::_layer_norm_bwd", grad_out, input,
                       shape, mean, rstd, weight, bias, mask);
}

// -------------------------------------------------------------------------------------- registration

STABLE_TORCH_LIBRARY_FRAGMENT(fastln, m) {
  define_gated(m, "layer_norm_bwd", "_with_grad",
               "(Tensor grad_out, Tensor input, SymInt[] normalized_shape, Tensor mean, Tensor rstd,"
               " Tensor? weight, Tensor? bias, bool[3] output_mask) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(fastln, CUDA, m) { implement_gated(m, "layer_norm_bwd", TORCH_BOX(&layer_norm_bwd_cuda)); }
STABLE_TORCH_LIBRARY_IMPL(fastln, CPU, m) { implement_gated(m, "layer_norm_bwd", TORCH_BOX(&layer_norm_bwd_cpu)); }
STABLE_TORCH_LIBRARY_IMPL(fastln, Autograd, m) { m.impl("layer_norm_bwd", TORCH_BOX(&gate)); }
STABLE_TORCH_LIBRARY_IMPL(fastln, AutogradNestedTensor, m) {
  constexpr auto refuse = &ForNested<[] { return kOp; }, &gate>::refuse;
  m.impl("layer_norm_bwd", TORCH_BOX(refuse));
}

}  // namespace
}  // namespace fastln
