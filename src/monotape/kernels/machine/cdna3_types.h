// What CUDA's compiler offers without a header and clang's HIP mode does not: the names of the language, words and bits.
#pragma once

#ifdef __HIPCC_RTC__  // hipRTC declares these names before the source: ours are others there
#undef __device__
#undef __host__
#undef __global__
#undef __shared__
#undef __constant__
#undef __forceinline__
#undef __noinline__
#undef __align__
#undef __launch_bounds__
#define uint4 monotape_uint4
#define int4 monotape_int4
#define uint2 monotape_uint2
#define float2 monotape_float2
#define float4 monotape_float4
#define make_uint4 monotape_make_uint4
#define make_int4 monotape_make_int4
#define make_uint2 monotape_make_uint2
#define make_float2 monotape_make_float2
#define __float_as_uint monotape_float_as_uint
#define __float_as_int monotape_float_as_int
#define __uint_as_float monotape_uint_as_float
#define __int_as_float monotape_int_as_float
#define __double_as_longlong monotape_double_as_longlong
#define __longlong_as_double monotape_longlong_as_double
#define __fadd_rn monotape_fadd_rn
#define __fsub_rn monotape_fsub_rn
#define __fmul_rn monotape_fmul_rn
#define __fdiv_rn monotape_fdiv_rn
#define fmaxf monotape_fmaxf
#define ceil monotape_ceil
#define exp monotape_exp
#define log monotape_log
#define log1p monotape_log1p
#endif

#define __device__ __attribute__((device))
#define __host__ __attribute__((host))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__  // a call would need a stack, and no register allocation is shared here that a call would protect
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(threads, blocks) __attribute__((amdgpu_flat_work_group_size(threads, threads)))

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
__device__ __forceinline__ uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
__device__ __forceinline__ int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
__device__ __forceinline__ uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
__device__ __forceinline__ float2 make_float2(float x, float y) { return {x, y}; }

__device__ __forceinline__ unsigned __float_as_uint(float v) { return __builtin_bit_cast(unsigned, v); }
__device__ __forceinline__ int __float_as_int(float v) { return __builtin_bit_cast(int, v); }
__device__ __forceinline__ float __uint_as_float(unsigned v) { return __builtin_bit_cast(float, v); }
__device__ __forceinline__ float __int_as_float(int v) { return __builtin_bit_cast(float, v); }
__device__ __forceinline__ long long __double_as_longlong(double v) { return __builtin_bit_cast(long long, v); }
__device__ __forceinline__ double __longlong_as_double(long long v) { return __builtin_bit_cast(double, v); }

// Rounded on their own, whatever the compiler may contract elsewhere.
__device__ __forceinline__ float __fadd_rn(float a, float b) {
#pragma clang fp contract(off)
  return a + b;
}
__device__ __forceinline__ float __fsub_rn(float a, float b) {
#pragma clang fp contract(off)
  return a - b;
}
__device__ __forceinline__ float __fmul_rn(float a, float b) {
#pragma clang fp contract(off)
  return a * b;
}
__device__ __forceinline__ float __fdiv_rn(float a, float b) { return a / b; }
__device__ __forceinline__ float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
__device__ __forceinline__ double ceil(double v) { return __builtin_ceil(v); }
