// Host side of layer_norm.cuh: block size, width of access, launch.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>
#include <type_traits>

#include <cuda_runtime.h>

#include "aligned.h"
#include "dependent_launch.h"
#include "device.h"
#include "layer_norm.cuh"

namespace fastln {

// A vector of the input's type is read by whole accesses, a float32 one element by element.
template <typename Elem, int kAccess>
bool affine_is_aligned(const Affine& affine) {
  return affine.kind != Affine::Kind::kElement || is_aligned(affine.data, kAccess * sizeof(Elem));
}

// Whether every access of kAccess elements is aligned in every row.
template <typename Elem, int kAccess>
bool accesses_are_aligned(const Rows& p) {
  const bool rows_keep_alignment = p.rows == 1 || (p.x_stride % kAccess == 0 && p.cols % kAccess == 0);
  return rows_keep_alignment && is_aligned(p.x, kAccess * sizeof(Elem)) && is_aligned(p.y, kAccess * sizeof(Elem)) &&
         affine_is_aligned<Elem, kAccess>(p.weight) && affine_is_aligned<Elem, kAccess>(p.bias);
}

template <typename Elem, typename Acc, int kItems, int kAccess, int kRun, Params kParams, bool kLong>
cudaError_t launch_rows(Rows p, bool has_dependent_launch, cudaStream_t stream) {
  const int64_t threads_wanted = (p.cols + kItems - 1) / kItems;
  const int threads = static_cast<int>(
      std::min<int64_t>((threads_wanted + kWarp - 1) / kWarp * kWarp, most_threads<Acc, kItems, kRun, kLong>()));
  // A grid holds 2^31 - 1 blocks; more rows than that take several launches.
  for (int64_t left = p.rows; left > 0;) {
    const int64_t blocks = std::min<int64_t>(left, INT_MAX);
    const LaunchConfig config(dim3(static_cast<unsigned>(blocks)), dim3(threads), 0, 1, has_dependent_launch, stream);
    const cudaError_t err =
        cudaLaunchKernelEx(config.get(), layer_norm_rows<Elem, Acc, kItems, kAccess, kRun, kParams, kLong>, p);
    if (err != cudaSuccess) return err;
    p.x = static_cast<const Elem*>(p.x) + blocks * p.x_stride;
    p.y = static_cast<Elem*>(p.y) + blocks * p.cols;
    left -= blocks;
  }
  return cudaSuccess;
}

// A row that a block holds in registers, kHeld items a thread.
template <typename Elem, typename Acc, int kHeld, int kAccess>
cudaError_t launch_held(const Rows& p, bool aligned, bool dependent, cudaStream_t stream) {
  const auto both = [&](Affine::Kind kind) { return p.weight.kind == kind && p.bias.kind == kind; };
  if (!aligned) return launch_rows<Elem, Acc, kHeld, 1, kAccess, Params::kAny, false>(p, dependent, stream);
  if (p.cols % kAccess == 0 && both(Affine::Kind::kScalar))
    return launch_rows<Elem, Acc, kHeld, kAccess, kAccess, Params::kScalars, false>(p, dependent, stream);
  if (p.cols % kAccess == 0 && both(Affine::Kind::kElement))
    return launch_rows<Elem, Acc, kHeld, kAccess, kAccess, Params::kVectors, false>(p, dependent, stream);
  return launch_rows<Elem, Acc, kHeld, kAccess, kAccess, Params::kAny, false>(p, dependent, stream);
}

template <typename Elem, typename Acc, int kItems, int kAccess>
const char* launch_layer_norm(Rows p, const DeviceFacts& device, void* stream) {
  if (p.rows == 0 || p.cols == 0) return nullptr;
  p.per_col = 1.0f / static_cast<float>(p.cols);
  const auto s = static_cast<cudaStream_t>(stream);
  const bool dependent = device.has_hopper_code;
  const bool aligned = accesses_are_aligned<Elem, kAccess>(p);
  cudaError_t err = cudaErrorInvalidValue;
  switch (held_items(kItems, sizeof(Acc), p.cols)) {
    case kItems: err = launch_held<Elem, Acc, kItems, kAccess>(p, aligned, dependent, s); break;
    case 2 * kItems:
      if constexpr (block_threads(kItems, sizeof(Acc)) == 512)
        err = launch_held<Elem, Acc, 2 * kItems, kAccess>(p, aligned, dependent, s);
      break;
    default:
      err = aligned ? launch_rows<Elem, Acc, kItems, kAccess, kAccess, Params::kAny, true>(p, dependent, s)
                    : launch_rows<Elem, Acc, kItems, 1, kAccess, Params::kAny, true>(p, dependent, s);
  }
  if (err == cudaSuccess) return nullptr;
  cudaGetLastError();  // reported here; the next call must not see it again
  return cudaGetErrorString(err);
}

}  // namespace fastln
