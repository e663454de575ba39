// The kernel behind the eight named ops: one template over (element, accumulate, items, access).
#pragma once

#include <cstdint>
#include <type_traits>

#include "reduce.cuh"
#include "rows.h"
#include "vec.cuh"

namespace fastln {

// What a variant of the kernel is compiled for. The first two are the common ones; what they leave out would
// cost them registers and instructions.
enum class Params {
  kScalars,  // weight and bias are numbers; rows end with an access
  kVectors,  // both are vectors of the input's type; rows end with an access
  kAny,      // numbers or vectors, float32 vectors beside half rows, rows that end within an access
};

// weight or bias for a thread's kItems columns. Each branch is the same for the whole grid.
//
// What has the input's type is fetched by fetch(), before the reductions, whose barriers hide the latency, and
// unpacked lane by lane where it is used, so that few lanes are unpacked at a time. A float32 vector would take
// twice the registers, enough to halve the blocks an SM holds, so it is fetched where it is used.
template <typename Elem, typename Acc, int kItems, int kAccess, int kRun, Params kParams, typename Index>
struct AffineItems {
  using L = Lanes<Acc, kItems>;
  using At = Items<kRun, Index>;
  static constexpr bool kAny = kParams == Params::kAny;
  Vec<Elem, kItems> fetched;

  // Whether the vector has the input's type.
  __device__ __forceinline__ static bool is_element(const Affine& affine) {
    return kParams == Params::kVectors || (kAny && affine.kind == Affine::Kind::kElement);
  }

  __device__ __forceinline__ void fetch(const Affine& affine, const At& at) {
    if (is_element(affine)) load_items<kAccess, kAny>(fetched, static_cast<const Elem*>(affine.data) + at.t * kRun, at);
  }

  // A function of i that gives lane i.
  __device__ __forceinline__ auto lanes(const Affine& affine, const At& at) const {
    const auto value = L::splat(convert<Acc>(affine.value));
    if constexpr (kParams == Params::kScalars) {
      return [=](int) { return value; };
    } else if constexpr (kParams == Params::kVectors) {
      return [this](int i) { return L::lane_of(fetched, i); };
    } else {
      L all;
      if (!std::is_same_v<Elem, float> && affine.kind == Affine::Kind::kFloat32) {
        Vec<float, kItems> v{};
#pragma unroll
        for (int i = 0; i < kItems; ++i)
          if (at.column(i) < at.cols) set_item(v, i, static_cast<const float*>(affine.data)[at.column(i)]);
        all = L::from(v);
      } else if (affine.kind == Affine::Kind::kElement) {
        all = L::from(fetched);
      } else {
#pragma unroll
        for (int i = 0; i < L::kCount; ++i) all.lane[i] = value;
      }
      return [all](int i) { return all.lane[i]; };
    }
  }
};

// Threads of a block, at most.
template <typename Acc, int kItems, int kRun, bool kLong>
constexpr int most_threads() {
  return kLong || kItems > kRun ? kStepThreads : block_threads(kItems, sizeof(Acc));
}

// Threads that an SM must have registers for: 2048, its limit, where 32 registers a thread suffice (with 39,
// f16x8_pack_f32 took 160 us at 8192x8192 on an H200, not 90). 16 items take 40, and before compute capability 9.0
// several accesses a thread take more. The loops of a single access take 40 (with 48, for 1024 threads, f32x4 took 195 us
// at 8192x8192, not 160); those of 8 halves do on 9.0.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kSeveralAccessesFit = false;
#else
constexpr bool kSeveralAccessesFit = true;
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
constexpr bool kLoopOf8Fits = false;
#else
constexpr bool kLoopOf8Fits = true;
#endif
template <typename Acc, int kItems, int kAccess, Params kParams, bool kLong>
constexpr int threads_of_sm() {
  if (kLong) return kItems == kAccess && kItems * sizeof(Acc) <= 16 && (kItems <= 4 || kLoopOf8Fits) ? 1536 : 512;
  if (kParams == Params::kAny) return kItems > 8 ? 512 : 1024;
  if (kItems > kAccess && !kSeveralAccessesFit) return 1024;
  return kItems > 8 ? 1536 : 2048;
}

// One block normalizes one row; blockDim.x is any multiple of 32, chosen at run time.
//
// Each thread holds kItems items in registers from the load to the store, so a row of up to
// blockDim.x * kItems columns is read once. With kLong, a longer row is walked in steps of that size, and
// what lies past the first step is read again (from L2, mostly) for each of the passes; without it those
// loops are not compiled, which halves the registers and doubles the blocks an SM holds.
//
// kRun consecutive columns belong to one thread, whether it moves them in one access or, where their addresses
// are not aligned, in single elements (kAccess 1): that changes no sum, so no bit.
//
// Acc is the type of everything between load and store: with half, a sum of squares past 65504 is
// infinite, rstd is 0 and the row comes out as `bias`. That is the hazard these variants exist to show.
template <typename Elem, typename Acc, int kItems, int kAccess, int kRun, Params kParams, bool kLong>
__global__ void __launch_bounds__((most_threads<Acc, kItems, kRun, kLong>()),
                                  (threads_of_sm<Acc, kItems, kAccess, kParams, kLong>() /
                                   most_threads<Acc, kItems, kRun, kLong>())) layer_norm_rows(const Rows p) {
  using L = Lanes<Acc, kItems>;
  using Index = std::conditional_t<kLong, int64_t, int>;
  const int64_t row = blockIdx.x;
  using At = Items<kRun, Index>;
  constexpr bool kTail = kParams == Params::kAny;
  const Index step = static_cast<Index>(blockDim.x) * kItems;
  const auto at_step = [&](Index base) {
    return At{base, static_cast<Index>(blockDim.x), static_cast<Index>(threadIdx.x), static_cast<Index>(p.cols)};
  };
  const At first = at_step(0);
  // This thread's part of [cols], and of y below.
  const Elem* x = opaque(static_cast<const Elem*>(p.x) + row * p.x_stride + first.t * kRun);

  using Held = Vec<Elem, kItems>;  // stays packed between the passes, which halves its registers
  const auto load = [&](const At& at) {
    Held v;
    load_items<kAccess, kTail>(v, x, at);
    return v;
  };
  const auto centre = [&](const Held& held, Acc mean) {
    L v = L::from(opaque(held));
#pragma unroll
    for (int i = 0; i < L::kCount; ++i) v.lane[i] = sub(v.lane[i], L::splat(mean));
    return v;
  };
  const auto centred_squares = [&](const Held& held, const At& at, Acc mean) {
    // Padding, which is held as 0, must add 0 and not mean^2.
    if constexpr (kTail || kAccess < L::kWidth) {
      L v = centre(held, mean);
      if (at.column(kItems - 1) >= at.cols) v.keep([&](int item) { return at.column(item) < at.cols; });
      return v.total_squares();
    } else {
      L v = L::from(opaque(held));
#pragma unroll
      for (int i = 0; i < L::kCount; ++i) {
        const bool inside = at.column(i * L::kWidth / kAccess * kAccess) < at.cols;
        v.lane[i] = sub(v.lane[i], inside ? L::splat(mean) : L::zero());
      }
      return v.total_squares();
    }
  };
  // Calls f(at) for this thread's items past the first step.
  const auto for_each_later_step = [&](auto f) {
    if constexpr (kLong) {
      for (Index base = step; base < first.cols; base += step) f(at_step(base));
    }
  };

  wait_for_previous_kernel();
  const Held held = load(first);
  AffineItems<Elem, Acc, kItems, kAccess, kRun, kParams, Index> weight, bias;
  // Several accesses a thread leave no registers for that.
  constexpr bool kEarly = kItems == kAccess;
  if constexpr (kEarly) {
    weight.fetch(p.weight, first);
    bias.fetch(p.bias, first);
  }
  __shared__ __align__(16) Acc partial[2][kMaxWarps];
  const BlockSum<Acc, 2> block(partial);

  Acc sum = average_share(L::from(held).total(), p.per_col);
  for_each_later_step([&](const At& at) { sum = add(sum, average_share(L::from(load(at)).total(), p.per_col)); });
  const Acc mean = average_total(block.template sum<0>(sum), p.per_col);

  Acc sum_squares = average_share(centred_squares(held, first, mean), p.per_col);
  for_each_later_step([&](const At& at) {
    sum_squares = add(sum_squares, average_share(centred_squares(load(at), at, mean), p.per_col));
  });
  const Acc variance = average_total(block.template sum<1>(sum_squares), p.per_col);
  const Acc rstd = reciprocal_sqrt(add(variance, convert<Acc>(p.eps)));

  Elem* y = opaque(static_cast<Elem*>(p.y) + row * p.cols + first.t * kRun);
  const auto store = [&](const Held& held, const At& at) {
    if (!kEarly || at.base != 0) {
      weight.fetch(p.weight, at);
      bias.fetch(p.bias, at);
    }
    const auto scale = weight.lanes(p.weight, at), shift = bias.lanes(p.bias, at);
    L out = centre(held, mean);
#pragma unroll
    for (int i = 0; i < L::kCount; ++i) out.lane[i] = fma(mul(out.lane[i], L::splat(rstd)), scale(i), shift(i));
    store_items<kAccess, kTail>(y, out.template to<Elem>(), at);
  };
  store(held, first);
  for_each_later_step([&](const At& at) { store(load(at), at); });
}

}  // namespace fastln
