// Rows that start anywhere. Where a row's length is no multiple of 16 bytes (or its address or stride is
// none), 16-byte accesses cannot be a thread's own columns. They are granules, aligned in memory, and a
// shift turns two neighbouring granules into the columns that lie across them.
#pragma once

#include <cstdint>

#include "vec.cuh"

namespace fastln {

// Elements that lie before `p` in its granule.
template <typename T>
__device__ __forceinline__ int granule_offset(const T* p) {
  constexpr int kAccess = kMaxAccessBytes / static_cast<int>(sizeof(T));
  return static_cast<int>(reinterpret_cast<uintptr_t>(p) / sizeof(T) % kAccess);
}

// Elements [offset, offset + kN) of lo followed by hi; 0 <= offset < kN, the same for a whole row.
template <typename T, int kN>
__device__ __forceinline__ Vec<T, kN> shift(const Vec<T, kN>& lo, const Vec<T, kN>& hi, int offset) {
  constexpr int kWords = Vec<T, kN>::kRegisters;
  static_assert(kWords == 4);
  const int bytes = offset * static_cast<int>(sizeof(T));
  uint32_t word[2 * kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    word[i] = lo.bits[i];
    word[kWords + i] = hi.bits[i];
  }
#pragma unroll
  for (int by = 2; by > 0; by /= 2) {  // whole words, two and then one
    const bool moves = bytes / 4 & by;
#pragma unroll
    for (int i = 0; i + by < 2 * kWords; ++i) word[i] = moves ? word[i + by] : word[i];
  }
  Vec<T, kN> out;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    if constexpr (sizeof(T) < 4) out.bits[i] = __funnelshift_r(word[i], word[i + 1], bytes % 4 * 8);
    else out.bits[i] = word[i];
  }
  return out;
}

// A granule of x. One that ends past `end`, the end of the whole tensor, is read element by element; one
// that only ends past its row is not: what lies there is other elements of the tensor, and unused. (Nor can
// a granule begin before the tensor's memory, which is aligned.)
template <typename T, int kN>
__device__ __forceinline__ void load_granule(Vec<T, kN>& v, const T* p, const T* end) {
  if (p + kN <= end) {
    load_vec(v, p);
  } else {
#pragma unroll
    for (int i = 0; i < kN; ++i)
      if (p + i < end) set_item(v, i, p[i]);
  }
}

// Writes a row whose columns lie in shared memory, from a granule on, to `y`, by the threads of a group:
// whole granules, and single elements at the row's two ends.
template <typename T>
__device__ __forceinline__ void store_shifted(T* y, const T* shared, int cols, int t, int threads) {
  constexpr int kAccess = kMaxAccessBytes / static_cast<int>(sizeof(T));
  const int head = min((kAccess - granule_offset(y)) % kAccess, cols);  // columns before the first whole granule
  const int tail = head + (cols - head) / kAccess * kAccess;            // and from the end of the last one on
  for (int col = head + t * kAccess; col < tail; col += threads * kAccess) {
    Vec<T, kAccess> lo, hi{};
    load_vec(lo, shared + col - head);
    if (head != 0) load_vec(hi, shared + col - head + kAccess);
    store_vec(y + col, shift(lo, hi, head));
  }
  for (int i = t; i < kAccess; i += threads) {
    if (i < head) y[i] = shared[i];
    if (i < cols - tail) y[tail + i] = shared[tail + i];
  }
}

}  // namespace fastln
