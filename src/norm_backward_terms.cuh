// What the sums of the backward have in common: what an element adds to them, and how rows are read without the ring.
#pragma once

#include "arith.cuh"
#include "vec.cuh"

namespace fastln {

// Adds to a row's sums of g = dy * weight and of g * xhat.
template <typename Acc>
__device__ __forceinline__ void add_to_row(Acc& g_sum, Acc& gx_sum, Acc dy, Acc weight, Acc xhat) {
  const Acc g = mul(dy, weight);
  g_sum = add(g_sum, g);
  gx_sum = fma(g, xhat, gx_sum);
}

// Adds to a column's gradients.
template <typename Acc>
__device__ __forceinline__ void add_to_column(Acc& dweight, Acc& dbias, Acc dy, Acc xhat) {
  dweight = fma(dy, xhat, dweight);
  dbias += dy;
}

// Columns col to col + kN of a row of x and of dy, kWhole by one access each; else those before `cols`, and zeros.
template <bool kWhole, typename Elem, int kN, typename Index>
__device__ __forceinline__ void load_both(Vec<Elem, kN>& x, Vec<Elem, kN>& dy, const Elem* x_row, const Elem* dy_row,
                                          Index col, Index cols) {
  x = dy = {};
  if constexpr (kWhole) {
    load_vec(x, x_row + col);
    load_vec(dy, dy_row + col);
  } else {
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      if (col + i >= cols) continue;
      set_item(x, i, x_row[col + i]);
      set_item(dy, i, dy_row[col + i]);
    }
  }
}

}  // namespace fastln
