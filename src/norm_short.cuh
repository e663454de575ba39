// The forward of short rows while all of them are resident at once. Then nothing hides what a row costs in instructions
// and in latency, so this kernel asks nothing: rows are full (norm_forward.cuh) and belong to a warp or a part of one.
// Each group takes two of them, for which it fetches and unpacks weight and bias once, and of which one computes while
// the other waits. The additions are those of norm_forward(), in the same order, so the bits are the same.
//
// (4096x512 float16 on an H200: norm_forward 3.83 us, two rows 3.53, one 3.62, four 3.74; 4096x1024: 6.00, 5.69, 6.40
// and 6.21. Of more rows than are resident norm_forward is faster: 8192x1024 10.0, here 10.9.)
#pragma once

#include "norm_rows.h"
#include "reduce.cuh"
#include "vec.cuh"

namespace fastln {

constexpr int kRowsTogether = 2;  // of a group

// Registers of a thread, at most. `wide`: parameters of more bytes than the elements.
constexpr int short_registers(int pieces, bool wide) { return wide ? 48 * pieces : pieces == 2 ? 72 : 32 * pieces; }

// Whether so many rows stay resident, at `pieces` pieces a thread and `threads` threads a row.
inline bool short_rows_fit(int64_t rows, int pieces, int threads, bool wide, int sms) {
  const int64_t resident = int64_t{sms} * (kRegistersPerSm / short_registers(pieces, wide)) / threads * kRowsTogether;
  return rows <= resident;
}

// kThreads: of a row's group, a power of two up to 32.
template <typename Elem, typename Param, int kPieces, int kThreads>
__global__ void __maxnreg__((short_registers(kPieces, sizeof(Param) > sizeof(Elem)))) norm_short(const NormRows p) {
  using Acc = AccOf<Elem>;
  constexpr int kPiece = kMaxAccessBytes / static_cast<int>(sizeof(Elem)), kStep = kThreads * kPiece;
  using V = Vec<Elem, kPiece>;
  using P = Vec<Param, kPiece>;
  const int lane = threadIdx.x % kThreads;
  const int64_t group = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kThreads) + threadIdx.x / kThreads;
  int64_t row[kRowsTogether];  // past the end, the last one once more
#pragma unroll
  for (int r = 0; r < kRowsTogether; ++r) row[r] = min(group * kRowsTogether + r, p.rows - 1);

  wait_for_previous_kernel();
  V held[kRowsTogether][kPieces];
#pragma unroll
  for (int r = 0; r < kRowsTogether; ++r) {
    const Elem* x = opaque(static_cast<const Elem*>(p.x) + row[r] * p.x_stride + lane * kPiece);
#pragma unroll
    for (int j = 0; j < kPieces; ++j) load_vec(held[r][j], x + j * kStep);
  }
  P weight[kPieces], bias[kPieces];
  const auto load_param = [&](P(&param)[kPieces], const void* from) {
    const Param* own = opaque(static_cast<const Param*>(from) + lane * kPiece);
#pragma unroll
    for (int j = 0; j < kPieces; ++j) load_vec(param[j], own + j * kStep);
  };
  load_param(weight, p.weight);
  load_param(bias, p.bias);

  // Sums over the groups, of both rows by turns.
  const auto group_sums = [](Acc(&sum)[kRowsTogether]) {
#pragma unroll
    for (int offset = kThreads / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (int r = 0; r < kRowsTogether; ++r) sum[r] = add(sum[r], __shfl_xor_sync(0xffffffffu, sum[r], offset));
    }
  };
  const Acc per_col = p.per_col_as(Acc());
  Acc v[kRowsTogether][kPieces][kPiece], mean[kRowsTogether], rstd[kRowsTogether];
#pragma unroll
  for (int r = 0; r < kRowsTogether; ++r) {
    Acc sums[kPiece];
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      unpack(v[r][j], held[r][j]);
#pragma unroll
      for (int i = 0; i < kPiece; ++i) sums[i] = j == 0 ? v[r][j][i] : add(sums[i], v[r][j][i]);
    }
    mean[r] = pairwise_sum(sums);
  }
  group_sums(mean);
#pragma unroll
  for (int r = 0; r < kRowsTogether; ++r) {
    mean[r] = mul(mean[r], per_col);
    Acc sums[kPiece];
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        v[r][j][i] = sub(v[r][j][i], mean[r]);
        sums[i] = j == 0 ? mul(v[r][j][i], v[r][j][i]) : fma(v[r][j][i], v[r][j][i], sums[i]);
      }
    }
    rstd[r] = mul(pairwise_sum(sums), per_col);  // a share of the variance, so far
  }
  group_sums(rstd);
#pragma unroll
  for (int r = 0; r < kRowsTogether; ++r) {
    rstd[r] = reciprocal_sqrt(rstd[r] + p.eps_as(Acc()));
    if (p.mean && lane == 0) {
      static_cast<Acc*>(p.mean)[row[r]] = mean[r];
      static_cast<Acc*>(p.rstd)[row[r]] = mul(rstd[r], static_cast<Acc>(p.rstd_sign));
    }
  }

  Elem* y[kRowsTogether];
#pragma unroll
  for (int r = 0; r < kRowsTogether; ++r) y[r] = opaque(static_cast<Elem*>(p.y) + row[r] * p.cols + lane * kPiece);
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    AccOf<Param> scale[kPiece], shift[kPiece];
    unpack(scale, weight[j]);
    unpack(shift, bias[j]);
#pragma unroll
    for (int r = 0; r < kRowsTogether; ++r) {
      Acc normalized[kPiece];
#pragma unroll
      for (int i = 0; i < kPiece; ++i) normalized[i] = fma(mul(v[r][j][i], rstd[r]), scale[i], shift[i]);
      V out;
      pack(out, normalized);
      store_vec(y[r] + j * kStep, out);
    }
  }
}

}  // namespace fastln
