// Host side of the general forward: from a plan and pointers to a launch of the right variant.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <optional>

#include <cuda_runtime.h>

#include "dependent_launch.h"
#include "norm_bundle.cuh"
#include "norm_cluster.cuh"
#include "norm_forward.cuh"
#include "norm_launch.h"
#include "norm_short.cuh"
#include "norm_split.cuh"
#include "norm_walk.cuh"

namespace fastln {

// Launches `kernel` over all rows, as many times as the limit of 2^31 - 1 blocks a grid asks for. A group of threads
// takes rows_a_group of them. The blocks are a multiple of blocks_together.
template <typename Elem>
cudaError_t launch_rows(void (*kernel)(NormRows), NormRows p, int64_t rows_a_group, int blocks_together,
                        bool has_dependent_launch, cudaStream_t stream) {
  using Acc = AccOf<Elem>;
  const bool whole_block = p.threads > kWarp;
  const int64_t rows_a_block = (whole_block ? 1 : kSmallGroupBlock / p.threads) * rows_a_group;
  const int64_t most_rows = INT_MAX / blocks_together * blocks_together * rows_a_block;
  for (int64_t left = p.rows; left > 0; left -= most_rows) {
    p.rows = std::min(left, most_rows);
    const int64_t blocks = round_up((p.rows + rows_a_block - 1) / rows_a_block, blocks_together);
    const LaunchConfig config(dim3(static_cast<unsigned>(blocks)),
                              dim3(static_cast<unsigned>(whole_block ? p.threads : kSmallGroupBlock)), 0, 1,
                              has_dependent_launch, stream);
    const cudaError_t err = cudaLaunchKernelEx(config.get(), kernel, p);
    if (err != cudaSuccess) return err;
    p.x = static_cast<const Elem*>(p.x) + p.rows * p.x_stride;
    p.y = static_cast<Elem*>(p.y) + p.rows * p.cols;
    if (p.mean) {
      p.mean = static_cast<Acc*>(p.mean) + p.rows;
      p.rstd = static_cast<Acc*>(p.rstd) + p.rows;
    }
  }
  return cudaSuccess;
}

// Part of a warp has too many words of 16-bit elements to take (524288x100 float16 on an H200: 88 us, in pieces 77).
template <typename Elem> constexpr bool kTakesWordsInPart = sizeof(Elem) >= 4;

// Every compiled variant of norm_forward: kWarps for groups of whole warps, `fetch` as fetch_of() has it.
template <typename Elem, typename Param, RowLayout kRows, bool kWarps>
void (*find_forward(int pieces, Fetch fetch))(NormRows) {
  const auto when = [&](auto count) {
    constexpr int kPieces = decltype(count)::value;
    constexpr bool kFull = kRows == RowLayout::kFull;
    constexpr bool kWide = sizeof(Param) > sizeof(Elem);
    // With 8 pieces, and with 5 and wide parameters, registers are short, and no more than one piece fits early.
    constexpr bool kEarly = kPieces < 5 || (kPieces == 5 && !kWide);
    constexpr bool kTight = kFull && kPieces == 4 && !kWide;
    constexpr bool kHalf = kFull && kPieces == 4 && sizeof(Elem) == 2;
    constexpr bool kOne = kFull && (kPieces == 8 ? !kWide : kPieces >= 4 || (kPieces == 3 && kWide));
    // Full rows of 3 and of 5 pieces are never fetched late; nor are two shifted pieces of 16 bits with parameters of
    // their own type, of which norm_bundle() takes as many rows as would be.
    constexpr bool kBundled = kPieces == 2 && kRows == RowLayout::kShifted && sizeof(Elem) == 2 && !kWide;
    constexpr bool kLate = kWarps && (kPieces > 2 || may_fetch_two_late(sizeof(Elem))) && !kBundled &&
                           !(kFull && (kPieces == 3 || kPieces == 5));
    constexpr Fetch kElse = kEarly ? Fetch::kEarly : kOne ? Fetch::kOne : Fetch::kLate;
    if constexpr (kTight) {
      if (fetch == Fetch::kTight) return &norm_forward<Elem, Param, kPieces, Fetch::kTight, kRows, kWarps>;
    }
    if constexpr (kHalf) {
      if (fetch == Fetch::kHalf) return &norm_forward<Elem, Param, kPieces, Fetch::kHalf, kRows, kWarps>;
    }
    if constexpr (kOne && kEarly) {
      if (fetch == Fetch::kOne) return &norm_forward<Elem, Param, kPieces, Fetch::kOne, kRows, kWarps>;
    }
    if constexpr (kLate && kEarly) {
      if (fetch != Fetch::kEarly) return &norm_forward<Elem, Param, kPieces, Fetch::kLate, kRows, kWarps>;
    }
    return &norm_forward<Elem, Param, kPieces, kElse, kRows, kWarps>;
  };
  if constexpr (kWarps || kRows != RowLayout::kWords || kTakesWordsInPart<Elem>) {
    if (pieces == 2) return when(std::integral_constant<int, 2>());
    if (pieces == 3) return when(std::integral_constant<int, 3>());
  }
  if constexpr (kWarps) {
    if (pieces == 4) return when(std::integral_constant<int, 4>());
    if constexpr (kRows != RowLayout::kWords && kRows != RowLayout::kPairs) {
      if (pieces == 5) return when(std::integral_constant<int, 5>());
    }
    if (pieces == 8) return when(std::integral_constant<int, 8>());
  }
  return nullptr;
}

// Every compiled variant of norm_short.
template <typename Elem, typename Param>
void (*find_short(int pieces, int threads))(NormRows) {
  if (threads == 8 && pieces == 2) return norm_short<Elem, Param, 2, 8>;
  if (threads == 16 && pieces == 2) return norm_short<Elem, Param, 2, 16>;
  if (threads == 32 && pieces == 2) return norm_short<Elem, Param, 2, 32>;
  if (threads == 32 && pieces == 3) return norm_short<Elem, Param, 3, 32>;
  if (threads == 32 && pieces == 4) return norm_short<Elem, Param, 4, 32>;
  return nullptr;
}

// Every compiled variant of norm_walk.
template <typename Elem, RowLayout kRows, bool kWarps>
void (*find_walk(int pieces))(NormRows) {
  if constexpr (kWarps || kRows != RowLayout::kWords || kTakesWordsInPart<Elem>) {
    if (pieces == 2) return norm_walk<Elem, 2, kRows, kWarps>;
    if (pieces == 3) return norm_walk<Elem, 3, kRows, kWarps>;
  }
  if constexpr (kWarps) {
    if (pieces == 4) return norm_walk<Elem, 4, kRows, kWarps>;
  }
  return nullptr;
}

// Every compiled variant of norm_bundle.
template <typename Elem, RowLayout kRows>
cudaError_t find_bundle(const Plan& plan, const DeviceFacts& device, void (**out)(BundleLaunch)) {
  *out = nullptr;
  cudaError_t err = cudaSuccess;
  const auto take = [&](auto pieces, auto threads) {
    constexpr int kPieces = decltype(pieces)::value, kThreads = decltype(threads)::value;
    if (plan.pieces == kPieces && (kThreads > 0 ? plan.threads == kThreads : plan.threads > kWarp))
      err = prepare<norm_bundle<Elem, kPieces, kRows, kThreads>, false>(device, out);
  };
  constexpr std::integral_constant<int, 2> kTwo;
  constexpr std::integral_constant<int, 3> kThree;
  const auto take_threads = [&](auto threads) {
    take(kTwo, threads);
    take(kThree, threads);
  };
  // plan() has no pairs in three pieces of four threads or fewer, and norm_walk() takes those of a warp as well.
  take(kTwo, std::integral_constant<int, 4>());
  take_threads(std::integral_constant<int, 8>());
  take_threads(std::integral_constant<int, 16>());
  if constexpr (kRows == RowLayout::kShifted) {
    take_threads(std::integral_constant<int, 1>());
    take_threads(std::integral_constant<int, 2>());
    take(kThree, std::integral_constant<int, 4>());
    take_threads(std::integral_constant<int, kWarp>());
    take_threads(std::integral_constant<int, 0>());
    take(std::integral_constant<int, 4>(), std::integral_constant<int, 0>());
  }
  return err;
}

// Whether each access to a row is aligned, which the row's length alone does not say.
template <typename Elem, RowLayout kRows>
bool accesses_are_aligned(const NormRows& p) {
  constexpr int64_t kElem = sizeof(Elem), kBytes = kAccessElements<Elem, kRows> * kElem;
  return rows_are_aligned(p.x, p.rows, p.x_stride * kElem, kBytes) && is_aligned(p.y, kBytes);
}

// Whether each row of x and of y begins, and ends, at multiples of 16 bytes.
template <typename Elem>
bool rows_are_whole(const NormRows& p) {
  return accesses_are_aligned<Elem, RowLayout::kWhole>(p) && p.cols * sizeof(Elem) % kMaxAccessBytes == 0;
}

// How rows that are not whole are added up, which follows from their length alone.
template <typename Elem>
RowLayout ragged_rows(int64_t cols, const Plan& plan) {
  const int64_t bytes = cols * static_cast<int64_t>(sizeof(Elem));
  if (bytes % kMaxAccessBytes == 0) return RowLayout::kShifted;  // views of rows that are whole elsewhere
  if (sizeof(Elem) == 2 && cols % kAccessElements<Elem, RowLayout::kPairs> == 0) return RowLayout::kPairs;
  const bool fits = kTakesWordsInPart<Elem> || plan.threads >= kWarp;
  return fits && cols % kWordElements<Elem> == 0 ? RowLayout::kWords : RowLayout::kShifted;
}

// The kernel, which may then be launched with as much shared memory as a block can have; and how many clusters of
// `cluster` of its blocks the device holds at once where each takes a multiprocessor for itself. CUDA is asked once a
// device and size of cluster.
template <auto kKernel>
cudaError_t resident_clusters(int cluster, const DeviceFacts& device, int* out) {
  static std::array<std::array<std::atomic<int>, kMaxCluster + 1>, kMaxDevices> known{};
  std::atomic<int>& entry = known[device.index][cluster];
  if ((*out = entry.load(std::memory_order_acquire)) > 0) return cudaSuccess;
  const auto kernel = reinterpret_cast<const void*>(kKernel);
  const LaunchConfig config(dim3(static_cast<unsigned>(cluster)), dim3(kClusterThreads), device.shared_bytes_block,
                            cluster, false, nullptr);
  cudaError_t err = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(device.shared_bytes_block));
  if (err == cudaSuccess && cluster > kPortableCluster)
    err = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (err == cudaSuccess) err = cudaOccupancyMaxActiveClusters(out, kernel, config.get());
  if (err != cudaSuccess) return err;
  *out = std::max(*out, 1);  // the launch will say why none fits
  entry.store(*out, std::memory_order_release);
  return err;
}

// Has norm_bundle() take the rows, if it can and there are many; otherwise there is no answer.
template <typename Elem, RowLayout kRows>
std::optional<cudaError_t> launch_bundles(const NormRows& rows, const Plan& plan, const DeviceFacts& device,
                                          cudaStream_t stream) {
  const Bundles bundles = bundles_of(plan, rows.cols, rows.x_stride, device);
  if (!takes_bundles(bundles, plan, rows.rows, kRows == RowLayout::kPairs, device.sms)) return std::nullopt;
  if (kRows != RowLayout::kShifted && !accesses_are_aligned<Elem, kRows>(rows)) return std::nullopt;
  void (*kernel)(BundleLaunch);
  const cudaError_t err = find_bundle<Elem, kRows>(plan, device, &kernel);
  if (err != cudaSuccess) return err;
  if (!kernel) return std::nullopt;
  BundleLaunch p{rows};
  p.bundle_rows = bundles.rows;
  p.buffer_bytes = static_cast<int>(bundles.buffer_bytes);
  p.out_buffers = bundles.out_buffers;
  const int64_t blocks =
      std::min(int64_t{bundles.resident} * device.sms, (rows.rows + bundles.rows - 1) / bundles.rows);
  const LaunchConfig config(dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(bundles.threads)),
                            bundles.shared_bytes(), 1, true, stream);
  return cudaLaunchKernelEx(config.get(), kernel, p);
}

template <typename Elem, typename Param>
cudaError_t launch_cluster(const NormRows& rows, const DeviceFacts& device, cudaStream_t stream) {
  ClusterLaunch p{rows};
  int clusters = 0;
  cudaError_t err = resident_clusters<norm_cluster<Elem, Param>>(p.cluster, device, &clusters);
  if (err != cudaSuccess) return err;
  clusters = static_cast<int>(std::min<int64_t>(clusters, p.rows));
  const auto bytes_with = [&](int groups, bool holds) {
    const int64_t held = holds ? held_bytes<Elem, Param>() : 0;
    return cluster_room(groups, p.threads / kWarp, p.cluster, held, sizeof(AccOf<Elem>)).bytes;
  };
  p.holds = bytes_with(1, true) <= device.shared_bytes_block;
  const auto shared_bytes = [&](int groups) { return bytes_with(groups, p.holds); };
  p.groups = 1;
  while ((p.groups + 1) * p.threads <= kClusterThreads && shared_bytes(p.groups + 1) <= device.shared_bytes_block &&
         static_cast<int64_t>(p.groups) * clusters < p.rows)
    ++p.groups;
  const LaunchConfig config(dim3(static_cast<unsigned>(clusters * p.cluster)),
                            dim3(static_cast<unsigned>(p.groups * p.threads)), shared_bytes(p.groups), p.cluster, true,
                            stream);
  return cudaLaunchKernelEx(config.get(), norm_cluster<Elem, Param>, p);
}

template <typename Elem, typename Param>
cudaError_t launch_split(const NormRows& p, const DeviceFacts& device, void* workspace, cudaStream_t stream) {
  using Acc = AccOf<Elem>;
  const int64_t chunks = split_chunks(p.cols, sizeof(Elem));
  const bool whole = rows_are_whole<Elem>(p);
  // Of rows that start anywhere, a granule may begin before the first column.
  constexpr int64_t kAccess = kMaxAccessBytes / sizeof(Elem), kBlockCols = kSplitThreads * kAccess;
  const int64_t blocks_a_row = (kAccess - 1 + p.cols + kBlockCols - 1) / kBlockCols;
  const int64_t most_rows = INT_MAX / std::max(chunks, blocks_a_row);
  Acc* means = static_cast<Acc*>(workspace);  // [rows, chunks]
  Acc* squares = means + p.rows * chunks;     // [rows, chunks]
  if (most_rows == 0) return cudaErrorInvalidValue;
  NormRows part = p;
  for (int64_t left = p.rows; left > 0; left -= most_rows) {
    part.rows = std::min(left, most_rows);
    const auto launch = [&](auto kernel, int64_t blocks, auto... more) {
      const LaunchConfig config(dim3(static_cast<unsigned>(blocks)), dim3(kSplitThreads), 0, 1, device.has_hopper_code,
                                stream);
      return cudaLaunchKernelEx(config.get(), kernel, part, means, squares, chunks, more...);
    };
    cudaError_t err = launch(whole ? split_moments<Elem, RowLayout::kWhole> : split_moments<Elem, RowLayout::kShifted>,
                             part.rows * chunks);
    if (err == cudaSuccess) err = launch(split_combine<Elem>, part.rows);
    if (err == cudaSuccess)
      err = whole ? launch(split_normalize_whole<Elem, Param>, part.rows * chunks)
                  : launch(split_normalize_shifted<Elem, Param>, part.rows * blocks_a_row,
                           static_cast<unsigned>(blocks_a_row));
    if (err != cudaSuccess) return err;
    part.x = static_cast<const Elem*>(part.x) + part.rows * part.x_stride;
    part.y = static_cast<Elem*>(part.y) + part.rows * part.cols;
    if (part.mean) {
      part.mean = static_cast<Acc*>(part.mean) + part.rows;
      part.rstd = static_cast<Acc*>(part.rstd) + part.rows;
    }
    means += part.rows * chunks;
    squares += part.rows * chunks;
  }
  return cudaSuccess;
}

template <typename Elem, typename Param>
const char* run_forward(NormRows p, const Plan& plan, const DeviceFacts& device, void* workspace, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  p.threads = plan.threads;
  p.cluster = plan.cluster;
  while (1 << p.threads_log2 < plan.threads) ++p.threads_log2;
  p.per_col = 1.0 / static_cast<double>(p.cols);
  p.per_col_f = static_cast<float>(p.per_col);
  p.eps_f = static_cast<float>(p.eps);
  cudaError_t err = cudaErrorInvalidValue;
  if (plan.pieces == 0) {
    err = launch_split<Elem, Param>(p, device, workspace, s);
  } else if (plan.cluster > 1) {
    if (plan.pieces == kClusterPieces && rows_are_whole<Elem>(p)) err = launch_cluster<Elem, Param>(p, device, s);
  } else {
    const bool past_l2 = 2 * p.rows * p.cols * static_cast<int64_t>(sizeof(Elem)) > device.l2_bytes;
    const bool whole = rows_are_whole<Elem>(p);
    const RowLayout rows = whole ? RowLayout::kWhole : ragged_rows<Elem>(p.cols, plan);
    const bool full = sizeof(Elem) <= 4 && whole && p.weight && p.bias && fills_threads(plan, p.cols, sizeof(Elem));
    constexpr bool kWide = sizeof(Param) > sizeof(Elem);
    const Fetch fetch = fetch_of(plan, p.rows, p.cols, sizeof(Elem), full, kWide, past_l2, device.sms);
    // Whole rows of a warp with 2 pieces a lane are better off without the fixed number of lanes if they fit L2
    // (4096x512 float16 on an H200: 3.78 us, with it 3.85; past L2 it gains 2 %).
    const bool warps = p.threads > kWarp || (p.threads == kWarp && !(whole && plan.pieces == 2 && !past_l2));
    void (*kernel)(NormRows) = nullptr;
    int64_t rows_a_group = 1;
    if constexpr (sizeof(Elem) <= 4) {
      if (full && !past_l2 && short_rows_fit(p.rows, plan.pieces, plan.threads, kWide, device.sms))
        kernel = find_short<Elem, Param>(plan.pieces, plan.threads);
      if (kernel) rows_a_group = kRowsTogether;
      else if (full && warps) kernel = find_forward<Elem, Param, RowLayout::kFull, true>(plan.pieces, fetch);
    }
    const auto find = [&](auto wanted) {
      constexpr RowLayout kRows = decltype(wanted)::value;
      if (kernel || rows != kRows) return;
      if constexpr (sizeof(Elem) == 2 && !kWide && (kRows == RowLayout::kShifted || kRows == RowLayout::kPairs)) {
        if (const auto bundled = launch_bundles<Elem, kRows>(p, plan, device, s)) {
          err = *bundled;
          return;
        }
      }
      if constexpr (sizeof(Elem) == 2 && !kWide && (kRows == RowLayout::kWords || kRows == RowLayout::kPairs)) {
        const int64_t many =
            accesses_are_aligned<Elem, kRows>(p) ? rows_to_walk(p.rows, plan.pieces, plan.threads, device.sms) : 1;
        if (many > 1)
          kernel = warps ? find_walk<Elem, kRows, true>(plan.pieces) : find_walk<Elem, kRows, false>(plan.pieces);
        if (kernel) {
          rows_a_group = many;
          return;
        }
      }
      kernel = warps ? find_forward<Elem, Param, kRows, true>(plan.pieces, fetch)
                     : find_forward<Elem, Param, kRows, false>(plan.pieces, fetch);
    };
    find(std::integral_constant<RowLayout, RowLayout::kWhole>());
    find(std::integral_constant<RowLayout, RowLayout::kShifted>());
    find(std::integral_constant<RowLayout, RowLayout::kWords>());
    if constexpr (sizeof(Elem) == 2) find(std::integral_constant<RowLayout, RowLayout::kPairs>());
    const int blocks_together = rows == RowLayout::kShifted && !warps && p.threads >= kAlikeThreads
                                    ? kAlikeRows / (kSmallGroupBlock / kWarp)
                                    : 1;
    if (kernel) err = launch_rows<Elem>(kernel, p, rows_a_group, blocks_together, device.has_hopper_code, s);
  }
  if (err == cudaSuccess) return nullptr;
  cudaGetLastError();  // reported here; the next call must not see it again
  return cudaGetErrorString(err);
}

}  // namespace fastln
