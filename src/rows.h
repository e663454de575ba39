// What one launch works on. Plain data, no torch and no CUDA type, shared by the GPU and CPU kernels.
#pragma once

#include <cstdint>

namespace fastln {

// weight or bias: one number for every column, or a vector of `cols` numbers.
struct Affine {
  enum class Kind : int32_t {
    kScalar,   // `value` for every column (an absent weight is 1, an absent bias is 0)
    kElement,  // data: [cols] of the input's element type
    kFloat32,  // data: [cols] of float
  };
  const void* data = nullptr;
  float value = 0;
  Kind kind = Kind::kScalar;
};

// y = (x - mean) * rstd * weight + bias over each row.
struct Rows {
  const void* x;  // [rows, cols], element stride 1 along cols, `x_stride` elements from row to row
  void* y;        // [rows, cols], contiguous; may be x itself when x is contiguous
  int64_t rows;
  int64_t cols;
  int64_t x_stride;
  Affine weight;
  Affine bias;
  float eps;
  float per_col;  // 1 / cols
};

}  // namespace fastln
