// Host side of layer_norm.cuh: block size, width of access, launch.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>
#include <type_traits>

#include <cuda_runtime.h>

#include "layer_norm.cuh"

namespace fastln {

inline bool is_aligned(const void* p, int64_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

// An affine vector is read kAccess columns at a time from its first element on.
template <typename Elem, int kAccess>
bool affine_is_aligned(const Affine& affine) {
  switch (affine.kind) {
    case Affine::Kind::kScalar: return true;
    case Affine::Kind::kElement: return is_aligned(affine.data, kAccess * sizeof(Elem));
    case Affine::Kind::kFloat32:
      return is_aligned(affine.data, std::min<int64_t>(kAccess * sizeof(float), kMaxAccessBytes));
  }
  return false;
}

// Whether every access of kAccess elements is aligned in every row.
template <typename Elem, int kAccess>
bool rows_are_aligned(const Rows& p) {
  const bool rows_keep_alignment = p.rows == 1 || (p.x_stride % kAccess == 0 && p.cols % kAccess == 0);
  return rows_keep_alignment && is_aligned(p.x, kAccess * sizeof(Elem)) &&
         is_aligned(p.y, kAccess * sizeof(Elem)) && affine_is_aligned<Elem, kAccess>(p.weight) &&
         affine_is_aligned<Elem, kAccess>(p.bias);
}

template <typename Elem, typename Acc, int kItems, int kAccess, bool kGeneral, bool kLong>
cudaError_t launch_rows(Rows p, cudaStream_t stream) {
  const int64_t threads_wanted = (p.cols + kItems - 1) / kItems;
  const int threads =
      static_cast<int>(std::min<int64_t>((threads_wanted + kWarp - 1) / kWarp * kWarp, kMaxThreads));
  // A grid holds 2^31 - 1 blocks; more rows than that take several launches.
  for (int64_t left = p.rows; left > 0;) {
    const int64_t blocks = std::min<int64_t>(left, INT_MAX);
    layer_norm_rows<Elem, Acc, kItems, kAccess, kGeneral, kLong>
        <<<static_cast<unsigned>(blocks), threads, 0, stream>>>(p);
    const cudaError_t err = cudaGetLastError();
    if (err != cudaSuccess) return err;
    p.x = static_cast<const Elem*>(p.x) + blocks * p.x_stride;
    p.y = static_cast<Elem*>(p.y) + blocks * p.cols;
    left -= blocks;
  }
  return cudaSuccess;
}

template <typename Elem, typename Acc, int kItems, int kAccess>
const char* launch_layer_norm(Rows p, void* stream) {
  if (p.rows == 0 || p.cols == 0) return nullptr;
  p.per_col = 1.0f / static_cast<float>(p.cols);
  const auto s = static_cast<cudaStream_t>(stream);
  const bool aligned = rows_are_aligned<Elem, kAccess>(p);
  const auto go = [&](auto general, auto is_long) {
    constexpr bool kGeneral = decltype(general)::value, kLong = decltype(is_long)::value;
    return aligned ? launch_rows<Elem, Acc, kItems, kAccess, kGeneral, kLong>(p, s)
                   : launch_rows<Elem, Acc, kItems, 1, kGeneral, kLong>(p, s);
  };
  const bool is_general = p.cols % kAccess != 0 || p.weight.kind == Affine::Kind::kFloat32 ||
                          p.bias.kind == Affine::Kind::kFloat32;
  const bool is_long = p.cols > static_cast<int64_t>(kMaxThreads) * kItems;
  const cudaError_t err = is_long      ? go(std::true_type{}, std::true_type{})
                          : is_general ? go(std::true_type{}, std::false_type{})
                                     : go(std::false_type{}, std::false_type{});
  return err == cudaSuccess ? nullptr : cudaGetErrorString(err);
}

}  // namespace fastln
