// Host side of the general backward: from a plan and pointers to launches of the right variants.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <map>
#include <mutex>
#include <tuple>

#include <cuda_runtime.h>

#include "dependent_launch.h"
#include "norm_backward.cuh"
#include "norm_backward_bundle.cuh"
#include "norm_backward_plan.h"
#include "norm_backward_shared.h"
#include "norm_launch.h"

namespace fastln {

// Every compiled variant of norm_backward. `sums`: of columns are wanted; where they are not, rows that
// backward_has_lean() leaves out still get the variant that keeps them.
template <typename Elem, typename Param>
cudaError_t find_backward(const BackwardPlan& plan, int pieces, bool ragged, bool sums, const DeviceFacts& device,
                          void (**out)(BackwardLaunch)) {
  const bool cluster = plan.cluster > 1;
  const auto is = [&](int count, bool is_ragged, bool is_cluster) {
    return pieces == count && ragged == is_ragged && cluster == is_cluster;
  };
  const bool lean = !sums && backward_has_lean(plan.pieces, ragged, cluster);
  if constexpr (sizeof(Elem) == 2) {
    if (plan.piece_bytes == 8) {
      if (lean && pieces == 3) return prepare<norm_backward<Elem, Param, 3, false, false, false, 8>>(device, out);
      if (pieces == 3) return prepare<norm_backward<Elem, Param, 3, false, false, true, 8>>(device, out);
      if (pieces == 4) return prepare<norm_backward<Elem, Param, 4, false, false, true, 8>>(device, out);
      return cudaErrorInvalidValue;
    }
  }
  if (lean) {
    if (pieces == 1) return prepare<norm_backward<Elem, Param, 1, false, false, false>>(device, out);
    if (pieces == 2) return prepare<norm_backward<Elem, Param, 2, false, false, false>>(device, out);
    if (pieces == 3) return prepare<norm_backward<Elem, Param, 3, false, false, false>>(device, out);
  }
  if (is(1, false, false)) return prepare<norm_backward<Elem, Param, 1, false, false, true>>(device, out);
  if (is(2, false, false)) return prepare<norm_backward<Elem, Param, 2, false, false, true>>(device, out);
  if (is(3, false, false)) return prepare<norm_backward<Elem, Param, 3, false, false, true>>(device, out);
  if (is(4, false, false)) return prepare<norm_backward<Elem, Param, 4, false, false, true>>(device, out);
  if (is(1, true, false)) return prepare<norm_backward<Elem, Param, 1, true, false, true>>(device, out);
  if (is(2, true, false)) return prepare<norm_backward<Elem, Param, 2, true, false, true>>(device, out);
  if (is(3, true, false)) return prepare<norm_backward<Elem, Param, 3, true, false, true>>(device, out);
  if (is(3, true, true)) return prepare<norm_backward<Elem, Param, 3, true, true, true>>(device, out);
  if constexpr (sizeof(Elem) == 2) {
    if (is(2, false, true)) return prepare<norm_backward<Elem, Param, 2, false, true, true>>(device, out);
    if (is(3, false, true)) return prepare<norm_backward<Elem, Param, 3, false, true, true>>(device, out);
  } else {
    if (is(4, false, true)) return prepare<norm_backward<Elem, Param, 4, false, true, true>>(device, out);
  }
  return cudaErrorInvalidValue;
}

// Every compiled variant of norm_backward_bundle.
template <typename Elem, typename Param>
cudaError_t find_backward_bundle(const BackwardPlan& plan, const DeviceFacts& device,
                                 void (**out)(BackwardBundleLaunch)) {
  if constexpr (sizeof(Elem) == 2) {
    const auto is = [&](int pieces, int threads) { return plan.pieces == pieces && plan.threads == threads; };
    if (is(1, 4)) return prepare<norm_backward_bundle<Elem, Param, 1, 4>>(device, out);
    if (is(1, 8)) return prepare<norm_backward_bundle<Elem, Param, 1, 8>>(device, out);
    if (is(1, 16)) return prepare<norm_backward_bundle<Elem, Param, 1, 16>>(device, out);
    if (is(1, kWarp)) return prepare<norm_backward_bundle<Elem, Param, 1, kWarp>>(device, out);
    if (is(2, kWarp)) return prepare<norm_backward_bundle<Elem, Param, 2, kWarp>>(device, out);
    if (plan.threads > kWarp && plan.pieces == 2) return prepare<norm_backward_bundle<Elem, Param, 2, 0>>(device, out);
    if (plan.threads > kWarp && plan.pieces == 3) return prepare<norm_backward_bundle<Elem, Param, 3, 0>>(device, out);
  }
  return cudaErrorInvalidValue;
}

// For kernels that call wait_for_previous_kernel() before they touch memory. `blocks` of the grid's first dimension.
template <typename... Args>
cudaError_t launch(void (*kernel)(Args...), int64_t blocks, unsigned grid_y, int block, int64_t shared_bytes,
                   int cluster, const DeviceFacts& device, cudaStream_t stream, std::type_identity_t<Args>... args) {
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  const LaunchConfig config(dim3(static_cast<unsigned>(blocks), grid_y), dim3(static_cast<unsigned>(block)),
                            shared_bytes, cluster, device.has_hopper_code, stream);
  return cudaLaunchKernelEx(config.get(), kernel, args...);
}

// How many clusters of the plan's blocks the device holds at once, at least 1. CUDA is asked once for each of these.
inline cudaError_t resident_clusters(void (*kernel)(BackwardLaunch), const BackwardPlan& plan, int64_t shared_bytes,
                                     const DeviceFacts& device, int64_t* out) {
  static std::mutex mutex;
  static std::map<std::tuple<void (*)(BackwardLaunch), int, int, int, int64_t>, int> known;
  const auto key = std::tuple(kernel, device.index, plan.cluster, plan.block, shared_bytes);
  const std::lock_guard lock(mutex);
  if (const auto at = known.find(key); at != known.end()) {
    *out = at->second;
    return cudaSuccess;
  }
  const LaunchConfig config(dim3(static_cast<unsigned>(plan.cluster)), dim3(static_cast<unsigned>(plan.block)),
                            shared_bytes, plan.cluster, false, nullptr);
  int clusters = 0;
  const cudaError_t err =
      cudaOccupancyMaxActiveClusters(&clusters, reinterpret_cast<const void*>(kernel), config.get());
  if (err == cudaSuccess) *out = known[key] = std::max(clusters, 1);
  return err;
}

// The second kernel, which adds up the partial sums.
template <typename Elem, typename Param>
cudaError_t add_up(const BackwardLaunch& p, int64_t partials, const DeviceFacts& device, cudaStream_t stream) {
  using Acc = AccOf<Elem>;
  // As many columns a block as leave about a block a multiprocessor.
  constexpr int64_t kRun = 16 / sizeof(Acc);
  int lanes = 2;
  while (lanes < kWarp && 2 * p.cols > lanes * kRun * device.sms) lanes *= 2;
  const int64_t slices = (p.cols + lanes * kRun - 1) / (lanes * kRun);
  void (*add)(const Acc*, int64_t, int64_t, int64_t, int, void*, void*);
  const cudaError_t err = prepare<add_partials<Acc, Param>>(device, &add);
  if (err != cudaSuccess) return err;
  return launch(add, slices, 2, kAddThreads, 0, 1, device, stream, static_cast<const Acc*>(p.partial), partials,
                p.pitch, p.cols, lanes, p.dweight, p.dbias);
}

template <typename Elem, typename Param>
cudaError_t launch_backward(const NormGrads& grads, const BackwardPlan& plan, const DeviceFacts& device,
                            void* workspace, cudaStream_t stream) {
  using Acc = AccOf<Elem>;
  const int access = plan.piece_bytes / static_cast<int>(sizeof(Elem));
  const bool ragged = rows_are_ragged(grads.cols, sizeof(Elem), plan.piece_bytes);
  const bool wants_params = grads.dweight || grads.dbias;
  const bool sliced = plan.pieces == 0;
  const int pieces = sliced ? kSlicePieces : plan.pieces;

  BackwardLaunch p{grads};
  p.per_col = 1.0 / static_cast<double>(p.cols);
  p.per_col_f = static_cast<float>(p.per_col);
  p.threads = plan.threads;
  p.cluster = plan.cluster;
  p.sharing = plan.sharing;
  p.pitch = backward_pitch(p.cols);
  p.slice = sliced ? slice_cols(sizeof(Elem)) : p.cols;
  p.safe_rows = p.rows - backward_unsafe_rows(grads, sizeof(Elem));
  BackwardGrid grid = backward_grid(grads, plan, sizeof(Elem), device);
  p.blocks = static_cast<int>(grid.blocks);
  int64_t row_blocks = plan.direct && !p.dx ? 0 : grid.blocks * grid.slices;
  const int64_t column_cols = int64_t{plan.column_pieces} * access;
  p.column_pieces = plan.column_pieces;
  p.column_split = plan.column_split;
  const int64_t column_slices = plan.direct && wants_params ? (p.cols + column_cols - 1) / column_cols : 0;
  p.column_blocks = static_cast<int>(column_slices * plan.column_split);

  cudaError_t err;
  Acc* room = static_cast<Acc*>(workspace);
  if (wants_params && !plan.direct) {
    p.partial = room;
    room += grid.partials * 2 * p.pitch;
  }
  if (sliced && p.dx) {
    const int64_t chunks = (p.cols + kSumsChunk - 1) / kSumsChunk;
    Acc* averages = room;               // [rows, 2]
    Acc* sums = averages + 2 * p.rows;  // [rows, chunks, 2]
    err = launch(ragged ? sum_chunks<Elem, Param, false> : sum_chunks<Elem, Param, true>, p.rows * chunks, 1,
                 kBackwardThreads, 0, 1, device, stream, p, sums, chunks);
    if (err != cudaSuccess) return err;
    err = launch(average_chunks<Acc>, (p.rows + 7) / 8, 1, 8 * kWarp, 0, 1, device, stream, sums, p.rows, chunks,
                 p.per_col, averages);
    if (err != cudaSuccess) return err;
    p.sums = averages;
  }

  if (const BackwardBundles bundles = backward_bundles(grads, plan, sizeof(Elem), device); bundles.rows > 0) {
    BackwardBundleLaunch b{p};
    b.bundle_rows = bundles.rows;
    b.buffer_bytes = static_cast<int>(bundles.buffer_bytes);
    void (*kernel)(BackwardBundleLaunch);
    err = find_backward_bundle<Elem, Param>(plan, device, &kernel);
    if (err == cudaSuccess)
      err = launch(kernel, bundles.blocks, 1, bundles.threads, bundles.shared_bytes, 1, device, stream, b);
    return err != cudaSuccess || !p.partial ? err : add_up<Elem, Param>(p, grid.partials, device, stream);
  }

  const BackwardShared shared = backward_shared(plan, p.cols, sizeof(Elem), p.partial != nullptr, device);
  p.stages = shared.stages;

  void (*kernel)(BackwardLaunch);
  err = find_backward<Elem, Param>(plan, pieces, ragged, p.partial != nullptr, device, &kernel);
  if (err != cudaSuccess) return err;
  if (plan.cluster > 1 && !plan.direct) {
    // Clusters that would not fit at once with the others would run behind them, in twice the time.
    int64_t clusters = 0;
    err = resident_clusters(kernel, plan, shared.bytes, device, &clusters);
    if (err != cudaSuccess) return err;
    grid.partials = std::min(grid.partials, clusters);
    row_blocks = grid.partials * plan.cluster;
    p.blocks = static_cast<int>(row_blocks);
  }
  if (plan.direct && (plan.cluster > 1 || sliced)) {
    if (p.column_blocks > 0) {
      const int block = 128;
      err = launch(ragged ? sum_all_columns<Elem, Param, false> : sum_all_columns<Elem, Param, true>, p.column_blocks,
                   1, block, sum_columns_bytes(block, plan.column_pieces, access, sizeof(Acc)), 1, device, stream, p);
      p.column_blocks = 0;
    }
    if (err == cudaSuccess && p.dx)
      err = launch(kernel, row_blocks, 1, plan.block, shared.bytes, plan.cluster, device, stream, p);
    return err;
  }
  const int cluster = std::max({plan.cluster, plan.sharing, plan.column_split});
  err = launch(kernel, round_up(p.column_blocks + row_blocks, cluster), 1, plan.block, shared.bytes, cluster, device,
               stream, p);
  if (err != cudaSuccess || !p.partial) return err;
  return add_up<Elem, Param>(p, grid.partials, device, stream);
}

template <typename Elem, typename Param>
const char* run_backward(const NormGrads& grads, const BackwardPlan& plan, const DeviceFacts& device, void* workspace,
                         void* stream) {
  const cudaError_t err =
      launch_backward<Elem, Param>(grads, plan, device, workspace, static_cast<cudaStream_t>(stream));
  if (err == cudaSuccess) return nullptr;
  cudaGetLastError();  // reported here; the next call must not see it again
  return cudaGetErrorString(err);
}

}  // namespace fastln
