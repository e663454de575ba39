// What the bindings of the general ops share: checks of their arguments, and parameters as the kernels take them.
// Included by bindings_norm.cpp and bindings_backward.cpp alone.
#pragma once

#include <algorithm>
#include <vector>

#include "aligned.h"
#include "tensors.h"

namespace fastln {

// -------------------------------------------------------------------------------------------- checks

inline bool is_floating(ScalarType type) {
  return type == ScalarType::Half || type == ScalarType::BFloat16 || type == ScalarType::Float ||
         type == ScalarType::Double;
}

inline void check_on_device(const char* op, const char* what, const Tensor& t, const Tensor& input) {
  if (!on_same_device(t, input)) fail(op, "expected ", what, " on ", device_text(input), ", got ", device_text(t));
}

inline void check_affine(const char* op, const char* what, const OptionalTensor& t, const Tensor& input,
                         IntList shape) {
  if (!t) return;
  const auto got = t->sizes();
  if (!std::equal(shape.begin(), shape.end(), got.begin(), got.end()))
    fail(op, "expected ", what, " of shape ", list_text(shape), ", got ", list_text(got));
  if (!is_floating(dtype_of(*t)))
    fail(op, "expected ", what, " of dtype float16, bfloat16, float32 or float64, got ", dtype_name(dtype_of(*t)));
  check_on_device(op, what, *t, input);
}

inline void check_norm(const char* op, const Tensor& input, IntList shape, const OptionalTensor& weight,
                       const OptionalTensor& bias) {
  if (!is_floating(dtype_of(input)))
    fail(op, "expected input of dtype float16, bfloat16, float32 or float64, got ", dtype_name(dtype_of(input)));
  if (shape.size() == 0) fail(op, "expected normalized_shape of at least 1 dimension, got []");
  const auto sizes = input.sizes();
  if (sizes.size() < shape.size() || !std::equal(shape.begin(), shape.end(), sizes.end() - shape.size()))
    fail(op, "expected input whose last dimensions are normalized_shape ", list_text(shape), ", got shape ",
         list_text(sizes));
  check_affine(op, "weight", weight, input, shape);
  check_affine(op, "bias", bias, input, shape);
  if (input.is_cuda()) check_arch(op, input.get_device_index());
}

// For arguments that may be of any layout.
inline void check_layouts(const char* op, const Tensor& input, const OptionalTensor& weight,
                          const OptionalTensor& bias) {
  check_layout(op, "input", input);
  check_layout(op, "weight", weight);
  check_layout(op, "bias", bias);
}

// ---------------------------------------------------------------------------------------- arguments

// The dtype of mean and rstd, and of every sum.
inline ScalarType stats_type(const Tensor& input) {
  return dtype_of(input) == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// The dtype in which the kernels and aten take parameters beside the input's: the input's own where all of
// them have it, else the one of the statistics. The usual model converts nothing.
inline ScalarType param_type(const Tensor& input, bool all_own) {
  return all_own ? dtype_of(input) : stats_type(input);
}

inline bool is_own(const OptionalTensor& t, const Tensor& input) { return !t || dtype_of(*t) == dtype_of(input); }

inline Tensor in_dtype(const Tensor& t, ScalarType type) {
  return dtype_of(t) == type ? t : torch::stable::to(t, type);
}

// Contiguous, in that dtype.
inline OptionalTensor ready(const OptionalTensor& t, ScalarType type) {
  return t ? OptionalTensor(as_contiguous(in_dtype(*t, type))) : t;
}

// Whether 16-byte accesses from the first element on are aligned.
inline bool is_whole(const Tensor& t) { return is_aligned(t.const_data_ptr()); }

// Contiguous, in that dtype, beginning at a multiple of 16 bytes.
inline OptionalTensor ready_whole(const OptionalTensor& t, ScalarType type) {
  const OptionalTensor out = ready(t, type);
  return !out || is_whole(*out) ? out : OptionalTensor(torch::stable::clone(*out));
}

// A copy of the rows in place of them, unless each begins at a multiple of `bytes`.
inline void align_rows(Tensor& t, const void*& data, int64_t& stride, int64_t rows, int64_t cols,
                       int64_t bytes = kMaxAccessBytes) {
  if (rows_are_aligned(data, rows, stride * static_cast<int64_t>(t.element_size()), bytes)) return;
  const Tensor whole = as_contiguous(t);
  t = whole.const_data_ptr() == data ? torch::stable::clone(whole) : whole;
  data = t.const_data_ptr();
  stride = cols;
}

inline const void* data_of(const OptionalTensor& t) { return t ? t->const_data_ptr() : nullptr; }

// Elements of a row, which is the last `row_dims` dimensions.
inline int64_t row_length(const Tensor& t, size_t row_dims) {
  const auto sizes = t.sizes();
  int64_t cols = 1;
  for (size_t d = sizes.size() - row_dims; d < sizes.size(); ++d) cols *= sizes[d];
  return cols;
}

}  // namespace fastln
