// The forward of many rows of 16-bit elements that are no whole pieces, compute capability 9.0 and later, through shared
// memory.
//
// What makes such rows slow is that a thread's access is not an access of memory: pieces begin at odd elements, so
// norm_forward() shifts them between lanes on the way in and on the way out, and each row begins and ends within a
// sector of 32 bytes, which two warps then write a part of. Here neighbouring rows are a bundle, which is whole sectors
// but for its ends. One bulk copy brings it to shared memory, one takes its outputs from there, and threads read and
// write there what is theirs, wherever it lies: a piece of 16-bit elements that begins at an odd one is the upper half
// of a word, three words, and the lower half of a word, which unpacking can read as well as whole words.
//
// The blocks are as many as are resident at once, and each walks over bundles, a grid apart: while it works on one, the
// next is on its way, and the one before on its way out. It holds weight and bias meanwhile.
// The additions are those of norm_forward(), in the same order, so the bits are the same.
//
// (float16 on an H200, norm_forward's time, this one's, and a copy's: 131072x257 52.5 us, 37.4 and 34.8; 32768x769 35.1,
// 28.3 and 26.9; 4096x4097 24.1, 20.8 and 19.0; 332222x101 65.5, 37.8 and 37.1.)
#pragma once

#include "bundle_copies.cuh"
#include "norm_forward.cuh"
#include "norm_values.cuh"

namespace fastln {

// What norm_bundle() works on, next to the rows: with more than one row a bundle, these lie side by side.
struct BundleLaunch : NormRows {
  int bundle_rows;
  int buffer_bytes;  // of shared memory: two buffers for what comes, and behind them
  int out_buffers;   // one or two for what goes
};

// Calls f with std::integral_constant<int, i>, 0 <= i < 8.
template <typename F>
__device__ __forceinline__ void with_constant(int i, const F& f) {
  switch (i) {
    case 0: f(std::integral_constant<int, 0>()); break;
    case 1: f(std::integral_constant<int, 1>()); break;
    case 2: f(std::integral_constant<int, 2>()); break;
    case 3: f(std::integral_constant<int, 3>()); break;
    case 4: f(std::integral_constant<int, 4>()); break;
    case 5: f(std::integral_constant<int, 5>()); break;
    case 6: f(std::integral_constant<int, 6>()); break;
    default: f(std::integral_constant<int, 7>()); break;
  }
}

// kThreads: of a row's group, up to a warp; 0 for groups of several warps, one or two a block. Eight warps whose groups
// are parts of them share a bundle of as many rows as there are groups; those of one warp are eight rows apart, and so
// lie alike in their pieces.
template <typename Elem, int kPieces, RowLayout kRows, int kThreads>
__global__ void __maxnreg__((bundle_registers(kPieces, kWideBlocksFit))) norm_bundle(const BundleLaunch p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using Acc = AccOf<Elem>;
  constexpr int kElem = sizeof(Elem);
  constexpr int kPiece = kMaxAccessBytes / kElem;  // elements
  constexpr int kAccess = kAccessElements<Elem, kRows>, kCount = kPieces * kPiece / kAccess;
  constexpr bool kInWarp = kThreads > 0;
  constexpr int kLanes = kInWarp ? kThreads : kWarp, kStep = kLanes * kAccess;
  using V = Vec<Elem, kAccess>;
  using One = Vec<Elem, 1>;
  extern __shared__ __align__(128) uint4 dynamic_shared[];

  const int cols = static_cast<int>(p.cols), whole = cols / kPiece * kPiece;  // columns, and those in pieces
  const BundlePlace place = place_in_bundle<kThreads>(p.threads);
  const int t = place.t, row = place.row, group = place.group;
  const int lane = t % kLanes;
  // Access j is at column first + j * kStep.
  const int first = ((t - lane) * kCount + lane) * kAccess;
  int left = whole - first;
  const auto inside = [&](int j) { return j * kStep < left; };
  // What is left of the row behind its last piece: one element for each of the first threads.
  const bool has_tail = t < cols - whole;
  const int tail_at = whole + t;

  const BundleThreads roles;
  const uint32_t buffers = shared_address(dynamic_shared);
  __shared__ __align__(8) uint64_t barriers[2];
  const uint32_t ready = shared_address(barriers);
  roles.init_barriers(ready, 1);
  __shared__ __align__(16) Acc partial[2][kMaxWarps];
  const bool groups_share = !kInWarp && static_cast<int>(blockDim.x) > p.threads;
  const BlockSum<Acc, 2> block(partial, !kInWarp && !groups_share);
  const uint32_t group_partial = shared_address(partial) + group * 2 * kMaxAccessBytes;
  if (groups_share && t < 2 * kMaxAccessBytes / static_cast<int>(sizeof(Acc)))
    store_shared(group_partial + t * sizeof(Acc), Acc(0));
  __syncthreads();

  // The sum over the row's group, the kIndex-th of a row; every thread of it gets it.
  const auto sum_over_group = [&](Acc v, auto index) {
    constexpr int kIndex = decltype(index)::value;
    if constexpr (kInWarp) {
#pragma unroll
      for (int offset = kThreads / 2; offset > 0; offset /= 2) v = add(v, __shfl_xor_sync(0xffffffffu, v, offset));
      return v;
    } else {
      if (!groups_share) return block.template sum<kIndex>(v);
      // As block.sum() for up to four warps, with a barrier of the group.
      v = warp_sum(v);
      const uint32_t values = group_partial + kIndex * kMaxAccessBytes;
      if (lane == 0) store_shared(values + t / kWarp * sizeof(Acc), v);
      // Numbers that are constants: of others the compiler takes all 16 barriers a block, and four blocks are resident.
      if (group == 0) asm volatile("bar.sync 1, %0;" ::"r"(p.threads) : "memory");
      else asm volatile("bar.sync 2, %0;" ::"r"(p.threads) : "memory");
      return sum_shared16<Acc>(values);
    }
  };

  wait_for_previous_kernel();
  const BundledRows<const Elem> x{static_cast<const Elem*>(p.x), p.rows, p.x_stride, cols, p.bundle_rows};
  const BundledRows<Elem> y{static_cast<Elem*>(p.y), p.rows, p.cols, cols, p.bundle_rows};
  const auto fetch = [&](int64_t first_row, int stage) {
    if (first_row < p.rows) x.fetch(first_row, buffers + stage * p.buffer_bytes, ready + stage * 8);
  };
  const int64_t rows_apart = static_cast<int64_t>(gridDim.x) * p.bundle_rows;
  int64_t first_row = static_cast<int64_t>(blockIdx.x) * p.bundle_rows;
  if (roles.fetches) {
    fetch(first_row, 0);
    fetch(first_row + rows_apart, 1);
  }

  V weight[kCount], bias[kCount];
  Acc tail_scale = 1, tail_shift = 0;
  const auto load_param = [&](V(&param)[kCount], Acc& of_tail, const void* from, int otherwise) {
    const Elem* own = static_cast<const Elem*>(from);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      param[j] = splat<Elem, kAccess>(otherwise);
      if (from && inside(j)) load_vec(param[j], own + first + j * kStep);
    }
    if (from && has_tail) of_tail = load_one(own + tail_at);
  };
  load_param(weight, tail_scale, p.weight, 1);
  load_param(bias, tail_shift, p.bias, 0);
  const Acc per_col = p.per_col_as(Acc());

  for (int stage = 0, parity = 0; first_row < p.rows; first_row += rows_apart) {
    const uint32_t in = buffers + stage * p.buffer_bytes;
    const uint32_t out = buffers + (p.out_buffers == 1 ? 2 : 2 + stage) * p.buffer_bytes;
    const int x_offset = x.offset(first_row), y_offset = y.offset(first_row), begin = row * cols;
    wait_for_barrier<false>(ready + stage * 8, parity);
    if (x.is_last(first_row)) {
      x.fetch_end(first_row, in);
      __syncthreads();
    }
    left = opaque(left);  // what is derived from it stays out of registers between bundles

    const uint32_t row_in = in + (x_offset + begin) * kElem;
    Acc v[kCount][kAccess], tail[1] = {0};
    if constexpr (kRows == RowLayout::kShifted) {
      const int offset = (x_offset + begin) % kPiece;
      const uint32_t pieces = row_in + (first - offset) * kElem;
      with_constant(offset, [&](auto constant) {
        constexpr int kOffset = decltype(constant)::value;
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          V low{}, high{};  // the two pieces of the buffer that it lies in
          if (inside(j)) {
            low = load_shared_vec<V>(pieces + j * kStep * kElem);
            if (kOffset > 0) high = load_shared_vec<V>(pieces + (j * kStep + kPiece) * kElem);
          }
          Acc lower[kPiece], upper[kPiece];
          unpack(lower, low);
          unpack(upper, high);
#pragma unroll
          for (int i = 0; i < kPiece; ++i)
            v[j][i] = i + kOffset < kPiece ? lower[i + kOffset] : upper[i + kOffset - kPiece];
        }
      });
    } else {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        V held{};
        if (inside(j)) held = load_shared_vec<V>(row_in + (first + j * kStep) * kElem);
        unpack(v[j], held);
      }
    }
    if (has_tail) unpack(tail, load_shared_vec<One>(row_in + tail_at * kElem));

    const Acc sum = add(sum_values<kPiece>(v), tail[0]);
    const Acc mean = mul(sum_over_group(sum, std::integral_constant<int, 0>()), per_col);
    // With one buffer, before a barrier of the block.
    if (roles.stores && p.out_buffers == 1) wait_for_bulk_reads();
    Acc squares = centre_values<kPiece>(v, mean, inside);
    tail[0] = sub(tail[0], mean);
    if (has_tail) squares = fma(tail[0], tail[0], squares);
    const Acc variance = sum_over_group(mul(squares, per_col), std::integral_constant<int, 1>());
    const Acc rstd = reciprocal_sqrt(add(variance, p.eps_as(Acc())));
    if (t == 0 && p.mean && first_row + row < p.rows) {
      static_cast<Acc*>(p.mean)[first_row + row] = mean;
      static_cast<Acc*>(p.rstd)[first_row + row] = mul(rstd, static_cast<Acc>(p.rstd_sign));
    }

    const uint32_t row_out = out + (y_offset + begin) * kElem;
    const bool at_word = kRows != RowLayout::kShifted || (y_offset + begin) % 2 == 0;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      Acc scale[kAccess], shift[kAccess];
      unpack(scale, opaque(weight[j]));  // each time anew, which leaves registers to other blocks
      unpack(shift, opaque(bias[j]));
#pragma unroll
      for (int i = 0; i < kAccess; ++i) v[j][i] = fma(mul(v[j][i], rstd), scale[i], shift[i]);
      if (!inside(j)) continue;
      // Elements [i, i + kN), which are aligned in shared memory.
      const auto put = [&](int i, auto count) {
        constexpr int kN = decltype(count)::value;
        Acc values[kN];
#pragma unroll
        for (int k = 0; k < kN; ++k) values[k] = v[j][i + k];
        Vec<Elem, kN> packed{};
        pack(packed, values);
        store_shared_vec(row_out + (first + j * kStep + i) * kElem, packed);
      };
      constexpr std::integral_constant<int, 1> kOne;
      constexpr std::integral_constant<int, 2> kTwo;
      if constexpr (kRows != RowLayout::kShifted) {
        put(0, std::integral_constant<int, kAccess>());
      } else if (at_word) {
#pragma unroll
        for (int i = 0; i < kAccess; i += 2) put(i, kTwo);
      } else {
        put(0, kOne);
#pragma unroll
        for (int i = 1; i < kAccess - 1; i += 2) put(i, kTwo);
        put(kAccess - 1, kOne);
      }
    }
    if (has_tail) {
      const Acc last[1] = {fma(mul(tail[0], rstd), tail_scale, tail_shift)};
      One packed{};
      pack(packed, last);
      store_shared_vec(row_out + tail_at * kElem, packed);
    }

    publish_to_bulk_copies();
    if (roles.stores && p.out_buffers == 2) wait_for_bulk_reads();  // of the next bundle's buffer
    __syncthreads();
    if (roles.fetches) fetch(first_row + 2 * rows_apart, stage);
    y.write(first_row, out, roles.stores, roles.edge_lane);
    parity ^= stage;
    stage ^= 1;
  }
  if (roles.stores) wait_for_bulk_writes();
#endif
}

}  // namespace fastln
