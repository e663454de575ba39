"""What the kernels of the same names in LeetCUDA (github.com/xlite-dev/LeetCUDA, kernels/layer-norm), a tutorial, take
on an H200, to be compared with.

Device microseconds a call, cold, measured once with the method of fastln/_timing.py (torch 2.11, CUDA 13,
driver 580). Its kernels take weight and bias as two scalars, so our `.scalar` overloads are their
namesakes. The benchmark does not run that code. Shapes and kernels that are missing were not measured.
"""

MICROSECONDS = {
    (4096, 512): {
        "f16_f16": 13.49,
        "f16_f32": 12.86,
        "f16x2_f16": 7.49,
        "f16x8_f16": 4.83,
        "f16x8_pack_f16": 4.76,
        "f16x8_pack_f32": 4.63,
        "f32": 13.77,
        "f32x4": 6.38,
    },
    (4096, 1024): {
        "f16_f16": 28.0,
        "f16_f32": 26.8,
        "f16x2_f16": 14.4,
        "f16x8_f16": 7.0,
        "f16x8_pack_f16": 6.9,
        "f16x8_pack_f32": 6.7,
        "f32": 28.5,
        "f32x4": 10.9,
    },
    (4096, 4096): {"f16x8_f16": 23.6, "f16x8_pack_f16": 22.7, "f16x8_pack_f32": 22.4, "f32x4": 44.3},
    (8192, 8192): {"f16x8_f16": 123.7, "f16x8_pack_f16": 91.8, "f16x8_pack_f32": 93.7},
}


def seconds(name: str, shape: tuple[int, int]) -> float | None:
    """The tutorial's time for our `layer_norm_<kernel>.scalar`, if it is known."""
    kernel = name.removeprefix("layer_norm_").removesuffix(".scalar")
    microseconds = MICROSECONDS.get(shape, {}).get(kernel)
    return None if microseconds is None else microseconds * 1e-6
