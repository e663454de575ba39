// The forward of many rows of 16-bit elements that are words, or pairs of words, but no whole pieces (kWords and kPairs
// of norm_forward.cuh). Such a row costs more instructions than memory hides, and many of them are the same for every
// row: where its accesses lie, which of them there are, weight and bias. So the blocks are as many as are resident at
// once, and each group of threads walks over several rows, a grid apart. It holds weight and bias meanwhile, and has its
// next row on its way while it computes one. The additions are those of norm_forward(), in the same order, so the bits
// are the same.
//
// (float16 on an H200, norm_forward's time and this one's: 131072x300 58.5 us and 44.1, 524288x84 71.4 and 57.3,
// 262144x140 57.5 and 44.1, 32768x770 35.6 and 27.9, 8192x2052 22.5 and 19.9, 4096x4098 24.9 and 19.2, 4096x8196 39.6
// and 36.4. With shifts for rows that begin at odd elements it gained nothing: 131072x257 52.3 and 53.5. Those, and pairs in
// a part of a warp, norm_bundle() takes from compute capability 9.0 on.)
#pragma once

#include "norm_forward.cuh"
#include "norm_values.cuh"

namespace fastln {

// kWarps: as in norm_forward(). Accesses of x and of y are aligned.
template <typename Elem, int kPieces, RowLayout kRows, bool kWarps>
__global__ void __maxnreg__((walk_registers(kPieces))) norm_walk(const NormRows p) {
  using Acc = AccOf<Elem>;
  constexpr int kPiece = kMaxAccessBytes / static_cast<int>(sizeof(Elem));  // elements
  constexpr int kAccess = kAccessElements<Elem, kRows>, kCount = kPieces * kPiece / kAccess;
  using V = Vec<Elem, kAccess>;
  int64_t row, rows_apart;
  int t, lane, lanes;  // this thread's place in its group; in the group's part of the warp, of so many lanes
  if (p.threads > kWarp) {
    row = blockIdx.x;
    rows_apart = gridDim.x;
    t = threadIdx.x;
    lane = t % kWarp;
    lanes = kWarp;
  } else {
    const int groups = blockDim.x >> p.threads_log2;
    row = static_cast<int64_t>(blockIdx.x) * groups + (threadIdx.x >> p.threads_log2);
    rows_apart = static_cast<int64_t>(gridDim.x) * groups;
    t = lane = threadIdx.x & (p.threads - 1);
    lanes = p.threads;
  }
  if constexpr (kWarps) lanes = kWarp;
  const int cols = static_cast<int>(p.cols), whole = cols / kPiece * kPiece;  // columns, and those in pieces
  // Access j is at column first + j * step.
  const int first = ((t - lane) * kCount + lane) * kAccess, step = lanes * kAccess;
  int left = whole - first;
  const auto inside = [&](int j) { return j * step < left; };
  // What is left of the row behind its last piece: one element for each of the first threads.
  const bool has_tail = t < cols - whole;
  const int tail_at = whole + t - first;

  wait_for_previous_kernel();
  V weight[kCount], bias[kCount];
  Acc tail_scale = 1, tail_shift = 0;
  const auto load_param = [&](V(&param)[kCount], Acc& of_tail, const void* from, int otherwise) {
    const Elem* own = static_cast<const Elem*>(from) + first;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      param[j] = splat<Elem, kAccess>(otherwise);
      if (from && inside(j)) load_vec(param[j], own + j * step);
    }
    if (from && has_tail) of_tail = load_one(own + tail_at);
  };
  load_param(weight, tail_scale, p.weight, 1);
  load_param(bias, tail_shift, p.bias, 0);
  const Elem* x = opaque(static_cast<const Elem*>(p.x) + row * p.x_stride + first);  // this thread's part of [cols]
  Elem* y = opaque(static_cast<Elem*>(p.y) + row * p.cols + first);
  const int64_t x_step = rows_apart * p.x_stride, y_step = rows_apart * p.cols;

  __shared__ __align__(16) Acc partial[2][kMaxWarps];
  const BlockSum<Acc, 2> block(partial, p.threads > kWarp);
  const Acc per_col = p.per_col_as(Acc());

  V next[kCount];  // past the row, zeros
  Vec<Elem, 1> next_tail{};
  const auto fetch = [&] {
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      if (inside(j)) load_vec(next[j], x + j * step);
    if (has_tail) load_vec(next_tail, x + tail_at);
  };
#pragma unroll
  for (int j = 0; j < kCount; ++j) next[j] = V{};
  bool live = row < p.rows;
  if (live) fetch();

  // All lanes of a warp, and all warps of a block, go on as long as one has a row, for the shuffles and the barriers.
  while (__any_sync(0xffffffffu, live)) {
    left = opaque(left);  // what is derived from it stays out of registers between rows
    Acc v[kCount][kAccess], tail[1];
#pragma unroll
    for (int j = 0; j < kCount; ++j) unpack(v[j], next[j]);
    unpack(tail, next_tail);
    const bool goes_on = row + rows_apart < p.rows;
    x += x_step;
    if (goes_on) fetch();

    const Acc sum = add(sum_values<kPiece>(v), tail[0]);
    const Acc mean = mul(group_sum<kWarps, true, 0>(sum, p.threads, block), per_col);
    Acc squares = centre_values<kPiece>(v, mean, inside);
    tail[0] = sub(tail[0], mean);
    if (has_tail) squares = fma(tail[0], tail[0], squares);
    const Acc variance = group_sum<kWarps, true, 1>(mul(squares, per_col), p.threads, block);
    const Acc rstd = reciprocal_sqrt(add(variance, p.eps_as(Acc())));

    if (live) {
      if (t == 0 && p.mean) {
        static_cast<Acc*>(p.mean)[row] = mean;
        static_cast<Acc*>(p.rstd)[row] = mul(rstd, static_cast<Acc>(p.rstd_sign));
      }
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        Acc scale[kAccess], shift[kAccess];
        unpack(scale, opaque(weight[j]));
        unpack(shift, opaque(bias[j]));
#pragma unroll
        for (int i = 0; i < kAccess; ++i) v[j][i] = fma(mul(v[j][i], rstd), scale[i], shift[i]);
        V out;
        pack(out, v[j]);
        if (inside(j)) store_vec(y + j * step, out);
      }
      if (has_tail) store_one(y + tail_at, fma(mul(tail[0], rstd), tail_scale, tail_shift));
    }
    row += rows_apart;
    y += y_step;
    live = goes_on;
  }
}

}  // namespace fastln
