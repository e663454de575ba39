// Runs a model that AOTInductor has compiled, fastln's op in it, without Python:
//
//     ./run libfastln.so model.pt2 ROWS COLS
//
// prints the sum of the absolute values of what the model makes of ROWS x COLS ones.
#include <cstdlib>
#include <iostream>

#include <dlfcn.h>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

int main(int argc, char** argv) {
  if (argc != 5) {
    std::cerr << "usage: " << argv[0] << " libfastln.so model.pt2 ROWS COLS\n";
    return 2;
  }
  // Loading the library registers its ops; nothing needs to be linked, and there is no header of ours.
  if (!dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL)) {
    std::cerr << dlerror() << '\n';
    return 1;
  }
  const c10::InferenceMode inference;
  torch::inductor::AOTIModelPackageLoader model(argv[2]);
  const at::Device device = model.get_metadata().at("AOTI_DEVICE_KEY") == "cuda" ? at::kCUDA : at::kCPU;
  const at::Tensor x = at::ones({std::atoll(argv[3]), std::atoll(argv[4])}, at::device(device));
  std::cout.precision(9);
  std::cout << model.run({x})[0].abs().sum().item<double>() << '\n';
}
