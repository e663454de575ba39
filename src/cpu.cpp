// The eight kernels on the CPU: the default where there is no GPU, from the same list, with the same
// accumulate type and the same order of steps as layer_norm.cuh, so that the float16-accumulating ones
// overflow on the same rows.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include <torch/headeronly/util/Half.h>

#include "launch.h"

namespace fastln {
namespace {

using half = c10::Half;  // each operator rounds its result to half, as the GPU's half instructions do

template <typename Acc>
Acc reciprocal_sqrt(Acc a) {
  return static_cast<Acc>(1.0f / std::sqrt(static_cast<float>(a)));
}

// a * b + c: rounded once for half, as on the GPU. For float, whose fused form is a call into the C library where
// the CPU need not have the instruction, twice.
half fma(half a, half b, half c) {
  return static_cast<half>(static_cast<float>(a) * static_cast<float>(b) + static_cast<float>(c));
}
float fma(float a, float b, float c) { return a * b + c; }

template <typename Acc, typename Elem>
Acc affine_at(const Affine& affine, int64_t col) {
  switch (affine.kind) {
    case Affine::Kind::kElement: return static_cast<Acc>(static_cast<const Elem*>(affine.data)[col]);
    case Affine::Kind::kFloat32: return static_cast<Acc>(static_cast<const float*>(affine.data)[col]);
    case Affine::Kind::kScalar: break;
  }
  return static_cast<Acc>(affine.value);
}

// Sum of kItems values in the order of Lanes::total(), or of their squares in that of Lanes::total_squares(). (A
// packed lane i holds items 2i and 2i + 1, so its pairing is this one too.)
template <bool kSquares, int kItems, typename Acc>
Acc total(Acc (&v)[kItems]) {
  int width = kItems / 2;
  if constexpr (kSquares && kItems > 2) {
    for (int i = 0; i < width; ++i) v[i] = fma(v[i], v[i], v[i + width] * v[i + width]);
    width /= 2;
  } else if constexpr (kSquares) {
    for (Acc& item : v) item = item * item;
  }
  for (; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) v[i] = v[i] + v[i + width];
  return v[0];
}

// The butterfly of warp_sum(), for lane 0.
template <typename Acc>
Acc warp_sum(Acc* v) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    for (int i = 0; i < offset; ++i) v[i] = v[i] + v[i + offset];
  return v[0];
}

// The second stage of BlockSum: 16 bytes of the warps' sums, as sum_shared16() adds them, then those sums.
template <typename Acc>
Acc sum_of_warps(const Acc (&v)[kWarp]) {
  constexpr int kPerRead = 16 / sizeof(Acc), kReads = kWarp / kPerRead;
  Acc read[kReads];
  for (int i = 0; i < kReads; ++i) {
    const Acc* w = v + kPerRead * i;
    if constexpr (kPerRead == 8) read[i] = ((w[0] + w[2]) + (w[4] + w[6])) + ((w[1] + w[3]) + (w[5] + w[7]));
    else read[i] = (w[0] + w[1]) + (w[2] + w[3]);
  }
  for (int offset = kReads / 2; offset > 0; offset /= 2)
    for (int i = 0; i < offset; ++i) read[i] = read[i] + read[i + offset];
  return read[0];
}

// The average over a row of f(col), or of its square, which a block of `threads` would compute.
template <bool kSquares, int kItems, int kAccess, typename Acc, typename F>
Acc block_average(int64_t cols, int threads, std::vector<Acc>& partial, F f) {
  constexpr bool kShares = std::is_same_v<Acc, float>;    // see average_share() in arith.cuh
  const float per_col = 1.0f / static_cast<float>(cols);  // as the GPU's launcher has it
  partial.assign(std::max(threads, kWarp) + kWarp, Acc(0.0f));
  const int64_t step = static_cast<int64_t>(threads) * kItems;
  for (int64_t base = 0; base < cols; base += step) {
    for (int t = 0; t < threads; ++t) {
      Acc item[kItems];
      for (int i = 0; i < kItems; ++i) {
        const int64_t col = base + (static_cast<int64_t>(i / kAccess) * threads + t) * kAccess + i % kAccess;
        item[i] = col < cols ? f(col) : Acc(0.0f);
      }
      const Acc sum = total<kSquares>(item);
      partial[t] = partial[t] + (kShares ? static_cast<Acc>(sum * per_col) : sum);
    }
  }
  Acc warps[kWarp];
  std::fill(warps, warps + kWarp, Acc(0.0f));
  for (int w = 0; w < threads / kWarp; ++w) warps[w] = warp_sum(partial.data() + w * kWarp);
  const Acc sum = threads == kWarp ? warps[0] : sum_of_warps(warps);
  return kShares ? sum : static_cast<Acc>(static_cast<float>(sum) * per_col);
}

template <typename Elem, typename Acc, int kItems, int kAccess>
void normalize_rows(const Rows& p, int64_t begin, int64_t end) {
  const int64_t threads_wanted = (p.cols + kItems - 1) / kItems;
  const int threads =
      held_items(kItems, sizeof(Acc), p.cols) ? (threads_wanted + kWarp - 1) / kWarp * kWarp : kStepThreads;
  const Acc eps = static_cast<Acc>(p.eps);
  std::vector<Acc> partial;
  for (int64_t row = begin; row < end; ++row) {
    const Elem* x = static_cast<const Elem*>(p.x) + row * p.x_stride;  // [cols]
    Elem* y = static_cast<Elem*>(p.y) + row * p.cols;                  // [cols]
    const Acc mean = block_average<false, kItems, kAccess, Acc>(p.cols, threads, partial,
                                                                [&](int64_t col) { return static_cast<Acc>(x[col]); });
    const Acc variance = block_average<true, kItems, kAccess, Acc>(
        p.cols, threads, partial, [&](int64_t col) { return static_cast<Acc>(x[col]) - mean; });
    const Acc rstd = reciprocal_sqrt(static_cast<Acc>(variance + eps));
    for (int64_t col = 0; col < p.cols; ++col) {
      const Acc d = static_cast<Acc>(x[col]) - mean;
      y[col] = static_cast<Elem>(fma(d * rstd, affine_at<Acc, Elem>(p.weight, col), affine_at<Acc, Elem>(p.bias, col)));
    }
  }
}

}  // namespace

#define FASTLN_DEFINE(name, Elem, Acc, items, access)                        \
  void cpu_layer_norm_##name(const Rows& rows, int64_t begin, int64_t end) { \
    if (held_items(items, sizeof(Acc), rows.cols) == 2 * items)              \
      normalize_rows<Elem, Acc, 2 * items, access>(rows, begin, end);        \
    else normalize_rows<Elem, Acc, items, access>(rows, begin, end);         \
  }
FASTLN_KERNELS(FASTLN_DEFINE)
#undef FASTLN_DEFINE

}  // namespace fastln
