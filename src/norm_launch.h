// Entry points of the general kernels for the bindings.
#pragma once

#include <cstdint>

#include "device.h"
#include "norm_backward_plan.h"
#include "norm_rows.h"
#include "tuning.h"

namespace fastln {

// Launches the forward on `stream` (a cudaStream_t of the current device, which the facts are of).
// `workspace` holds split_workspace_values() values of the accumulate type where plan.pieces is 0, and
// may be null otherwise. weight and bias begin at multiples of 16 bytes, and with a
// cluster so do the rows of x. Returns null, or CUDA's words for what went wrong. rows and cols are at least 1.
//
// One for each pair of element and parameter type, compiled from a file an element type.
using ForwardLauncher = const char* (*)(const NormRows&, const Plan&, const DeviceFacts&, void* workspace,
                                        void* stream);
const char* norm_forward_f16_f16(const NormRows&, const Plan&, const DeviceFacts&, void*, void*);
const char* norm_forward_f16_f32(const NormRows&, const Plan&, const DeviceFacts&, void*, void*);
const char* norm_forward_bf16_bf16(const NormRows&, const Plan&, const DeviceFacts&, void*, void*);
const char* norm_forward_bf16_f32(const NormRows&, const Plan&, const DeviceFacts&, void*, void*);
const char* norm_forward_f32_f32(const NormRows&, const Plan&, const DeviceFacts&, void*, void*);
const char* norm_forward_f64_f64(const NormRows&, const Plan&, const DeviceFacts&, void*, void*);

// Blocks of a cluster that plan() and plan_backward() may plan with on the current device, which the facts are of; 1
// for no clusters. Throw std::runtime_error when CUDA cannot tell.
int forward_max_cluster(const DeviceFacts& device);
int backward_max_cluster(const DeviceFacts& device);

// The backward, likewise. `workspace` holds backward_workspace_bytes() (norm_backward_plan.h) bytes, 16-byte aligned,
// and may be null for none. weight, dx, dweight and dbias begin at multiples of 16 bytes, and so do the rows of
// dy and x unless rows_are_ragged(), in which case those may lie anywhere. The plan is that of rows, columns, element
// size and device.
using BackwardLauncher = const char* (*)(const NormGrads&, const BackwardPlan&, const DeviceFacts&, void* workspace,
                                         void* stream);
const char* norm_backward_f16_f16(const NormGrads&, const BackwardPlan&, const DeviceFacts&, void*, void*);
const char* norm_backward_f16_f32(const NormGrads&, const BackwardPlan&, const DeviceFacts&, void*, void*);
const char* norm_backward_bf16_bf16(const NormGrads&, const BackwardPlan&, const DeviceFacts&, void*, void*);
const char* norm_backward_bf16_f32(const NormGrads&, const BackwardPlan&, const DeviceFacts&, void*, void*);
const char* norm_backward_f32_f32(const NormGrads&, const BackwardPlan&, const DeviceFacts&, void*, void*);
const char* norm_backward_f64_f64(const NormGrads&, const BackwardPlan&, const DeviceFacts&, void*, void*);

constexpr int kChunkBytes = 16 * 1024;  // of a row, where it is split
inline int64_t split_chunks(int64_t cols, int64_t element_bytes) {
  const int64_t chunk = kChunkBytes / element_bytes;
  return (cols + chunk - 1) / chunk;
}
inline int64_t split_workspace_values(int64_t rows, int64_t cols, int64_t element_bytes) {
  return 2 * rows * split_chunks(cols, element_bytes);
}

}  // namespace fastln
