// Entry points of the kernels, GPU and CPU, for the bindings.
#pragma once

#include <cstdint>

#include "device.h"
#include "kernels.h"
#include "rows.h"

namespace fastln {

// Declares, for each row of the list,
//   const char* cuda_layer_norm_<name>(const Rows&, const DeviceFacts& device, void* stream)
//     launches on `stream` (a cudaStream_t of the current device, `device`); returns null, or CUDA's words for
//     what went wrong. Does nothing for zero rows.
//   void cpu_layer_norm_<name>(const Rows&, int64_t begin, int64_t end)
//     normalizes rows [begin, end).
#define FASTLN_DECLARE(name, Elem, Acc, items, access)                                           \
  const char* cuda_layer_norm_##name(const Rows& rows, const DeviceFacts& device, void* stream); \
  void cpu_layer_norm_##name(const Rows& rows, int64_t begin, int64_t end);
FASTLN_KERNELS(FASTLN_DECLARE)
#undef FASTLN_DECLARE

}  // namespace fastln
