// The backward of many rows of 16-bit elements that are ragged, compute capability 9.0 and later: rows of x and of dy come
// to shared memory as bundles of neighbours, by bulk copies, and dx goes from there (bundle_copies.cuh; norm_bundle.cuh has
// the same of the forward). norm_backward() copies and shifts granules row by row, in some 400 instructions a warp
// whatever the row's length.
//
// A thread's columns, and the order in which a row's two sums are added up, are those of norm_backward(), so the bits of dx
// are the same. Partial sums are written as there, and added up by the same kernel.
#pragma once

#include "bundle_copies.cuh"
#include "norm_backward_pair.cuh"
#include "norm_backward_partial.cuh"
#include "norm_backward_ragged.cuh"
#include "norm_backward_terms.cuh"
#include "norm_forward.cuh"

namespace fastln {

struct BackwardBundleLaunch : BackwardLaunch {
  int bundle_rows;
  int buffer_bytes;  // of shared memory, for a bundle of one tensor: two of x, of dy and of dx
};

// kThreads: of a row's group, up to a warp, eight warps a block; 0 for groups of several warps. x, dy and dx are not null,
// and rows of x and of dy lie side by side.
template <typename Elem, typename Param, int kPieces, int kThreads>
__global__ void __maxnreg__((backward_bundle_registers(kPieces, kWideBlocksFit)))
    norm_backward_bundle(const BackwardBundleLaunch p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using Acc = AccOf<Elem>;
  using R = Runs<Elem, kPieces, true, kMaxAccessBytes>;
  constexpr int kRun = R::kRun, kRuns = R::kCount, kElem = sizeof(Elem);
  static_assert(kElem == 2 && kRun == 2);
  constexpr bool kInWarp = kThreads > 0;
  constexpr int kPasses = backward_bundle_passes(kPieces);  // over a bundle, each group at a row
  constexpr int kSharers = kInWarp ? kThreads : kWarp, kStep = kSharers * kRun;
  using V = Vec<Elem, kRun>;
  using P = Vec<Param, kRun>;
  extern __shared__ __align__(128) uint4 dynamic_shared[];
  __shared__ PairRoom<Acc> room;

  const int threads = kInWarp ? kThreads : p.threads, groups = static_cast<int>(blockDim.x) / threads;
  const int cols = static_cast<int>(p.cols);
  const BundlePlace place = place_in_bundle<kThreads>(threads);
  const int t = place.t, row = place.row, group = place.group;
  const int lane = t % kSharers;
  // As in norm_backward(): run j begins at column first + j * kStep, if that is before `end`. The columns of a warp begin
  // at part_first, and the last warp of a group has those behind the pieces too.
  const int part_first = t / kSharers * (kSharers * kPieces * R::kAccess);
  const int part_end = part_first + kSharers * kPieces * R::kAccess;
  const int end = t / kSharers + 1 < threads / kSharers ? min(part_end, cols) : cols;
  const int first = part_first + lane * kRun;
  const auto skipped = [&](int j) { return j + 1 == kRuns && end <= part_end; };  // by the whole warp
  // Of a run's two elements, whether the row has them; and the bits of those that it has.
  int left = end - first;
  const auto has = [&](int j, int i) { return j * kStep + i < left; };
  uint32_t mask[kRuns];
#pragma unroll
  for (int j = 0; j < kRuns; ++j) mask[j] = has(j, 1) ? 0xffffffffu : has(j, 0) ? 0xffffu : 0;

  const BundleThreads roles;
  const uint32_t buffers = shared_address(dynamic_shared);
  __shared__ __align__(8) uint64_t barriers[2];
  const uint32_t ready = shared_address(barriers);
  roles.init_barriers(ready, 2);
  __syncthreads();

  wait_for_previous_kernel();
  const BundledRows<const Elem> x{static_cast<const Elem*>(p.x), p.rows, p.cols, cols, p.bundle_rows};
  const BundledRows<const Elem> dy{static_cast<const Elem*>(p.dy), p.rows, p.cols, cols, p.bundle_rows};
  const BundledRows<Elem> dx{static_cast<Elem*>(p.dx), p.rows, p.cols, cols, p.bundle_rows};
  const auto x_buffer = [&](int stage) { return buffers + stage * p.buffer_bytes; };
  const auto dy_buffer = [&](int stage) { return buffers + (2 + stage) * p.buffer_bytes; };
  const auto dx_buffer = [&](int stage) { return buffers + (4 + stage) * p.buffer_bytes; };
  const auto fetch = [&](int64_t first_row, int stage) {
    if (first_row >= p.rows) return;
    x.fetch(first_row, x_buffer(stage), ready + stage * 8);
    dy.fetch(first_row, dy_buffer(stage), ready + stage * 8);
  };
  const int64_t rows_apart = static_cast<int64_t>(gridDim.x) * p.bundle_rows;
  int64_t first_row = static_cast<int64_t>(blockIdx.x) * p.bundle_rows;
  if (roles.fetches) {
    fetch(first_row, 0);
    fetch(first_row + rows_apart, 1);
  }
  // A row's statistics, a pass ahead. Of a row that there is not, zeros.
  Acc next_mean, next_rstd;
  const auto fetch_stats = [&](int64_t at) {
    const bool live = at < p.rows;
    next_mean = live ? static_cast<const Acc*>(p.mean)[at] : Acc(0);
    next_rstd = live ? static_cast<const Acc*>(p.rstd)[at] : Acc(0);
  };
  fetch_stats(first_row + row);

  // Unpacked once, where there are registers for it.
  constexpr bool kUnpacked = kPieces == 1;
  P weight[kUnpacked ? 1 : kRuns];
  AccOf<Param> unpacked_weight[kUnpacked ? kRuns : 1][kRun];
#pragma unroll
  for (int j = 0; j < kRuns; ++j) {
    P& run = weight[kUnpacked ? 0 : j];
    run = splat<Param, kRun>(1);
    const Param* from = static_cast<const Param*>(p.weight) + first + j * kStep;
    if (p.weight && has(j, 0)) {
      if (has(j, 1)) load_vec(run, from);
      else set_item(run, 0, *from);
    }
    if constexpr (kUnpacked) unpack(unpacked_weight[j], run);
  }
  const auto scale_of = [&](int j, AccOf<Param>(&scale)[kRun]) {
    if constexpr (!kUnpacked) {
      unpack(scale, opaque(weight[j]));
    } else {
#pragma unroll
      for (int i = 0; i < kRun; ++i) scale[i] = unpacked_weight[j][i];
    }
  };
  if (p.partial) let_next_kernel_begin();

  Acc dweight[kRuns][kRun] = {}, dbias[kRuns][kRun] = {};
  const Acc per_col = p.per_col_as(Acc());

  int turn = 0;
  for (int stage = 0, parity = 0; first_row < p.rows; first_row += rows_apart) {
    wait_for_barrier<false>(ready + stage * 8, parity);
    if (x.is_last(first_row)) {
      x.fetch_end(first_row, x_buffer(stage));
      dy.fetch_end(first_row, dy_buffer(stage));
      x.clear_missing(first_row, x_buffer(stage));
      dy.clear_missing(first_row, dy_buffer(stage));
      __syncthreads();
    }
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      const int own = pass * groups + row;  // row of the bundle
      const Acc mean = next_mean, rstd = magnitude(next_rstd);
      fetch_stats(pass + 1 < kPasses ? first_row + own + groups : first_row + rows_apart + row);
      left = opaque(left);  // what is derived from it stays out of registers between rows

      // The thread's runs of a tensor, zeros past the row.
      V x_held[kRuns], dy_held[kRuns];
      const auto read = [&](V(&held)[kRuns], uint32_t buffer, int offset) {
        const int at = offset + own * cols + part_first;  // element of the buffer
        const auto read_as = [&](auto is_odd) {
          constexpr bool kOdd = decltype(is_odd)::value;
          const uint32_t words = buffer + (at - kOdd) * kElem + lane * R::kWordBytes;
#pragma unroll
          for (int j = 0; j < kRuns; ++j) {
            held[j] = V{};
            if (skipped(j)) continue;
            held[j] = load_shared_vec<V>(words + j * kStep * kElem);
            if constexpr (kOdd) {
              const V next = load_shared_vec<V>(words + j * kStep * kElem + R::kWordBytes);
              held[j].bits[0] = __funnelshift_r(held[j].bits[0], next.bits[0], 16);
            }
            held[j].bits[0] &= mask[j];
          }
        };
        if (at % 2 == 0) read_as(std::false_type());
        else read_as(std::true_type());
      };
      read(x_held, x_buffer(stage), x.offset(first_row));
      read(dy_held, dy_buffer(stage), dy.offset(first_row));

      Acc g_sum = 0, gx_sum = 0;
#pragma unroll
      for (int j = 0; j < kRuns; ++j) {
        if (skipped(j)) continue;
        Acc x[kRun], dy[kRun], scale[kRun];
        unpack(x, x_held[j]);
        unpack(dy, dy_held[j]);
        scale_of(j, scale);
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
          const Acc xhat = mul(x[i] - mean, rstd);
          add_to_row(g_sum, gx_sum, dy[i], scale[i], xhat);
          add_to_column(dweight[j][i], dbias[j][i], dy[i], xhat);
        }
      }
      if constexpr (kInWarp) add_lanes(g_sum, gx_sum, kThreads);
      else add_group<true>(g_sum, gx_sum, threads, group, turn, room);
      const Acc g_average = mul(g_sum, per_col), gx_share = mul(mul(gx_sum, per_col), rstd);

      V out[kRuns];
#pragma unroll
      for (int j = 0; j < kRuns; ++j) {
        if (skipped(j)) continue;
        Acc x[kRun], dy[kRun], scale[kRun], values[kRun];
        unpack(x, opaque(x_held[j]));
        unpack(dy, opaque(dy_held[j]));
        scale_of(j, scale);
#pragma unroll
        for (int i = 0; i < kRun; ++i)
          values[i] = mul(mul(dy[i], scale[i]) - fma(x[i] - mean, gx_share, g_average), rstd);
        pack(out[j], values);
      }
      const int at = dx.offset(first_row) + own * cols + part_first;  // element of the buffer
      const uint32_t to = dx_buffer(stage) + at * kElem + lane * R::kWordBytes;
#pragma unroll
      for (int j = 0; j < kRuns; ++j) {
        if (skipped(j)) continue;
        const uint32_t word = to + j * kStep * kElem;
        const Vec<Elem, 1> low{{out[j].bits[0]}}, high{{out[j].bits[0] >> 16}};
        if (at % 2 == 0 && has(j, 1)) {
          store_shared_vec(word, out[j]);
        } else {
          if (has(j, 0)) store_shared_vec(word, low);
          if (has(j, 1)) store_shared_vec(word + kElem, high);
        }
      }
      turn ^= 1;
    }

    publish_to_bulk_copies();
    if (roles.stores) wait_for_bulk_reads();  // of the next bundle's buffer of dx
    __syncthreads();
    if (roles.fetches) fetch(first_row + 2 * rows_apart, stage);
    dx.write(first_row, dx_buffer(stage), roles.stores, roles.edge_lane);
    parity ^= stage;
    stage ^= 1;
  }
  if (roles.stores) wait_for_bulk_writes();
  if (!p.partial) return;
  write_partial<Elem, kPieces, true, false, kMaxAccessBytes>(p, dweight, dbias, int64_t{0}, first, kStep, end, cols,
                                                             static_cast<int>(blockIdx.x), threads, group, groups,
                                                             reinterpret_cast<Acc*>(dynamic_shared));
#endif
}

}  // namespace fastln
