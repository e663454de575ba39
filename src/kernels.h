// The list of kernels. Schemas, CUDA and CPU bindings, fakes, tests, benchmarks and the README's
// table are loops over it, so a new variant is one more row here.
//
//   X(name, Elem, Acc, items, access)
//     name    the op is fastln::layer_norm_<name>
//     Elem    element type of input and output: half or float
//     Acc     type of every sum, of mean, variance, rstd and of the final multiply-add
//     items   elements that one thread holds
//     access  elements that one load or store moves
//
// `half` and `float` are placeholders that each expansion maps to its own types (CUDA's __half on the
// GPU, torch's Half on the CPU).
#pragma once

#define FASTLN_KERNELS(X)             \
  X(f32, float, float, 1, 1)          \
  X(f32x4, float, float, 4, 4)        \
  X(f16_f16, half, half, 1, 1)        \
  X(f16_f32, half, float, 1, 1)       \
  X(f16x2_f16, half, half, 2, 2)      \
  X(f16x8_f16, half, half, 8, 2)      \
  X(f16x8_pack_f16, half, half, 8, 8) \
  X(f16x8_pack_f32, half, float, 8, 8)
