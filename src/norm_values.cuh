// A row, or a part of one, that a thread holds as unpacked values, access by access: its two sums. kSums: independent
// sums, over the values taken in order, that are then added pairwise.
#pragma once

#include "reduce.cuh"

namespace fastln {

template <int kSums, typename Acc, int kCount, int kAccess>
__device__ __forceinline__ Acc sum_values(const Acc (&v)[kCount][kAccess]) {
  Acc sums[kSums];
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
#pragma unroll
    for (int i = 0; i < kAccess; ++i) {
      const int k = j * kAccess + i;
      sums[k % kSums] = k < kSums ? v[j][i] : add(sums[k % kSums], v[j][i]);
    }
  }
  return pairwise_sum(sums);
}

// Subtracts the mean from all, and returns the sum of their squares. inside(j): whether the row has access j; past it,
// zeros are held, and stay so: about zero they add nothing.
template <int kSums, typename Acc, int kCount, int kAccess, typename Inside>
__device__ __forceinline__ Acc centre_values(Acc (&v)[kCount][kAccess], Acc mean, const Inside& inside) {
  Acc sums[kSums];
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const Acc centre = inside(j) ? mean : Acc(0);
#pragma unroll
    for (int i = 0; i < kAccess; ++i) {
      const int k = j * kAccess + i;
      v[j][i] = sub(v[j][i], centre);
      sums[k % kSums] = k < kSums ? mul(v[j][i], v[j][i]) : fma(v[j][i], v[j][i], sums[k % kSums]);
    }
  }
  return pairwise_sum(sums);
}

}  // namespace fastln
