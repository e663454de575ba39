// What one launch of the general kernels works on. Plain data, no torch and no CUDA type.
#pragma once

#include <cstdint>

namespace fastln {

struct NormRows {
  const void* x;       // [rows, cols], element stride 1 along cols, `x_stride` elements from row to row
  void* y;             // [rows, cols], contiguous
  void* mean;          // [rows] of the accumulate type, or null together with rstd
  void* rstd;          // [rows]
  const void* weight;  // [cols] of the parameter type, or null for 1
  const void* bias;    // [cols], or null for 0
  int64_t rows;
  int64_t cols;
  int64_t x_stride;
  double eps;
  double per_col;          // 1 / cols
  float eps_f, per_col_f;  // the same for sums in float: a kernel would wait for the conversion
  float rstd_sign;         // 1, or -1 to write -rstd for a tensor with torch's negative bit
  int threads;             // of a row's group within a block: a power of two up to 32, or whole warps
  int threads_log2;        // of `threads`, where it is a power of two
  int cluster;             // blocks that share a row

  constexpr double eps_as(double) const { return eps; }
  constexpr float eps_as(float) const { return eps_f; }
  constexpr double per_col_as(double) const { return per_col; }
  constexpr float per_col_as(float) const { return per_col_f; }
};

// The backward of the same rows. With xhat = (x - mean) * rstd and g = dy * weight:
//   dx = rstd * (g - average(g) - xhat * average(g * xhat)),  dweight = sum of dy * xhat over the rows,
//   dbias = sum of dy over the rows.
struct NormGrads {
  const void* dy;      // [rows, cols], element stride 1 along cols, `dy_stride` elements from row to row
  const void* x;       // [rows, cols], likewise with `x_stride`
  const void* mean;    // [rows] of the accumulate type
  const void* rstd;    // [rows], or their negatives
  const void* weight;  // [cols] of the parameter type, or null for 1
  void* dx;            // [rows, cols], contiguous, or null if not asked for
  void* dweight;       // [cols] of the parameter type, or null
  void* dbias;         // [cols] of the parameter type, or null
  int64_t rows;
  int64_t cols;
  int64_t dy_stride;
  int64_t x_stride;
};

// What norm_backward() works on, next to the pointers.
struct BackwardLaunch : NormGrads {
  void* partial;      // [blocks of a column slice, 2, pitch] of the accumulate type: dweight, dbias; or null
  const void* sums;   // [rows, 2] of the accumulate type: averages of g and of g * xhat; or null to compute them
  int64_t pitch;      // columns of a partial sum, a multiple of 8
  int64_t slice;      // columns of a row that a block (a cluster) takes: all, or those of one of several slices
  int blocks;         // that walk over the rows of a slice, side by side
  int64_t safe_rows;  // rows before this can be read in whole granules
  int column_blocks;  // before those, that sum columns
  double per_col;     // 1 / cols
  float per_col_f;
  int threads;        // of a row's group within a block: a power of two up to 32, or a multiple of 32
  int cluster;        // blocks that share a row
  int sharing;        // blocks of a cluster, each at rows of its own, that add up their partial sums; 1 for none
  int column_pieces;  // of 16 bytes, side by side, that a block sums of columns takes: a power of two up to 32
  int column_split;   // blocks of a cluster, each at rows of its own, that share those
  int stages;         // of the ring, 1 to kMaxStages

  constexpr double per_col_as(double) const { return per_col; }
  constexpr float per_col_as(float) const { return per_col_f; }
};

}  // namespace fastln
