#include "device.h"

#include <array>
#include <atomic>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

#include "arch_list.h"

#ifndef FASTLN_ARCH_LIST
#error "setup.py defines FASTLN_ARCH_LIST"
#endif

namespace fastln {

namespace {

int attribute(cudaDeviceAttr attr, int device) {
  int value = 0;
  const cudaError_t err = cudaDeviceGetAttribute(&value, attr, device);
  if (err != cudaSuccess)
    throw std::runtime_error("fastln: cannot query CUDA device " + std::to_string(device) + ": " +
                             cudaGetErrorString(err));
  return value;
}

int code_major_for(int major, int minor) {
  static const std::vector<Arch> archs = parse_archs(FASTLN_ARCH_LIST);
  return code_major(archs, {major, minor});
}

}  // namespace

const DeviceFacts& device_facts(int device) {
  static std::array<DeviceFacts, kMaxDevices> facts;
  static std::array<std::atomic<bool>, kMaxDevices> known{};
  static std::mutex mutex;
  if (device < 0 || device >= kMaxDevices)
    throw std::runtime_error("fastln: CUDA device index " + std::to_string(device) + " is out of range");
  if (!known[device].load(std::memory_order_acquire)) {
    const std::lock_guard<std::mutex> lock(mutex);
    facts[device].index = device;
    facts[device].major = attribute(cudaDevAttrComputeCapabilityMajor, device);
    facts[device].minor = attribute(cudaDevAttrComputeCapabilityMinor, device);
    facts[device].sms = attribute(cudaDevAttrMultiProcessorCount, device);
    facts[device].l2_bytes = attribute(cudaDevAttrL2CacheSize, device);
    facts[device].shared_bytes_sm = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    facts[device].shared_bytes_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    const int code = code_major_for(facts[device].major, facts[device].minor);
    facts[device].supported = code > 0;
    facts[device].has_hopper_code = code >= 9;
    known[device].store(true, std::memory_order_release);
  }
  return facts[device];
}

void make_current(int device) {
  int current = -1;
  cudaError_t err = cudaGetDevice(&current);
  if (err == cudaSuccess && current != device) err = cudaSetDevice(device);
  if (err != cudaSuccess)
    throw std::runtime_error("fastln: cannot use CUDA device " + std::to_string(device) + ": " +
                             cudaGetErrorString(err));
}

bool device_is_supported(int device) {
  static const bool has_driver = [] {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess;
  }();
  return !has_driver || device_facts(device).supported;
}

bool arch_is_supported(int major, int minor) { return code_major_for(major, minor) > 0; }

const char* arch_list() { return FASTLN_ARCH_LIST; }

}  // namespace fastln
