// Programmatic dependent launch, see wait_for_previous_kernel() in vec.cuh.
#pragma once

#include <cuda_runtime_api.h>

namespace fastln {

inline cudaLaunchAttribute dependent_launch() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

}  // namespace fastln
