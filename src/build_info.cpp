// Facts of this build as JSON, for fastln.build_info() and fastln.KERNELS.
#include <string>

#include "arch_list.h"
#include "device.h"
#include "kernels.h"

#if !defined(FASTLN_VERSION) || !defined(FASTLN_COMMIT) || !defined(FASTLN_NVCC_VERSION) || \
    !defined(FASTLN_TORCH_VERSION)
#error "setup.py defines FASTLN_VERSION, FASTLN_COMMIT, FASTLN_NVCC_VERSION and FASTLN_TORCH_VERSION"
#endif

namespace {

// ["8.0","9.0"]: the entries of TORCH_CUDA_ARCH_LIST; those with "+PTX" alone when `ptx`.
std::string arch_array(bool ptx) {
  std::string out;
  for (const fastln::Arch& arch : fastln::parse_archs(fastln::arch_list())) {
    if (ptx && !arch.ptx) continue;
    out += (out.empty() ? "\"" : ",\"") + std::to_string(arch.major) + "." + std::to_string(arch.minor) + "\"";
  }
  return "[" + out + "]";
}

const char* dtype_of(const std::string& type) { return type == "half" ? "float16" : "float32"; }

std::string kernel_array() {
  std::string out = "[";
#define FASTLN_KERNEL_JSON(name, Elem, Acc, items, access)                                                     \
  out += std::string(out.size() > 1 ? "," : "") + "{\"name\":\"" #name "\",\"element\":\"" + dtype_of(#Elem) + \
         "\",\"accumulate\":\"" + dtype_of(#Acc) + "\",\"items\":" #items ",\"access\":" #access "}";
  FASTLN_KERNELS(FASTLN_KERNEL_JSON)
#undef FASTLN_KERNEL_JSON
  return out + "]";
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const char* fastln_build_info() {
  static const std::string info = std::string("{\"version\":\"") + FASTLN_VERSION + "\",\"commit\":\"" + FASTLN_COMMIT +
                                  "\",\"arch_list\":\"" + fastln::arch_list() + "\",\"archs\":" + arch_array(false) +
                                  ",\"ptx\":" + arch_array(true) + ",\"nvcc\":\"" + FASTLN_NVCC_VERSION +
                                  "\",\"torch_built\":\"" + FASTLN_TORCH_VERSION +
                                  "\",\"torch_target\":\"2.10\",\"kernels\":" + kernel_array() + "}";
  return info.c_str();
}

// Whether a GPU of that compute capability can run this build.
extern "C" __attribute__((visibility("default"))) int fastln_supports_arch(int major, int minor) {
  return fastln::arch_is_supported(major, minor);
}
