// The general forward kernel behind fastln::layer_norm, for rows that fit the registers of a block.
// norm_cluster.cuh and norm_split.cuh take the longer ones, norm_short.cuh short ones as long as all are resident at once,
// norm_walk.cuh and norm_bundle.cuh many ragged ones of 16-bit elements.
//
// A row belongs to a group of threads: part of a warp, a warp, or a block. Each thread holds kPieces
// pieces of 16 bytes in registers. A warp (or the part of one that is the group) has successive pieces of
// the row, and lane l of its L lanes the l-th, (L + l)-th, (2 L + l)-th... of them, so that neighbouring
// threads touch neighbouring words. The group sums twice over its registers (mean, then
// centred squares: never E[x^2] - mean^2), so x is read once, and written once normalized.
//
// Batch invariance. The order of all additions follows from (kPieces, threads), which plan()
// takes from the columns, the dtype and the GPU alone. Rows never share a sum. So the bits
// of a row depend on its values, the columns, the dtype and the weights: not on the batch, the row's
// place in it, its stride or its alignment.
#pragma once

#include "norm_rows.h"
#include "reduce.cuh"
#include "shift.cuh"
#include "tuning.h"
#include "vec.cuh"

namespace fastln {

// How rows lie in memory.
enum class RowLayout {
  kFull,     // whole, of exactly as many pieces as the group holds, with weight and bias: nothing has to be asked
  kWhole,    // they begin and end at multiples of 16 bytes: a piece is one access
  kShifted,  // they begin anywhere: pieces are shifted out of and into granules of 16 bytes, between lanes (shift.cuh)
  kWords,    // they are words of 4 (or 8) bytes, but no whole pieces: a word is one access
  kPairs,    // they are pairs of such words, of 16-bit elements: a pair is one access
};

constexpr bool rows_are_pieces(RowLayout rows) { return rows == RowLayout::kFull || rows == RowLayout::kWhole; }

// Elements that a thread reads and writes at once.
template <typename Elem, RowLayout kRows>
constexpr int kAccessElements = kRows == RowLayout::kWords   ? kWordElements<Elem>
                                : kRows == RowLayout::kPairs ? 2 * kWordElements<Elem>
                                                             : kMaxAccessBytes / static_cast<int>(sizeof(Elem));

// With 8 pieces, whose weight and bias are fetched late, 64 registers are enough for a block of 1024 threads, except
// for rows that are not whole, and except from compute capability 10.0 on, where the compiler spills (plan() knows).
// There 3 and 4 pieces take more, too.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr bool kWideBlocksFit = false;
#else
constexpr bool kWideBlocksFit = true;
#endif
// Nor do 4 pieces fit 40 registers before compute capability 9.0.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kFourFit40 = false;
#else
constexpr bool kFourFit40 = true;
#endif

// Whether the unpacked values stay in registers between the passes; otherwise they are unpacked anew in each, which
// costs up to 3 instructions an element but leaves the registers to other warps.
template <typename Elem, int kPieces, Fetch kFetch, RowLayout kRows>
constexpr bool keeps_values() {
  if (kFetch == Fetch::kLate || kFetch == Fetch::kHalf || kFetch == Fetch::kOne) return false;
  if (sizeof(Elem) > 2) return kRows != RowLayout::kShifted && kPieces <= 3;
  return kPieces == 2 || (kPieces == 4 && rows_are_pieces(kRows) && kFetch != Fetch::kTight);
}

// Registers of a thread, at most: 128 let a block have 512 threads. What the compiler would use beyond these it
// uses to unpack earlier, which is worth less than another block. (On an H200, late: bfloat16 32768x2048 with 2 pieces
// 67.5 us at 32 registers, 70.7 at 40, 73.1 at 48; 2048x16384 with 4 37.4 at 40, 39.2 at 48, 39.4 at 56. Tight: 4096x4096
// 18.1 us at 72, 18.8 at 64, where it spills, 19.0 at 80.)
template <typename Elem, typename Param, int kPieces, Fetch kFetch, RowLayout kRows>
constexpr int forward_registers() {
  constexpr bool kWide = sizeof(Param) > sizeof(Elem);  // takes twice the registers
  constexpr bool kWhole = rows_are_pieces(kRows);
  if (kPieces == 8 && kWhole && kWideBlocksFit) return 64;
  if (sizeof(Elem) > 4) return 128;
  if (kFetch == Fetch::kTight && sizeof(Elem) == 2) return kWideBlocksFit ? 72 : 88;
  if (kFetch == Fetch::kTight) return kWideBlocksFit && kFourFit40 ? 64 : 80;
  if (kFetch == Fetch::kHalf) return kWide ? (kWideBlocksFit ? 72 : 96) : kWideBlocksFit ? 64 : 80;
  if (kFetch == Fetch::kOne && kPieces <= 5) {
    if (!kWideBlocksFit) return 80;
    if (sizeof(Elem) == 4) return 48;
    return kWide && kPieces == 5 ? 64 : 56;
  }
  if (kFetch == Fetch::kLate && kPieces <= 5) {
    if (!kWhole) return kWideBlocksFit && kPieces < 5 ? 64 : 80;
    if (!kWideBlocksFit) return kPieces == 5 && kWide ? 80 : 64;
    if (kPieces == 2) return kWide && kRows == RowLayout::kFull ? 40 : 32;
    if (kPieces == 5) return kWide ? 56 : 48;
    return kPieces == 4 && (kWide || !kFourFit40) ? 48 : 40;
  }
  if (kWide || kPieces == 8) return 128;
  if ((kRows == RowLayout::kWords || kRows == RowLayout::kPairs) && kPieces == 3) return 80;
  if (kPieces == 2) return !kWhole ? 64 : sizeof(Elem) == 4 ? 48 : 56;
  if (kPieces == 4 && kRows == RowLayout::kFull && sizeof(Elem) == 2 && kWideBlocksFit) return 96;
  return kPieces == 3 ? (kWideBlocksFit ? 64 : 80) : 128;
}

// Sum kIndex over a row's group; every thread of it gets it. `threads` is a power of two up to 32, or
// blockDim.x. All threads of the block must call it.
template <bool kWarps, bool kUnroll, int kIndex, typename Acc>
__device__ __forceinline__ Acc group_sum(Acc v, int threads, const BlockSum<Acc, 2>& block) {
  if (threads > kWarp) return block.template sum<kIndex>(v);
  if constexpr (kUnroll && kWarps) {
    return warp_sum(v);
  } else if constexpr (kUnroll) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2)
      if (offset < threads) v += __shfl_xor_sync(0xffffffffu, v, offset);
  } else {  // a loop, over which the compiler moves nothing that would need registers
    for (int offset = threads / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
  }
  return v;
}

// kFetch: how much of weight and bias is fetched before the reductions; see fetch_of().
//
// kWarps: the group is whole warps, so that accesses lie apart by constants. Whether it is one warp or a block is asked
// at run time: told so when compiling, the compiler keeps unpacked values from one pass to the next, and spills.
template <typename Elem, typename Param, int kPieces, Fetch kFetch, RowLayout kRows, bool kWarps>
__global__ void __maxnreg__((forward_registers<Elem, Param, kPieces, kFetch, kRows>())) norm_forward(const NormRows p) {
  using Acc = AccOf<Elem>;
  constexpr int kPiece = kMaxAccessBytes / static_cast<int>(sizeof(Elem));  // elements
  // What a thread reads and writes at once, and how often.
  constexpr int kAccess = kAccessElements<Elem, kRows>, kCount = kPieces * kPiece / kAccess;
  using V = Vec<Elem, kAccess>;
  using P = Vec<Param, kAccess>;
  int64_t row;
  int t, lane, lanes;  // this thread's place in its group; in the group's part of the warp, of so many lanes
  if (p.threads > kWarp) {
    row = blockIdx.x;
    t = threadIdx.x;
    lane = t % kWarp;
    lanes = kWarp;
  } else {
    if (kRows == RowLayout::kShifted && !kWarps && p.threads >= kAlikeThreads) {
      const int64_t warp = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp;
      row = shifted_row(warp, threadIdx.x % kWarp >> p.threads_log2, kWarp >> p.threads_log2);
    } else {
      row = static_cast<int64_t>(blockIdx.x) * (blockDim.x >> p.threads_log2) + (threadIdx.x >> p.threads_log2);
    }
    t = lane = threadIdx.x & (p.threads - 1);
    lanes = p.threads;
    // The last block of small groups may hang over the rows. Full, it does the last row once more; otherwise it has no
    // columns, but still takes part in the shuffles.
    if constexpr (kRows == RowLayout::kFull) row = min(row, p.rows - 1);
  }
  if constexpr (kWarps) lanes = kWarp;
  const int cols = row < p.rows ? static_cast<int>(p.cols) : 0;
  const int whole = rows_are_pieces(kRows) ? cols : cols / kPiece * kPiece;  // columns in pieces
  // Access j is at column first + j * step.
  const int first = ((t - lane) * kCount + lane) * kAccess, step = lanes * kAccess;
  const Elem* x = opaque(static_cast<const Elem*>(p.x) + row * p.x_stride + first);  // this thread's part of [cols]
  const Param* weight = static_cast<const Param*>(p.weight);                         // [cols] or null
  const Param* bias = static_cast<const Param*>(p.bias);                             // [cols] or null
  const auto inside = [&](int j) { return kRows == RowLayout::kFull || first + j * step < whole; };
  // What is left of the row behind its last piece: one element for each of the first threads.
  const bool has_tail = !rows_are_pieces(kRows) && t < cols - whole;

  wait_for_previous_kernel();
  V held[kCount];
  Acc tail = 0;
  if constexpr (kRows == RowLayout::kShifted) {
    // All granules first, then the shifts, so that no load waits for another. The granule behind a lane's own is the
    // next lane's; that behind the last lane's is the first lane's next one, of which it has one more.
    const int offset = granule_offset(x);
    const Elem* granule = opaque(x - offset);
    const Elem* end = static_cast<const Elem*>(p.x) + (p.rows - 1) * p.x_stride + p.cols;
    const int last = offset != 0 ? whole : whole - kAccess;  // granules up to this column
    V behind{};
    const auto load = [&](auto load_granule_at) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        held[j] = V{};
        if (first + j * step <= last) load_granule_at(held[j], granule + j * step);
      }
      if (lane == 0 && first + kCount * step <= last) load_granule_at(behind, granule + kCount * step);
    };
    if (granule - first + last + kAccess <= end) load([](V& v, const Elem* p) { load_vec(v, p); });
    else load([&](V& v, const Elem* p) { load_granule(v, p, end); });
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const V next = from_lane(lane == 0 ? (j + 1 < kCount ? held[j + 1] : behind) : held[j], lane + 1, lanes);
      held[j] = inside(j) ? shift(held[j], next, offset) : V{};
    }
  } else {
    const auto load = [&](auto load_access) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        held[j] = V{};
        if (inside(j)) load_access(held[j], x + j * step);
      }
    };
    if (!rows_are_pieces(kRows) && !is_aligned_for<kAccess>(x)) load([](V& v, const Elem* p) { load_split(v, p); });
    else load([](V& v, const Elem* p) { load_vec(v, p); });
  }
  if (has_tail) tail = load_one(x - first + whole + t);
  // Weight and bias of the accesses that are fetched before the reductions, or of the one that is just written.
  constexpr int kAhead = pieces_ahead(kFetch, kPieces) * (kCount / kPieces), kSlots = kAhead > 0 ? kAhead : 1;
  P w[kSlots], b[kSlots];
  const auto load_params = [&](P& scale, P& shift, int j) {
    scale = splat<Param, kAccess>(1);
    shift = splat<Param, kAccess>(0);
    if ((kRows == RowLayout::kFull || weight) && inside(j)) load_vec(scale, weight + first + j * step);
    if ((kRows == RowLayout::kFull || bias) && inside(j)) load_vec(shift, bias + first + j * step);
  };
#pragma unroll
  for (int j = 0; j < kAhead; ++j) load_params(w[j], b[j], j);

  __shared__ __align__(16) Acc partial[2][kMaxWarps];
  const BlockSum<Acc, 2> block(partial, p.threads > kWarp);

  constexpr bool kKeep = keeps_values<Elem, kPieces, kFetch, kRows>();
  Acc kept[kKeep ? kCount : 1][kAccess];
  const auto values = [&](Acc(&v)[kAccess], int j) {
    if constexpr (kKeep) {
#pragma unroll
      for (int i = 0; i < kAccess; ++i) v[i] = kept[j][i];
    } else {
      unpack(v, opaque(held[j]));
    }
  };
  if constexpr (kKeep) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) unpack(kept[j], held[j]);
  }
  const Acc per_col = p.per_col_as(Acc());
  Acc sums[kPiece];  // independent ones over the accesses, then added pairwise
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    Acc v[kAccess];
    values(v, j);
#pragma unroll
    for (int i = 0; i < kAccess; ++i) {
      const int k = j * kAccess + i;
      sums[k % kPiece] = k < kPiece ? v[i] : sums[k % kPiece] + v[i];
    }
  }
  Acc sum = pairwise_sum(sums);
  if constexpr (!rows_are_pieces(kRows)) sum += tail;
  const Acc mean = mul(group_sum<kWarps, kKeep, 0>(sum, p.threads, block), per_col);
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const Acc centre = inside(j) ? mean : Acc(0);  // past the row x is held as 0; centred on 0 it adds nothing
    Acc v[kAccess];
    values(v, j);
#pragma unroll
    for (int i = 0; i < kAccess; ++i) {
      const int k = j * kAccess + i;
      v[i] -= centre;
      sums[k % kPiece] = k < kPiece ? mul(v[i], v[i]) : fma(v[i], v[i], sums[k % kPiece]);
      if constexpr (kKeep) kept[j][i] = v[i];
    }
  }
  Acc squares = pairwise_sum(sums);
  if (has_tail) squares = fma(tail - mean, tail - mean, squares);
  // Each thread's share is divided before it is added up: squares of values up to 1e18 stay finite.
  const Acc variance = group_sum<kWarps, kKeep, 1>(mul(squares, per_col), p.threads, block);
  const Acc rstd = reciprocal_sqrt(variance + p.eps_as(Acc()));

  if (t == 0 && cols > 0 && p.mean) {
    static_cast<Acc*>(p.mean)[row] = mean;
    static_cast<Acc*>(p.rstd)[row] = mul(rstd, static_cast<Acc>(p.rstd_sign));
  }
  Elem* y = opaque(static_cast<Elem*>(p.y) + row * p.cols + first);  // this thread's part of [cols]
  // Access j, normalized.
  const auto output_of = [&](int j) {
    P& weight_j = w[j % kSlots];
    P& bias_j = b[j % kSlots];
    if constexpr (kAhead == 0) load_params(weight_j, bias_j, j);
    Acc v[kAccess];
    AccOf<Param> scale[kAccess], shift[kAccess];
    values(v, j);
    unpack(scale, weight_j);
    unpack(shift, bias_j);
    if (kAhead > 0 && j + kAhead < kCount) load_params(weight_j, bias_j, j + kAhead);
#pragma unroll
    for (int i = 0; i < kAccess; ++i) v[i] = fma(mul(kKeep ? v[i] : v[i] - mean, rstd), scale[i], shift[i]);
    V out;
    pack(out, v);
    return out;
  };
  if constexpr (kRows == RowLayout::kShifted) {
    // A granule of y has the last elements of the piece before, which is the lane's before, and then the first of the
    // lane's own. Where a warp's pieces begin and end, it writes a part of one.
    const int offset = granule_offset(y);
    Elem* granule = opaque(y - offset);
    V before{}, edge{};
    bool has_edge = false;
    int edge_at = 0;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const V out = output_of(j);
      const V previous = from_lane(lane == lanes - 1 ? before : out, lane - 1, lanes);
      const V image = shift(previous, out, kAccess - offset);
      if (inside(j)) {
        if (j == 0 && lane == 0 && offset != 0) store_from(granule, image, offset);
        else store_vec(granule + j * step, image);
        if ((j == kCount - 1 && lane == lanes - 1) || first + j * step + kAccess == whole) {
          edge = out;
          edge_at = (j * lanes + 1) * kAccess;
          has_edge = offset != 0;
        }
      }
      before = out;
    }
    if (has_edge) store_until(granule + edge_at, shift(edge, edge, kAccess - offset), offset);
  } else {
    const auto store = [&](auto store_access) {
#pragma unroll
      for (int j = 0; j < kCount; ++j)
        if (inside(j)) store_access(y + j * step, output_of(j));
    };
    if (!rows_are_pieces(kRows) && !is_aligned_for<kAccess>(y)) store([](Elem* p, const V& v) { store_split(p, v); });
    else store([](Elem* p, const V& v) { store_vec(p, v); });
  }
  if (has_tail) {
    const Acc scale = weight ? static_cast<Acc>(load_one(weight + whole + t)) : Acc(1);
    const Acc shift = bias ? static_cast<Acc>(load_one(bias + whole + t)) : Acc(0);
    store_one(y - first + whole + t, fma(mul(tail - mean, rstd), scale, shift));
  }
}

}  // namespace fastln
