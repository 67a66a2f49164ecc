// Storage types to float and back; all arithmetic is float32.
__device__ inline float to_float(float v) { return v; }
__device__ inline float to_float(__half v) { return __half2float(v); }
__device__ inline float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ inline void store(float& to, float v) { to = v; }
__device__ inline void store(__half& to, float v) { to = __float2half_rn(v); }
__device__ inline void store(__nv_bfloat16& to, float v) { to = __float2bfloat16_rn(v); }
