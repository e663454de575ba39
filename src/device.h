// What the launchers and the bindings need to know of a GPU, asked once a device.
#pragma once

#include <cstdint>

namespace fastln {

constexpr int kWarp = 32;               // threads
constexpr int kRegistersPerSm = 65536;  // on every GPU of compute capability 8.0 or later
constexpr int kMaxDevices = 128;
constexpr int64_t kReservedSharedBytes = 1024;  // of shared memory, that CUDA keeps of each block

struct DeviceFacts {
  int index = 0;
  int major = 0;  // compute capability
  int minor = 0;
  int sms = 0;
  int64_t l2_bytes = 0;
  int64_t shared_bytes_sm = 0;     // of shared memory, a multiprocessor
  int64_t shared_bytes_block = 0;  // and a block, at most
  bool supported = false;          // arch_is_supported(major, minor)
  // Whether the code that runs there was compiled for compute capability 9.0 or later, and so waits for the kernel before
  // it and knows clusters. PTX of an earlier one does not, on a GPU that could.
  bool has_hopper_code = false;
};

// Thread-safe. Throws std::runtime_error when CUDA cannot tell.
const DeviceFacts& device_facts(int device);

// Makes the device current for this library's own CUDA runtime, which is linked statically and not the one that torch
// talks to. Throws std::runtime_error when CUDA refuses.
void make_current(int device);

// False only where CUDA says that the device cannot run this build. A machine without a GPU has none to ask
// of, and may still trace for one.
bool device_is_supported(int device);

// Whether the binary holds code that runs on that compute capability, see code_major().
bool arch_is_supported(int major, int minor);

// The compute capabilities compiled in, as TORCH_CUDA_ARCH_LIST had them ("8.0;9.0;12.0+PTX").
const char* arch_list();

}  // namespace fastln
