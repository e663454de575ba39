// A row, or a part of one, that a thread holds in packed pieces of 16 bytes: its two sums, and y. Values are unpacked
// anew each time, which leaves the registers to more pieces.
#pragma once

#include "reduce.cuh"
#include "vec.cuh"

namespace fastln {

// The thread's sum: independent ones over the pieces, then added pairwise.
template <typename Elem, int kAccess, int kPieces>
__device__ __forceinline__ AccOf<Elem> sum_pieces(const Vec<Elem, kAccess> (&held)[kPieces]) {
  AccOf<Elem> partial[kAccess];
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    AccOf<Elem> v[kAccess];
    unpack(v, opaque(held[j]));
#pragma unroll
    for (int i = 0; i < kAccess; ++i) partial[i] = j == 0 ? v[i] : partial[i] + v[i];
  }
  return pairwise_sum(partial);
}

// The sum of squares about the mean, likewise. inside(j): whether the row has piece j; past it, zeros are held.
template <typename Elem, int kAccess, int kPieces, typename Inside>
__device__ __forceinline__ AccOf<Elem> sum_centred_squares(const Vec<Elem, kAccess> (&held)[kPieces], AccOf<Elem> mean,
                                                           const Inside& inside) {
  using Acc = AccOf<Elem>;
  Acc partial[kAccess];
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    const Acc centre = inside(j) ? mean : Acc(0);  // zeros about zero add nothing
    Acc v[kAccess];
    unpack(v, opaque(held[j]));
#pragma unroll
    for (int i = 0; i < kAccess; ++i) {
      v[i] -= centre;
      partial[i] = j == 0 ? mul(v[i], v[i]) : fma(v[i], v[i], partial[i]);
    }
  }
  return pairwise_sum(partial);
}

// x of kAccess columns becomes y.
template <typename Elem, typename Param, int kAccess>
__device__ __forceinline__ Vec<Elem, kAccess> normalized(const Vec<Elem, kAccess>& x, const Vec<Param, kAccess>& weight,
                                                         const Vec<Param, kAccess>& bias, AccOf<Elem> mean,
                                                         AccOf<Elem> rstd) {
  AccOf<Elem> v[kAccess];
  AccOf<Param> scale[kAccess], shift[kAccess];
  unpack(v, x);
  unpack(scale, weight);
  unpack(shift, bias);
#pragma unroll
  for (int i = 0; i < kAccess; ++i) v[i] = fma(mul(v[i] - mean, rstd), scale[i], shift[i]);
  Vec<Elem, kAccess> y;
  pack(y, v);
  return y;
}

}  // namespace fastln
