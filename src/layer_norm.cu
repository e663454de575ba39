// Instantiations: one launcher for each row of the list.
#include "launch.h"
#include "launch.cuh"

namespace fastln {

#define FASTLN_DEFINE(name, Elem, Acc, items, access)                                             \
  const char* cuda_layer_norm_##name(const Rows& rows, const DeviceFacts& device, void* stream) { \
    return launch_layer_norm<Elem, Acc, items, access>(rows, device, stream);                     \
  }
FASTLN_KERNELS(FASTLN_DEFINE)
#undef FASTLN_DEFINE

}  // namespace fastln
