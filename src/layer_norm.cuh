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
// What has the input's type is fetched by fetch(), before the reductions, whose barriers hide the latency.
// A float32 vector would take twice the registers, enough to halve the blocks an SM holds, so it is
// fetched where it is used, element by element.
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
    if (is_element(affine)) load_items<kAccess, kAny>(fetched, static_cast<const Elem*>(affine.data), at);
  }

  // Calls f(i, lane) for each lane of the items. Lane by lane, so that few are unpacked at a time.
  template <typename F>
  __device__ __forceinline__ void for_each_lane(const Affine& affine, const At& at, F f) const {
    if (kAny && affine.kind == Affine::Kind::kFloat32) {
      Vec<float, kItems> v{};
#pragma unroll
      for (int i = 0; i < kItems; ++i)
        if (at.column(i) < at.cols) set_item(v, i, static_cast<const float*>(affine.data)[at.column(i)]);
#pragma unroll
      for (int i = 0; i < L::kCount; ++i) f(i, L::lane_of(v, i));
    } else {
      const bool is_vector = is_element(affine);
      const auto value = L::splat(convert<Acc>(affine.value));
#pragma unroll
      for (int i = 0; i < L::kCount; ++i) f(i, is_vector ? L::lane_of(fetched, i) : value);
    }
  }
};

// Threads of a block, at most: the loops of kLong need more registers than 1024 threads leave.
template <bool kLong> constexpr int kBlockThreads = kLong ? kMaxThreads / 2 : kMaxThreads;

// Blocks of that size that an SM must have registers for: two, its limit of threads, where 32 registers a
// thread suffice (with 39, f16x8_pack_f32 took 160 us at 8192x8192 on an H200, not 90).
// Before compute capability 9.0 several accesses a thread take more.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kSeveralAccessesFit = false;
#else
constexpr bool kSeveralAccessesFit = true;
#endif
template <int kItems, int kAccess, Params kParams, bool kLong>
constexpr int kFillsSm = kLong || kParams == Params::kAny || (kItems > kAccess && !kSeveralAccessesFit) ? 1 : 2;

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
__global__ void __launch_bounds__(kBlockThreads<kLong>, (kFillsSm<kItems, kAccess, kParams, kLong>))
    layer_norm_rows(const Rows p) {
  using L = Lanes<Acc, kItems>;
  using Index = std::conditional_t<kLong, int64_t, int>;
  __shared__ __align__(16) Acc partial[2][kMaxWarps];
  const BlockSum<Acc, 2, false> block(partial);

  const int64_t row = blockIdx.x;
  const Elem* x = static_cast<const Elem*>(p.x) + row * p.x_stride;  // [cols]
  Elem* y = static_cast<Elem*>(p.y) + row * p.cols;                  // [cols]
  using At = Items<kRun, Index>;
  constexpr bool kTail = kParams == Params::kAny;
  const Index step = static_cast<Index>(blockDim.x) * kItems;
  const auto at_step = [&](Index base) {
    return At{base, static_cast<Index>(blockDim.x), static_cast<Index>(threadIdx.x), static_cast<Index>(p.cols)};
  };
  const At first = at_step(0);

  using Held = Vec<Elem, kItems>;  // stays packed between the passes, which halves its registers
  const auto load = [&](const At& at) {
    Held v;
    load_items<kAccess, kTail>(v, x, at);
    return v;
  };
  const auto centre = [&](const Held& held, const At& at, Acc mean) {
    L v = L::from(opaque(held));
#pragma unroll
    for (int i = 0; i < L::kCount; ++i) v.lane[i] = sub(v.lane[i], L::splat(mean));
    // Padding must not add mean^2.
    if (at.column(kItems - 1) >= at.cols) v.keep([&](int item) { return at.column(item) < at.cols; });
    return v;
  };
  const auto squares = [&](L v) {
#pragma unroll
    for (int i = 0; i < L::kCount; ++i) v.lane[i] = mul(v.lane[i], v.lane[i]);
    return v.total();
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

  Acc sum = average_share(L::from(held).total(), p.per_col);
  for_each_later_step([&](const At& at) { sum = add(sum, average_share(L::from(load(at)).total(), p.per_col)); });
  const Acc mean = average_total(block.template sum<0>(sum), p.per_col);

  Acc sum_squares = average_share(squares(centre(held, first, mean)), p.per_col);
  for_each_later_step([&](const At& at) {
    sum_squares = add(sum_squares, average_share(squares(centre(load(at), at, mean)), p.per_col));
  });
  const Acc variance = average_total(block.template sum<1>(sum_squares), p.per_col);
  const Acc rstd = reciprocal_sqrt(add(variance, convert<Acc>(p.eps)));

  const auto store = [&](const L& v, const At& at) {
    if (!kEarly || at.base != 0) {
      weight.fetch(p.weight, at);
      bias.fetch(p.bias, at);
    }
    L out;
    weight.for_each_lane(p.weight, at, [&](int i, auto scale) {
      out.lane[i] = mul(mul(v.lane[i], L::splat(rstd)), scale);
    });
    bias.for_each_lane(p.bias, at, [&](int i, auto shift) { out.lane[i] = add(out.lane[i], shift); });
    store_items<kAccess, kTail>(y, out.template to<Elem>(), at);
  };
  store(centre(held, first, mean), first);
  for_each_later_step([&](const At& at) { store(centre(load(at), at, mean), at); });
}

}  // namespace fastln
